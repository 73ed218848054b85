"""What other engines make of our files, against our own numbers: each reader where it is installed.

compressed-tensors (`pip install compressed-tensors`) is light and exact. GPTQModel is neither: its test is marked
slow and wants an environment of its own: torch 2.13, gptqmodel==7.6.0, optimum, GPTQMODEL_CPU_WORKERS=2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import tiny_config, write_model
from packed_weights import random_packed
from safetensors.torch import load_file, save_file
from torch import Tensor

from specq.checkpoint import ModelSpec, read_config
from specq.compress.report import Report
from specq.models.loader import expected_tensors
from specq.quant.formats import FORMATS, Header, format_name
from specq.quant.packed import integer_zeros
from specq.tensors import open_weights

Run = Callable[..., Report]

IDS = torch.randint(3, 280, (2, 64), generator=torch.Generator().manual_seed(0))

CPU_KERNEL_TOLERANCE = 2e-2
"""GPTQModel's product on a CPU runs in bf16 or so: 1e-2 was seen, a file misread gives 1 and more."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny Llama of sizes that every engine's kernels take, in the type GPTQ's readers know."""
    config = tiny_config(hidden_size=256, intermediate_size=512, num_attention_heads=4)
    return write_model(tmp_path / "source", config, dtype=torch.float16)


def logits_of_reader(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        return model(IDS).logits.float()


def logits_of_ours(folder: Path) -> Tensor:
    """transformers' plain forward pass over the weights as specq reads them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = read_config(folder)
    spec = ModelSpec.from_config(config)
    weights = open_weights(folder, spec)
    plain = AutoConfig.from_pretrained(folder)
    del plain.quantization_config
    model = AutoModelForCausalLM.from_config(plain, dtype=torch.float32)
    model.load_state_dict({name: weights.tensor(name).float() for name in expected_tensors(spec)}, strict=True)
    with torch.inference_mode():
        return model.eval()(IDS).logits


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"group_size": -1},
        {"group_size": 32},
        {"head_bits": 8},
        {"head_bits": 4},
        {"head_bits": 8, "group_size": -1},
    ],
    ids=str,
)
def test_compressed_tensors_reads_exactly_what_we_wrote(run: Run, source: Path, settings: dict[str, Any]) -> None:
    pytest.importorskip("compressed_tensors")
    folder = run(source, format="compressed-tensors", **settings).output
    assert torch.equal(logits_of_reader(folder), logits_of_ours(folder))


@pytest.mark.parametrize("group_size", [64, -1])
def test_compressed_tensors_unpacks_asymmetric_matrices_exactly(run: Run, source: Path, group_size: int) -> None:
    """Through its own unpacking: version 0.19 under transformers 5.24 makes room for zeros that are not packed."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    report = run(source, format="compressed-tensors", symmetric=False, group_size=group_size)
    config = read_config(report.output)
    scheme = QuantizationScheme.model_validate(config["quantization_config"]["config_groups"]["group_0"])
    tensors = load_file(report.output / "model.safetensors")
    ours = open_weights(report.output, ModelSpec.from_config(config))
    for matrix in report.matrices:
        parts = {name.removeprefix(f"{matrix.name}."): part for name, part in tensors.items() if matrix.name in name}
        parts["weight_scale"] = parts["weight_scale"].float()
        found = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert torch.equal(found, ours.tensor(f"{matrix.name}.weight"))


def test_compressed_tensors_notices_codes_in_another_order(run: Run, source: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = run(source, format="compressed-tensors").output
    expected = logits_of_ours(folder)
    rewrite(folder, "weight_packed", _swap_nibbles)
    assert distance(logits_of_reader(folder), expected) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"symmetric": False}, {"stored_order": True}, {"group_size": 64}], ids=str)
def test_gptqmodel_reads_what_we_wrote(run: Run, source: Path, settings: dict[str, Any]) -> None:
    pytest.importorskip("gptqmodel")
    folder = run(source, **settings).output
    assert distance(logits_of_reader(folder), logits_of_ours(folder)) < CPU_KERNEL_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_gptqmodel_reads_a_quantized_head(run: Run, source: Path, bits: int) -> None:
    """Through its own loader; transformers' way by optimum leaves a packed head out, which is warned of."""
    gptqmodel = pytest.importorskip("gptqmodel")
    folder = run(source, head_bits=bits).output
    expected = logits_of_ours(folder)
    model = gptqmodel.GPTQModel.load(str(folder), device="cpu").model
    with torch.inference_mode():
        assert distance(model(IDS).logits.float(), expected) < CPU_KERNEL_TOLERANCE
    assert distance(logits_of_reader(folder), expected) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("part", ["qzeros", "qweight"])
def test_gptqmodel_notices_a_misread_file(run: Run, source: Path, part: str) -> None:
    pytest.importorskip("gptqmodel")
    folder = run(source).output
    expected = logits_of_ours(folder)
    rewrite(folder, part, (lambda words: words + 0x11111111) if part == "qzeros" else _swap_nibbles)
    assert distance(logits_of_reader(folder), expected) > 0.5


def rewrite(folder: Path, part: str, change: Callable[[Tensor], Tensor]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = {name: change(tensor) if name.endswith(part) else tensor for name, tensor in tensors.items()}
    save_file(changed, file, metadata={"format": "pt"})


def _swap_nibbles(words: Tensor) -> Tensor:
    octets = words.contiguous().view(torch.uint8)
    return ((octets >> 4) | (octets << 4)).view(torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, -1])
def test_what_compressed_tensors_writes_is_read_exactly(bits: int, is_symmetric: bool, group_size: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(24, 64, generator=generator)
    groups, largest = (1 if group_size == -1 else 64 // group_size), 1 << (bits - 1)
    # In 16 bits, where the law's product and sum are exact in fp32, in whatever order.
    scale = (torch.rand(24, groups, generator=generator) / largest + 2 / largest).half().float()
    zero = torch.randint(-largest, largest, (24, groups), generator=generator, dtype=torch.int8)
    arguments = {
        "num_bits": bits,
        "symmetric": is_symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero * (not is_symmetric)}
    written = PackedQuantizationCompressor.compress(state, scheme)
    form = FORMATS[format_name("compressed-tensors", bits)]
    headers = {name: Header(tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()}
    assert form.check(headers, group_size) == (24, 64)
    found = form.unpack(written, group_size).dequantize()
    assert torch.equal(found, PackedQuantizationCompressor.decompress(written, scheme)["weight"])
    assert found.unique().numel() > 1 << bits


@pytest.mark.slow
def test_an_awq_matrix_that_gptqmodel_packed_is_read_exactly() -> None:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    packed = random_packed(64, 128, 32, kind="zeros")
    linear = torch.nn.Linear(128, 64, bias=False)
    linear.weight.data = packed.dequantize()
    module = AwqTorchLinear(
        bits=4, group_size=32, sym=False, desc_act=False, in_features=128, out_features=64, register_buffers=True
    )
    zeros = integer_zeros(packed)
    module.pack(linear, packed.scales.float(), zeros.float())
    written = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
    found = FORMATS["awq"].unpack(written, 32)
    assert torch.equal(found.unpacked(), packed.unpacked())
    assert torch.equal(integer_zeros(found), zeros)
    assert torch.equal(found.scales, packed.scales)
