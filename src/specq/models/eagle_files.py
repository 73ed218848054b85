"""The tensors of a head's folder and its config: what form of head they are, and whether they fit a target.

Configs of published heads are unreliable (`bias: false` beside a bias, SafeAILab/EAGLE#100): biases, embeddings and
trimmed vocabularies are decided by presence, the rest is checked against the target before any weight is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from specq.checkpoint import ModelSpec, QuantSpec, RopeSpec, read_config
from specq.errors import UnsupportedError
from specq.models.eagle import HeadSpec
from specq.models.eagle_writer import stored_head_bits
from specq.quant.packed import PackedWeight
from specq.tensors import FolderWeights

FORMS_HINT = "specq reads EAGLE-1, EAGLE-2 and EAGLE-3 heads as their authors publish them"
RENAMED = (("model.", ""), ("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."))
"""How other trainers call the same tensors, as prefixes."""

ATTENTION, MLP = "layers.0.self_attn.", "layers.0.mlp."
PRODUCTS = (
    *(f"{ATTENTION}{name}_proj" for name in "qkvo"),
    *(f"{MLP}{name}_proj" for name in ("gate", "up", "down")),
)
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
MLP_NORM = "layers.0.post_attention_layernorm.weight"
EAGLE3_NORMS = {
    "embedding": "layers.0.input_layernorm.weight",
    "feature": "layers.0.hidden_norm.weight",
    "output": "norm.weight",
}


class HeadSource(Protocol):
    """Where the tensors of a head come from; see tensors.FolderWeights."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...

    def integers(self, name: str) -> Tensor: ...

    def linear(self, prefix: str) -> Tensor | PackedWeight: ...


