"""Updates of fp32 master weights, whatever the dtype the parameters compute in, and the file that keeps both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specq.files import write_atomically

BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
TASK_STATE = "task"


class MasterWeights:
    """An optimiser whose weights are fp32: AdamW, or Muon for matrices and AdamW for the rest; no weight decay.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate serves both (arXiv 2502.16982).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, kind: str) -> None:
        """`kind` is "adamw" or "muon"."""
        self._parameters = dict(parameters)
        self._masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
        masters = list(self._masters.values())
        matrices = [master for master in masters if kind == "muon" and master.ndim == 2]
        rest = [master for master in masters if kind != "muon" or master.ndim != 2]
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)
        if rest:
            self._optimizers.append(torch.optim.AdamW(rest, lr=0.0, betas=BETAS, weight_decay=0.0))

    def step(self, rate: float) -> None:
        """One update from the parameters' gradients, which are cleared."""
        for name, parameter in self._parameters.items():
            self._masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters.values(), CLIP_NORM)
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])

    def save(self, file: Path, progress: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        """Weights, moments, `state` and `progress`, which JSON takes, as one file that is whole or not there."""
        tensors = {f"weight/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(master, {}).items():
                    tensors[f"{key}/{name}"] = value
        tensors |= {f"{TASK_STATE}/{name}": value for name, value in state.items()}
        metadata = {"progress": json.dumps(dict(progress))}
        with write_atomically(file) as path:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)

    @torch.no_grad()
    def load(self, file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(progress, state) of a saved file, whose weights and moments are taken over."""
        state: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as saved:
            progress: dict[str, Any] = json.loads(saved.metadata()["progress"])
            for key in sorted(saved.keys()):
                kind, _, name = key.partition("/")
                value = saved.get_tensor(key)
                if kind == TASK_STATE:
                    state[name] = value
                    continue
                master = self._masters[name]
                if kind == "weight":
                    master.copy_(value)
                    continue
                owner = next(
                    each for each in self._optimizers if any(p is master for p in each.param_groups[0]["params"])
                )
                owner.state[master][kind] = value if kind == "step" else value.to(master.device)
        self._publish()
        return progress, state
