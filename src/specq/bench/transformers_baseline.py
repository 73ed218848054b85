"""transformers' own generate on exactly the weights specq decodes with: the baseline from outside.

A 4-bit model is dequantised for it, since transformers runs no 4-bit format on a CPU by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from specq.models.layers import GPU_ATTENTION
from specq.recipe import Sampling


class TransformersModel:
    """A transformers causal LM with the weights of a folder or .gguf file, in `dtype`.

    What an intermediate was saved without is taken from the `lender`.
    """

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device, lender: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        from specq.models.loader import model_config, model_spec, open_sharing
        from specq.models.shared import Lender, read_shared
        from specq.tensors import open_weights

        logging.set_verbosity_error()  # assisted generation warns of arguments that it makes itself
        config = {k: v for k, v in model_config(path).items() if k != "quantization_config"}
        spec = model_spec(path)
        is_whole = read_shared(path) is None
        weights = open_weights(path, spec) if is_whole else open_sharing(path, spec, Lender(lender, lender.name))[0]
        self.device = device
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype, attn_implementation="sdpa")
        self.model = made.eval().to(device)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights.tensor(name))

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        assistant: TransformersModel | None = None,
    ) -> tuple[list[int], list[tuple[float, int]]]:
        """(new ids, when the first and the last of them came and how many had come by then).

        Without `stop_ids` exactly `max_new_tokens`. Tokens are noted when they are on the host, so on a GPU that is
        after it has made them; an assistant's come several at a time.
        """
        clock = _TokenClock()
        is_sampling = bool(sampling.temperature)
        options: dict[str, Any] = {"do_sample": False}
        if is_sampling:
            options = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p or 1.0,
                "top_k": sampling.top_k or 0,
            }
            torch.manual_seed((sampling.seed or 0) % 2**63)
        if assistant is not None:
            options["assistant_model"] = assistant.model
        prompt = torch.tensor([list(prompt_ids)], device=self.device)
        with sdpa_kernel(list(GPU_ATTENTION)):  # here every token has a new length to plan for
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                repetition_penalty=sampling.repetition_penalty or 1.0,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(stop_ids) or None,
                streamer=clock,
                pad_token_id=0,
                **options,
            )
        came = clock.came[1:]  # the first call hands over the prompt
        return out[0, len(prompt_ids) :].tolist(), [came[0], came[-1]]


class _TokenClock:
    """A transformers streamer that only notes when tokens came."""

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        before = self.came[-1][1] if len(self.came) > 1 else 0
        self.came.append((perf_counter(), before + value.numel()))

    def end(self) -> None:
        pass