class HeadFiles:
    """The tensors of a head's folder under one set of names, its config, and what follows from both."""

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        quantization = config.get("quantization_config")
        self._read(config, FolderWeights(folder, QuantSpec.from_config(quantization) if quantization else None))
        self.head_bits = stored_head_bits(folder)

    @classmethod
    def from_source(cls, config: dict[str, Any], source: HeadSource) -> HeadFiles:
        """A head whose tensors do not lie in a folder."""
        files = cls.__new__(cls)
        files._read(config, source)
        return files

    def _read(self, config: dict[str, Any], source: HeadSource) -> None:
        self.config, self._source, self.head_bits = config, source, 16
        self._names = {_plain_name(name): name for name in source.names()}
        self.is_eagle3 = EAGLE3_NORMS["feature"] in self._names
        self._refuse_unknown()
        self.hidden, self.fc_inputs = self.shape("fc.weight")

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._names[name])

    def tensor(self, name: str) -> Tensor:
        return self._source.tensor(self._names[name])

    def integers(self, name: str) -> Tensor:
        return self._source.integers(self._names[name])

    def linear(self, prefix: str) -> Any:
        return self._source.linear(self._names[f"{prefix}.weight"].removesuffix(".weight"))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its name here, packed matrices dequantised, vocabulary maps as whole numbers."""
        whole = {"d2t", "t2d"}
        return {name: self.integers(name) if name in whole else self.tensor(name) for name in self._names}

    def spec(self, target_layers: int) -> HeadSpec:
        """What the head is; sizes come from the tensors, the number of heads from the config."""
        heads = int(self.config["num_attention_heads"])
        kv_heads = int(self.config.get("num_key_value_heads") or heads)
        return HeadSpec(
            hidden=self.hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.shape(f"{ATTENTION}q_proj.weight")[0] // heads,
            intermediate=self.shape(f"{MLP}gate_proj.weight")[0],
            norm_eps=float(self.config.get("rms_norm_eps", 1e-6)),
            vocab=self.draft_vocab,
            feature_layers=self._feature_layers(target_layers) if self.is_eagle3 else None,
        )

    @property
    def draft_vocab(self) -> int:
        """Ids the head itself has logits for."""
        if self.has(OUTPUT):
            return self.shape(OUTPUT)[0]
        # Without a trimmed vocabulary the target's own head is used, padding and all.
        return len(self.integers("d2t")) if self.has("d2t") else int(self.config["vocab_size"])

    def copied_bytes(self, target: ModelSpec, head_bits: int | None = None) -> int:
        """What a copy of the output head in fewer bits takes in memory, 0 where the target's own drafts."""
        bits = self.head_bits if head_bits is None else head_bits
        rows = self.draft_vocab if self.has("d2t") or self.has(OUTPUT) else target.vocab
        return 0 if bits == 16 else rows * self.hidden * bits // 8

    @property
    def rope(self) -> RopeSpec:
        """The head's own rotary base, never the target's: heads exist that were trained with another."""
        return RopeSpec.from_config(self.config, max_positions=int(self.config.get("max_position_embeddings") or 2048))

    def check_fit(self, spec: ModelSpec, *, ids: int | None = None) -> None:
        """Raise UnsupportedError naming the first thing that does not go with a target of this spec.

        `ids` is how many ids its tokenizer has; without it every row of the target's embedding counts.
        """
        self.check_sizes(spec)
        self.check_vocabulary(spec.vocab if ids is None else ids)
        _ = self.rope

    def check_sizes(self, spec: ModelSpec) -> None:
        """Raise UnsupportedError naming the first tensor that does not go with this target or with the others."""
        expected = 3 * spec.hidden if self.is_eagle3 else 2 * spec.hidden
        if self.fc_inputs != expected or (not self.is_eagle3 and self.hidden != spec.hidden):
            raise UnsupportedError(
                f"the head's fc is [{self.hidden}, {self.fc_inputs}] and the target's hidden size is {spec.hidden}",
                hint="take the head made for this model: specq fetch MODEL knows some",
            )
        for name, what in ((EMBEDDING, "embedding"), (OUTPUT, "output matrix")):
            if not self.has(name) and self.hidden != spec.hidden:
                raise UnsupportedError(
                    f"the head has hidden size {self.hidden}, the target {spec.hidden}, and brings no {what}",
                    hint="take the head made for this model",
                )
        if self.is_eagle3 and not all(0 <= layer <= spec.layers for layer in self._feature_layers(spec.layers)):
            raise UnsupportedError(
                f"the head reads layers {list(self._feature_layers(spec.layers))} of a target with {spec.layers}",
                hint="take the head made for this model",
            )
        for name, shape in self._expected_shapes().items():
            if self.has(name) and self.shape(name) != shape:
                raise UnsupportedError(
                    f"`{name}` of the head is {list(self.shape(name))}, its other tensors and config say {list(shape)}",
                    hint="check that config.json belongs to these weights",
                )

    def check_vocabulary(self, ids: int) -> None:
        """Raise UnsupportedError unless the head reads every id below `ids` and drafts no other."""
        rows, complete = self.draft_vocab, "take a complete copy of the head"
        if self.has(EMBEDDING) and self.shape(EMBEDDING)[0] < ids:
            raise UnsupportedError(
                f"the head's embedding has {self.shape(EMBEDDING)[0]} rows for {ids} ids",
                hint="take the head made for this model",
            )
        if not self.has("d2t"):
            if self.has(OUTPUT) and rows < ids:
                raise UnsupportedError(
                    f"the head knows {rows} of {ids} ids and has no `d2t` that says which", hint=complete
                )
            return
        offsets = self.integers("d2t").tolist()
        if len(offsets) != rows:
            raise UnsupportedError(f"`d2t` of the head has {len(offsets)} entries for {rows} rows", hint=complete)
        outside = [index + offset for index, offset in enumerate(offsets) if not 0 <= index + offset < ids]
        if outside:
            raise UnsupportedError(f"`d2t` of the head names id {outside[0]}, there are {ids} ids", hint=complete)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor a head may have, from the number of heads and the rows of a few of them."""
        head = self.spec(target_layers=8)  # layer numbers do not matter to shapes
        hidden, middle = self.hidden, head.intermediate
        inputs = 2 * hidden if self.is_eagle3 else hidden
        q, kv = head.heads * head.head_dim, head.kv_heads * head.head_dim
        expected: dict[str, tuple[int, ...]] = {"fc.bias": (hidden,), MLP_NORM: (hidden,)}
        expected |= dict.fromkeys(EAGLE3_NORMS.values(), (hidden,))
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            expected |= {f"{ATTENTION}{name}_proj.weight": (rows, inputs), f"{ATTENTION}{name}_proj.bias": (rows,)}
        expected |= {
            f"{ATTENTION}o_proj.weight": (hidden, q),
            f"{MLP}gate_proj.weight": (middle, hidden),
            f"{MLP}up_proj.weight": (middle, hidden),
            f"{MLP}down_proj.weight": (hidden, middle),
        }
        return expected | {name: (self.shape(name)[0], hidden) for name in (EMBEDDING, OUTPUT) if self.has(name)}

    def _feature_layers(self, target_layers: int) -> tuple[int, ...]:
        """The layers whose entering states an EAGLE-3 head reads: early, middle and late unless the config says."""
        named = self.config.get("eagle_aux_hidden_state_layer_ids")
        return tuple(named) if named else (2, target_layers // 2, target_layers - 3)

    def _refuse_unknown(self) -> None:
        """Raise unless the tensors are exactly those of one of the known forms."""
        needed = {"fc.weight", MLP_NORM, *(f"{name}.weight" for name in PRODUCTS)}
        biases = {f"{ATTENTION}{name}_proj.bias" for name in "qkv"}
        optional = {"fc.bias", EMBEDDING, OUTPUT, "d2t", "t2d"} | biases
        if self.is_eagle3:
            needed |= set(EAGLE3_NORMS.values())
        missing = sorted(needed - self._names.keys())
        if "fc.weight" in missing and "norm.weight" in self._names:
            raise UnsupportedError(
                "these are the weights of a whole model, and no EAGLE head's: they lack `fc.weight`",
                hint="a whole model drafts with --pipeline sequence --intermediate MODEL",
            )
        if missing:
            raise UnsupportedError(f"the head lacks `{missing[0]}`", hint=FORMS_HINT)
        extra = sorted(name for name in self._names.keys() - needed - optional if "rotary_emb" not in name)
        if extra:
            raise UnsupportedError(f"the head holds `{extra[0]}`, which no form that specq reads has", hint=FORMS_HINT)
        if len(biases & self._names.keys()) not in (0, len(biases)):
            raise UnsupportedError("the head has a bias on some of q, k and v only", hint=FORMS_HINT)
        matrices = {EMBEDDING, OUTPUT, *(name for name in needed if name.endswith(("fc.weight", "proj.weight")))}
        flat = sorted(name for name in matrices & self._names.keys() if len(self.shape(name)) != 2)
        if flat:
            raise UnsupportedError(
                f"`{flat[0]}` of the head is {list(self.shape(flat[0]))}, not a matrix", hint=FORMS_HINT
            )
        for key in ("num_attention_heads", "vocab_size"):
            if not isinstance(self.config.get(key), int) or self.config[key] < 1:
                raise UnsupportedError(f"`{key}` in the head's config is `{self.config.get(key)}`", hint=FORMS_HINT)
        if self.config.get("bias") is True and not self.has("fc.bias"):
            raise UnsupportedError(
                "the head's config promises a bias of fc, and its weights have none", hint=FORMS_HINT
            )


def _plain_name(name: str) -> str:
    for theirs, ours in RENAMED:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name
