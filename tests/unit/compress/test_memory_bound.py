"""What a layer takes while it is quantized, against the formula that is checked before work starts."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from factories import WeightsInMemory, random_weights, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specq.checkpoint import ModelSpec
from specq.compress.activations import Activations
from specq.compress.layers import LayerQuantizer, Stream
from specq.compress.plan import Settings, activation_bytes, peak_bytes, plan_quantization
from specq.models.rope import RopeTable

CPU = torch.device("cpu")
SEQUENCES, LENGTH = 2, 64


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors alive at once; `known` ones, such as a source's, do not count."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._holders: dict[int, int] = {}
        self._tracked: set[int] = set()
        self._now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and id(tensor) not in self._tracked:
                self._track(tensor)
        self.peak = max(self.peak, self._now)
        return out

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._known:
            return
        self._now += size if place not in self._holders else 0
        self._holders[place] = self._holders.get(place, 0) + 1
        self._tracked.add(id(tensor))
        weakref.finalize(tensor, self._drop, id(tensor), place, size)

    def _drop(self, tensor: int, place: int, size: int) -> None:
        self._tracked.discard(tensor)
        self._holders[place] -= 1
        if self._holders[place] == 0:
            del self._holders[place]
            self._now -= size


@torch.inference_mode()
def test_tensors_alive_stay_within_the_formula_and_come_close_to_it() -> None:
    hidden = 192
    config = tiny_config(hidden_size=hidden, intermediate_size=768, num_attention_heads=4)
    spec, weights = ModelSpec.from_config(config), random_weights(config)
    rope = RopeTable(spec.rope, spec.head_dim, dtype=torch.float32, device=CPU)
    rope.grow(LENGTH)
    settings = Settings()
    plan = plan_quantization(spec, settings)
    with LiveBytes(list(weights.values())) as live:
        streams = tuple(Stream(Activations(CPU, on_host=False), Activations(CPU, on_host=False)) for _ in range(2))
        for stream in streams:
            for index in range(SEQUENCES):
                stream.residual.write(index, torch.randn(1, LENGTH, hidden))
        source = WeightsInMemory(weights)
        quantizer = LayerQuantizer(
            spec, source, plan=plan, settings=settings, rope=rope, streams=(streams[0], streams[1])
        )
        for layer in range(spec.layers):
            quantizer.quantize(layer)
    bound = peak_bytes(spec, itemsize=4) + activation_bytes(spec, SEQUENCES * LENGTH, itemsize=4)
    assert 0.75 * bound < live.peak < bound
