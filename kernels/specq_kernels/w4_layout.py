"""The 4-bit weight as the kernel reads it: packed once at load, one layout for every number of rows.

Layout. `packed` int32 [N/16, K/64, 128]: lane (g = lane/4, t = lane%4) of a warp owns four contiguous words, one for
each 16 k. Bits 4*(h + 2r) + 16j of a word hold row n = 16*block + 8h + g at k = 16*word + 8r + 2t + j: exactly the
register fragment of a 64x16 wgmma A operand (and of mma.sync), so a tile goes from memory to the tensor core in
registers, 16 bytes a lane, and never passes through shared memory.
`meta` int32 [K/256, words, N]: what a step of 256 k needs for a row n, by form (lower half of a word first):
  symmetric  the scales of two groups                               (zero point 8)
  zeros      scale, integer zero point                              (offset = -zero * scale, formed in fp32)
  minima     scale, 16-bit minimum                                  (offset = minimum)
  two-level  word 0: d, dmin; words 1-2: eight byte scales; words 3-4: eight byte minima
             (scale = d * byte, offset = -dmin * byte: GGUF Q4_K, groups of 32)
N is padded to 128 and K to 256 with scale 0; the kernel also skips x beyond K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 256  # k of one pass of the kernel's loop
ROW_MULTIPLE = 128
FORMS = ("symmetric", "zeros", "minima", "two-level")
KERNEL_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class W4Weight:
    """A packed 4-bit matrix [N, K]; law w = scale * q + offset per group (see the module's docstring)."""

    packed: Tensor  # int32 [N/16, K/64, 128], padded
    meta: Tensor  # int32 [K/256, words, N], padded
    counters: Tensor  # int32 [N/64], zero between calls: split-K's arrivals; one stream at a time
    shape: tuple[int, int]
    group_size: int  # 32, 64 or 128: the kernel's group, also the group of `sums`
    form: str  # one of FORMS
    scale_dtype: torch.dtype
    is_gate_up: bool  # rows interleaved by 8 for the fused SiLU: gate 0-7, up 0-7, gate 8-15, ...

    @property
    def padded(self) -> tuple[int, int]:
        return self.packed.shape[0] * 16, self.meta.shape[0] * STEP

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def num_bytes(self) -> int:
        return 4 * (self.packed.numel() + self.meta.numel())

    def scale_offset(self) -> tuple[Tensor, Tensor]:
        """Scale and offset, fp32 [N, groups] each, padding and row order of the packed form."""
        words = self.meta.permute(2, 0, 1)  # [N, steps, words]
        low, high = words & 0xFFFF, (words >> 16) & 0xFFFF
        if self.form == "two-level":
            d, dmin = self._half(low[..., :1]), self._half(high[..., :1])
            factors = words[..., 1:].contiguous().view(torch.uint8).float()  # [N, steps, 16]
            return (d * factors[..., :8]).flatten(1), (-dmin * factors[..., 8:]).flatten(1)
        if self.form == "symmetric":
            scale = self._half(torch.stack([low, high], -1)).flatten(1)
            return scale, -8 * scale
        scale = self._half(low).flatten(1)
        offset = -high.flatten(1).float() * scale if self.form == "zeros" else self._half(high).flatten(1)
        return scale, offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix in `dtype`, [N, K], without padding and in the order it was given."""
        w = self.padded_matrix()[:, : self.shape[1]].to(dtype)
        if not self.is_gate_up:
            return w[: self.shape[0]]
        halves = w.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(1, 2)  # [2, padded rows, K]
        return halves[:, : self.shape[0] // 2].flatten(0, 1)

    def padded_matrix(self) -> Tensor:
        """The matrix in fp32 with its padding, rows in the packed order."""
        q = unpack_codes(self.packed, self.padded[1])
        scale, offset = (t.repeat_interleave(self.group_size, 1) for t in self.scale_offset())
        return q * scale + offset

    def _half(self, bits: Tensor) -> Tensor:
        return bits.to(torch.int32).to(torch.int16).view(self.scale_dtype).float()


def pack_w4(
    codes: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    zeros: Tensor | None = None,
    minima: Tensor | None = None,
    sub_scales: Tensor | None = None,
    sub_minima: Tensor | None = None,
    is_gate_up: bool = False,
) -> W4Weight:
    """The kernel's form of a 4-bit matrix.

    codes int32 [N, K/8], low nibble first along K; scales 16-bit [N, G]; group_size 32, 64, a multiple of 128, or K or
    -1 (per channel). zeros uint8 [N, G] and minima 16-bit [N, G] exclude each other; neither means zero point 8.
    Two-level (Q4_K): scales = d and minima = dmin, [N, K/256], with sub_scales and sub_minima uint8 [N, K/32].
    is_gate_up: the first half of the rows is gate, the second up; `w4a16_silu` multiplies it.
    Raises ValueError on a group the kernel does not run.
    """
    n, k = codes.shape[0], codes.shape[1] * 8
    is_channel = group_size == -1 or group_size >= k
    kernel_group = 128 if is_channel or group_size % 128 == 0 else group_size
    if kernel_group not in KERNEL_GROUPS:
        raise ValueError(f"group_size: {group_size} is not 32, 64, a multiple of 128 or the whole row")
    if scales.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"scales: dtype is {scales.dtype}, expected torch.float16 or torch.bfloat16")
    if zeros is not None and minima is not None:
        raise ValueError("zeros: given together with minima")
    padded_k = -(-k // STEP) * STEP
    if sub_scales is not None and sub_minima is not None and minima is not None:
        form, words = "two-level", _two_level_words(scales, minima, sub_scales, sub_minima)
    else:
        form = "symmetric" if zeros is None and minima is None else "zeros" if minima is None else "minima"
        groups = padded_k // kernel_group
        repeat = groups if is_channel else group_size // kernel_group
        high = zeros if zeros is not None else minima
        spread = [_bits(t).repeat_interleave(repeat, 1)[:, :groups] for t in (scales, high) if t is not None]
        spread = [torch.nn.functional.pad(t, (0, groups - t.shape[1])) for t in spread]
        words = _step_words(spread[0], spread[1] if high is not None else None, padded_k // STEP)
    if is_gate_up and n % 16:
        raise ValueError(f"codes: a gate and up matrix needs a multiple of 16 rows, not {n}")
    half = -(-n // (2 * ROW_MULTIPLE)) * ROW_MULTIPLE
    padded_n = 2 * half if is_gate_up else -(-n // ROW_MULTIPLE) * ROW_MULTIPLE
    codes, words = (_arrange_rows(t, padded_n, is_gate_up) for t in (codes, words))
    steps = padded_k // STEP
    words = torch.nn.functional.pad(words, (0, 0, 0, steps - words.shape[1]))
    return W4Weight(
        packed=pack_codes(codes, padded_k),
        meta=words.permute(1, 2, 0).contiguous(),
        counters=torch.zeros(padded_n // 64, dtype=torch.int32, device=codes.device),
        shape=(n, k),
        group_size=kernel_group,
        form=form,
        scale_dtype=scales.dtype,
        is_gate_up=is_gate_up,
    )


def pack_codes(codes: Tensor, padded_k: int) -> Tensor:
    """int32 [N/16, K/64, 128] from codes int32 [N, K/8], low nibble first; N must divide by 16."""
    out = torch.empty(codes.shape[0] // 16, padded_k // 64, 512, dtype=torch.uint8, device=codes.device)
    shifts = torch.tensor([0, 4], dtype=torch.uint8, device=codes.device)
    for first in range(0, codes.shape[0], 4096):  # bounds the unpacked copy: 4096 rows of 8192 are 32 MB
        part = codes[first : first + 4096].contiguous().view(torch.uint8)  # [rows, K/2]
        part = torch.nn.functional.pad(part, (0, padded_k // 2 - part.shape[1]))
        q = ((part.unsqueeze(-1) >> shifts) & 15).flatten(1)  # [rows, K]
        q = q.view(-1, 2, 8, padded_k // 64, 4, 2, 4, 2)  # nb h g kc kb r t j
        q = q.permute(0, 3, 2, 6, 4, 7, 5, 1)  # nb kc g t kb j r h: a byte is rows h = 0 (low) and 1
        out[first // 16 : first // 16 + q.shape[0]] = (q[..., 0] | (q[..., 1] << 4)).reshape(-1, *out.shape[1:])
    return out.view(torch.int32)


def unpack_codes(packed: Tensor, padded_k: int) -> Tensor:
    """q uint8 [N, K] of `pack_codes`'s result, padding included."""
    octets = packed.view(torch.uint8)
    q = torch.stack([octets & 15, octets >> 4], -1)
    q = q.view(packed.shape[0], packed.shape[1], 8, 4, 4, 2, 2, 2)  # nb kc g t kb j r h
    return q.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(packed.shape[0] * 16, padded_k)


def _bits(t: Tensor) -> Tensor:
    """The low 16 bits of each entry as int32: a 16-bit float's bits, or the integer itself."""
    return t.to(torch.int32) if t.dtype == torch.uint8 else t.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _step_words(scales: Tensor, high: Tensor | None, steps: int) -> Tensor:
    """int32 [N, steps, words] of the one-level forms, from 16-bit fields [N, groups]."""
    words = scales[:, 0::2] | (scales[:, 1::2] << 16) if high is None else scales | (high << 16)
    return words.unflatten(1, (steps, -1))


def _two_level_words(d: Tensor, dmin: Tensor, sub_scales: Tensor, sub_minima: Tensor) -> Tensor:
    first = (_bits(d) | (_bits(dmin) << 16)).unsqueeze(-1)  # [N, steps, 1]
    factors = torch.stack([sub_scales, sub_minima], -1).unflatten(1, (-1, 8)).transpose(2, 3)  # [N, steps, 2, 8]
    return torch.cat([first, factors.contiguous().view(torch.int32).flatten(2)], -1)


def _arrange_rows(t: Tensor, padded_n: int, is_gate_up: bool) -> Tensor:
    """Rows padded with zeros; gate and up interleaved by 8."""
    parts = t.chunk(2) if is_gate_up else (t,)
    rows = padded_n // len(parts)
    parts = tuple(torch.cat([p, p.new_zeros(rows - p.shape[0], *p.shape[1:])]) if rows > len(p) else p for p in parts)
    if not is_gate_up:
        return parts[0]
    return torch.stack([p.unflatten(0, (-1, 8)) for p in parts], 1).flatten(0, 2)
