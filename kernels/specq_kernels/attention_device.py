"""Device code of tree_attention: attention over pieces of the keys, and their merge.

What makes a row's bits the same however the work is divided: keys are cut into leaves at fixed slots and a leaf's
softmax starts afresh; the running maximum (log2) is rounded up to a whole number, so that every rescaling multiplies by
an exact power of two; weights are totalled in whole units of 2 ** -22; FOLD leaves are added one after the other, then
these sums likewise, whoever adds them; and the matrix unit adds 16 keys at a time, in order, in either of its
instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specq_kernels.lane_order import store_lanes

UNIT = tl.constexpr(2.0**-22)


@triton.jit
def _leaf_size(position, LEAF: tl.constexpr, LEAVES: tl.constexpr):
    """Keys a leaf for a row at this position: LEAF, doubled until LEAVES of them hold all up to the position."""
    doublings = 0
    for i in tl.static_range(16):
        doublings += (position >= ((LEAVES * LEAF) << i)).to(tl.int32)
    return LEAF << doublings


@triton.jit
def _power(n):
    """2 ** n of a whole n <= 0, exactly; 0 from -127 down."""
    return ((tl.maximum(n, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _add_tile(acc, top, total, scores, scale, values):
    """One step of a leaf's softmax; rows that see nothing yet stay at weight 0.

    Fused multiply-adds are written out: a tile may be masked in one call and plain in another, to the same bits.
    """
    new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1) * scale))
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(scores, scale, -safe[:, None]))
    decay = _power(top - safe)
    units = tl.sum((weights + 2.0).to(tl.int32, bitcast=True) - 0x40000000, 1)  # of 2 ** -22
    total = tl.fma(total, decay, units.to(tl.float32) * UNIT)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _fold(whole, whole_top, whole_total, acc, top, total):
    """A leaf added to those before it; one without keys changes nothing."""
    new_top = tl.maximum(whole_top, top)
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    decay, weight = _power(whole_top - safe), _power(top - safe)
    whole = tl.fma(acc, weight[:, None], whole * decay[:, None])
    return whole, new_top, tl.fma(total, weight, whole_total * decay)


@triton.jit
def _nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(acc, top, total) of no keys."""
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    return tl.zeros((ROWS, COLUMNS), tl.float32), top, tl.zeros((ROWS,), tl.float32)


@triton.jit
def _end_leaf(start, leaf, acc, top, total, whole, whole_top, whole_total, FOLDED: tl.constexpr):
    """The sums as the tile at `start` finds them: of its leaf, and of the leaves that ended before it."""
    if FOLDED > 1:  # noqa: SIM102 - decided when compiling, the next one when running
        if start % leaf == 0:
            whole, whole_top, whole_total = _fold(whole, whole_top, whole_total, acc, top, total)
            acc, top, total = _nothing(acc.shape[0], acc.shape[1])
    return acc, top, total, whole, whole_top, whole_total


@triton.jit(do_not_specialize=["nodes", "written", "window"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, depth_ptr, length_ptr, partial_ptr, top_ptr, total_ptr,
    nodes, written, max_len, scale, window,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, LEAF: tl.constexpr, LEAVES: tl.constexpr, FOLDED: tl.constexpr, WINDOWED: tl.constexpr,
    STAGES: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Unnormalised attention of BLOCK_Q rows (node, head of the kv head's group) over one piece: FOLDED leaves, 1 or
    FOLD.

    `written` slots behind the length hold nodes, the last `nodes` of them this call's. partial [pieces, kv_heads, rows,
    HEAD_DIM]; top (running maximum, log2) and total [pieces, kv_heads, rows]. Pieces run from the last, which has most
    to do, to the first; where the rows' positions lie on both sides of one at which a leaf's size doubles, those of
    the rows behind it follow.
    """
    if EARLY and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(length_ptr, cache_modifier=".cg")  # not of the kernel ahead
    kv_head = tl.program_id(0)
    base = kv_head.to(tl.int64) * max_len * HEAD_DIM
    seen = length + written
    first = seen - nodes  # slot of the first row's node
    size = _leaf_size(first, LEAF, LEAVES)
    piece = tl.minimum(tl.cdiv(seen, size * FOLDED), LEAVES // FOLDED) - 1 - tl.program_id(2)
    is_behind = piece < 0  # the position at which leaves double
    leaf = tl.where(is_behind, size * 2, size)
    piece += tl.where(is_behind & (seen > LEAVES * size), tl.cdiv(seen, leaf * FOLDED), 0)
    if piece < 0:
        return
    begin = piece * leaf * FOLDED
    end = tl.minimum(seen, begin + leaf * FOLDED)
    rows = nodes * SHARED
    row = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_query = row < rows
    node = row // SHARED
    head = kv_head * SHARED + row % SHARED
    offs_d = tl.arange(0, BLOCK_D)
    is_d = offs_d < HEAD_DIM
    if EARLY:
        tl.extra.cuda.gdc_wait()
    q = tl.load(
        q_ptr + (node * (KV_HEADS * SHARED) + head)[:, None] * HEAD_DIM + offs_d[None, :],
        mask=is_query[:, None] & is_d[None, :], other=0.0,
    )  # fmt: skip
    low = tl.load(mask_ptr + node * 2, mask=is_query, other=0)
    high = tl.load(mask_ptr + node * 2 + 1, mask=is_query, other=0)
    depth = tl.zeros((BLOCK_Q,), tl.int32)
    if WINDOWED:
        depth = tl.load(depth_ptr + node, mask=is_query, other=0)
    is_row = is_query & ((first + node >= LEAVES * size) == is_behind)
    acc, top, total = _nothing(BLOCK_Q, BLOCK_D)
    whole, whole_top, whole_total = acc, top, total
    # tiles wholly inside the committed prefix need no mask, those before every row's window are skipped
    plain_end = tl.minimum(length // LEAF * LEAF, end)
    start_at = begin
    if WINDOWED:
        start_at = tl.maximum(begin, (length - window + 1) // LEAF * LEAF)
        plain_end = start_at
    for start in tl.range(start_at, plain_end, LEAF, num_stages=STAGES):
        offs = base + (start + tl.arange(0, LEAF))[:, None] * HEAD_DIM + offs_d[None, :]
        if HEAD_DIM == BLOCK_D:
            keys = tl.load(k_ptr + offs)
            values = tl.load(v_ptr + offs)
        else:
            keys = tl.load(k_ptr + offs, mask=is_d[None, :], other=0.0)
            values = tl.load(v_ptr + offs, mask=is_d[None, :], other=0.0)
        scores = tl.dot(q, keys.T, input_precision="ieee")
        acc, top, total, whole, whole_top, whole_total = _end_leaf(
            start, leaf, acc, top, total, whole, whole_top, whole_total, FOLDED
        )
        acc, top, total = _add_tile(acc, top, total, scores, scale, values)
    for start in tl.range(tl.maximum(start_at, plain_end), end, LEAF, num_stages=1):
        slot = start + tl.arange(0, LEAF)
        is_key = slot < end
        offs = base + slot[:, None] * HEAD_DIM + offs_d[None, :]
        keys = tl.load(k_ptr + offs, mask=is_key[:, None] & is_d[None, :], other=0.0)
        values = tl.load(v_ptr + offs, mask=is_key[:, None] & is_d[None, :], other=0.0)
        scores = tl.dot(q, keys.T, input_precision="ieee")
        other = slot - length  # the node in this slot
        shift = (tl.maximum(other, 0) & 31)[None, :]
        bit = tl.where((other < 32)[None, :], low[:, None] >> shift, high[:, None] >> shift) & 1
        visible = ((other < 0)[None, :] | (bit != 0)) & is_key[None, :]
        if WINDOWED:
            ancestor = tl.load(depth_ptr + tl.maximum(other, 0), mask=(other >= 0) & is_key, other=0)
            at = tl.where(other < 0, slot, length + ancestor)
            visible = visible & ((length + depth)[:, None] - at[None, :] < window)
        scores = tl.where(visible, scores, -float("inf"))
        acc, top, total, whole, whole_top, whole_total = _end_leaf(
            start, leaf, acc, top, total, whole, whole_top, whole_total, FOLDED
        )
        acc, top, total = _add_tile(acc, top, total, scores, scale, values)
    if FOLDED > 1:
        acc, top, total = _fold(whole, whole_top, whole_total, acc, top, total)
    if EARLY and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    to = (piece * KV_HEADS + kv_head) * rows + row
    to_part = partial_ptr + to[:, None].to(tl.int64) * HEAD_DIM + offs_d[None, :]
    tl.store(to_part, acc, mask=is_row[:, None] & is_d[None, :])
    tl.store(top_ptr + to, top, mask=is_row)
    tl.store(total_ptr + to, total, mask=is_row)


@triton.jit(do_not_specialize=["nodes", "written"])
def attention_merge_kernel(
    partial_ptr, top_ptr, total_ptr, length_ptr, out_ptr, sums_ptr, lanes_ptr, nodes, written,
    HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    LEAF: tl.constexpr, LEAVES: tl.constexpr, FOLD: tl.constexpr, FOLDED: tl.constexpr, BLOCK_P: tl.constexpr,
    BATCH: tl.constexpr, GROUP: tl.constexpr, STRIDE: tl.constexpr, LANES: tl.constexpr, LATE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Pieces of FOLDED leaves added up FOLD leaves at a time, for BLOCK_R rows (node, head) a program.

    BATCH sums of FOLD leaves are loaded at once. Group sums of the output, `sums` [groups, STRIDE], where GROUP is not
    0: a warp adds them a row at a time, so that their bits do not depend on BLOCK_R. The output in lane order of LANES
    rows where LANES is not 0.
    """
    if EARLY and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(length_ptr, cache_modifier=".cg")  # not of the kernel ahead
    flat = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    node = flat // HEADS
    head = flat % HEADS
    is_row = node < nodes
    offs_d = tl.arange(0, BLOCK_D)
    is_d = offs_d < HEAD_DIM
    rows = nodes * SHARED
    stride = (HEADS // SHARED) * rows  # entries a piece
    row = (head // SHARED) * rows + node * SHARED + head % SHARED
    slot = length + written - nodes + node  # a node sees no later ones
    pieces = slot // (_leaf_size(slot, LEAF, LEAVES) * FOLDED) + 1
    most = tl.max(tl.where(is_row, pieces, 0), 0)
    offs_p = tl.arange(0, BLOCK_P)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()
    is_piece = is_row[:, None] & (offs_p[None, :] < pieces[:, None])
    tops = tl.load(top_ptr + offs_p[None, :] * stride + row[:, None], mask=is_piece, other=-float("inf"))
    best = tl.where(is_row, tl.max(tops, 1), 0.0)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    EACH: tl.constexpr = FOLD // FOLDED
    for begin in tl.range(0, most, BATCH * EACH, num_stages=1):
        for i in tl.static_range(BATCH):
            part = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
            part_total = tl.zeros((BLOCK_R,), tl.float32)
            for j in tl.static_range(EACH):
                piece = begin + i * EACH + j
                is_here = is_row & (piece < pieces)
                at = piece * stride + row
                weight = _power(tl.load(top_ptr + at, mask=is_here, other=-float("inf")) - best)
                values = tl.load(
                    partial_ptr + at[:, None].to(tl.int64) * HEAD_DIM + offs_d[None, :],
                    mask=is_here[:, None] & is_d[None, :], other=0.0,
                )  # fmt: skip
                part = tl.fma(values, weight[:, None], part)
                part_total = tl.fma(tl.load(total_ptr + at, mask=is_here, other=0.0), weight, part_total)
            acc += part
            total += part_total
    y = (acc / tl.where(is_row, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + flat[:, None] * HEAD_DIM + offs_d[None, :], y, mask=is_row[:, None] & is_d[None, :])
    if GROUP > 0:
        groups: tl.constexpr = BLOCK_R * BLOCK_D // GROUP
        per_node: tl.constexpr = HEADS * HEAD_DIM // GROUP
        sums = tl.sum(tl.reshape(y.to(tl.float32), (groups, GROUP)), 1)
        index = tl.program_id(0) * groups + tl.arange(0, groups)
        tl.store(sums_ptr + (index % per_node) * STRIDE + index // per_node, sums, mask=index // per_node < nodes)
    if LANES > 0:
        block: tl.constexpr = BLOCK_R * HEAD_DIM
        columns: tl.constexpr = HEADS * HEAD_DIM
        at = tl.program_id(0) * block + tl.arange(0, block)
        store_lanes(lanes_ptr, tl.reshape(y, (block,)), at // columns, at % columns, at < nodes * columns, LANES, block)
