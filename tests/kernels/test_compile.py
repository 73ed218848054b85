"""Every kernel compiles to machine code for sm_80 and sm_90 without a GPU, and fits the shared memory it is meant for.

Compiling needs Triton without its interpreter, so it runs in one process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = '''
import json, sys
from triton import compile, next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specq_kernels import act_codes, attention_device, draft_tree, filtered, group_sums, kv_cache, norm_rope, pair_rows
from specq_kernels import round_rows, sampling, step_rows, top_scores, tree_nodes, w4_prefill, w4a8, w4a16, w16a16
from specq_kernels import follow_sample, tree_attention, w4a8_row
from specq_kernels.configs import DEFAULT_TILES

POINTERS = {"w_ptr": "*i32", "meta_ptr": "*i32", "sums_ptr": "*fp32", "partial_ptr": "*fp32", "counter_ptr": "*i32",
            "mask_ptr": "*i32", "depth_ptr": "*i32", "length_ptr": "*i32", "top_ptr": "*fp32",
            "total_ptr": "*fp32", "best_ptr": "*fp32", "best_id_ptr": "*i32", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
            "path_ptr": "*i32", "count_ptr": "*i32", "logits_ptr": "*fp32"}
MULTIPLES_OF_16 = {"n_out", "k_size", "padded_n", "padded_k", "max_len", "k", "n", "full_n"}
FLOATS = {"eps", "scale", "temperature"}
report = {}

def build(name, fn, constants, dtype="bf16", warps=4, **types):
    """Compile `fn` for the architecture of the command line; note its shared memory."""
    signature, attributes = {}, {}
    for i, argument in enumerate(fn.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        kind = types.get(argument) or POINTERS.get(argument)
        kind = kind or ("*" + dtype if argument.endswith("_ptr") else "fp32" if argument in FLOATS else "i32")
        signature[argument] = kind
        if kind.startswith("*") or argument in MULTIPLES_OF_16:
            attributes[(i,)] = [["tt.divisibility", 16]]
    at = {(fn.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn, signature, constexprs=at, attrs=attributes)
    built = compile(source, target=GPUTarget("cuda", ARCH, 32), options={"num_warps": warps, "launch_pdl": EARLY})
    assert built.asm["cubin"]
    report[name] = built.metadata.shared
    return built.asm["ptx"]

ARCH = int(sys.argv[1])
EARLY = ARCH >= 90
for rows, tile in DEFAULT_TILES["w4a16"].items():
    for group, form, dtype in ((128, 0, "bf16"), (64, 1, "fp16"), (32, 3, "bf16"), (32, 2, "bf16"))[: 64 // rows]:
        constants = dict(GROUP=group, FORM=form, SCALE_FP16=True, BLOCK_N=64, BLOCK_M=rows, MOST=4,
                         STEP=tile.get("step", 256), STAGES=tile["stages"], HAS_BIAS=True, HAS_RESIDUAL=True,
                         SILU=False, EVEN_K=False, EVEN_M=False, PTX=True, EARLY=EARLY, DIRECT=False, ADDS=rows < 64,
                         FOLDS=rows > 16, FMA=rows > 16)
        build(f"default w4a16 {rows} {group} {form}", w4a16._w4a16_kernel, constants, dtype)
silu = dict(GROUP=128, FORM=0, SCALE_FP16=True, BLOCK_N=128, BLOCK_M=16, MOST=1, STEP=256, STAGES=3, HAS_BIAS=False,
            HAS_RESIDUAL=False, SILU=True, EVEN_K=True, EVEN_M=True, PTX=True, EARLY=EARLY, DIRECT=True, ADDS=True,
            FOLDS=False, FMA=True)
build("w4a16 silu", w4a16._w4a16_kernel, silu)
for rows, tile in DEFAULT_TILES["w16a16"].items():
    constants = dict(BLOCK_N=64, BLOCK_M=rows, BLOCK_K=64, SPLIT=2, STAGES=tile["stages"], HAS_BIAS=False,
                     HAS_RESIDUAL=False, ARGMAX=rows == 16, EVEN_N=True, EVEN_K=True, EARLY=EARLY)
    build(f"default w16a16 {rows}", w16a16._w16a16_kernel, constants, out_ptr="*fp32", w_ptr="*bf16")
for head_dim, window, rows in ((128, False, 256), (128, False, 128), (128, False, 64), (64, False, 16), (80, True, 16)):
    config = tree_attention.attention_config(rows, 8 * rows)
    leaves, folded = config["leaves"], config["folded"]
    sizes = dict(SHARED=4, HEAD_DIM=head_dim, BLOCK_D=next_power_of_2(head_dim), LEAF=tree_attention.LEAF,
                 LEAVES=leaves, FOLDED=folded, EARLY=EARLY)
    build(f"attention {head_dim} {rows}", attention_device.attention_kernel,
          dict(sizes, KV_HEADS=8, BLOCK_Q=config["block_q"], WINDOWED=window, STAGES=config["stages"],
               LATE=bool(config["late"])))
    build(f"merge {head_dim} {rows}", attention_device.attention_merge_kernel, warps=1, constants=
          dict(sizes, HEADS=32, BLOCK_R=1 if window else 128 // head_dim, FOLD=tree_attention.FOLD,
               BLOCK_P=next_power_of_2(leaves // folded), BATCH=config["batch"], GROUP=0 if window else 128, STRIDE=16,
               LANES=0 if window else 8, LATE=bool(config["merge_late"])))
for parts in (0, 4):
    build(f"norm {parts}", norm_rope._rms_norm_kernel, x_ptr="*fp32" if parts else "*bf16", warps=8, constants=
      dict(HAS_RESIDUAL=True, PARTS=parts, GROUP=128, STRIDE=16, LANES=4 * parts, BLOCK=8192, EARLY=EARLY))
build("silu", norm_rope._silu_mul_kernel, dict(GROUP=64, STRIDE=64, LANES=64, EARLY=EARLY))
for parts in (0, 4):
    build(f"append {parts}", kv_cache._append_kernel, qkv_ptr="*fp32" if parts else "*bf16",
          constants=dict(HEADS=4, KV_HEADS=2, HEAD_DIM=80, BLOCK=64, MANY=8, PARTS=parts, HAS_NORM=True, EARLY=EARLY))
build("compact", kv_cache._compact_kernel, dict(HEAD_DIM=80, BLOCK_D=128, BLOCK_P=8, EARLY=EARLY))
build("compact rows", kv_cache._compact_rows_kernel, dict(BLOCK_P=64, EARLY=EARLY))
draw = dict(position_ptr="*i64", temperature_ptr="*fp64", seed_ptr="*i64")
build("gumbel", sampling._block_best_kernel, dict(NOISE=True, BLOCK=2048, EARLY=EARLY), **draw)
build("top scores", top_scores._block_top_kernel,
      dict(NOISE=True, HAS_IDS=True, COUNT=10, BLOCK=2048, EARLY=EARLY), **draw, target_id_ptr="*i32", scale="fp32")
build("row top", top_scores._row_top_kernel, dict(COUNT=10, BLOCK=1024, BLOCKS=64, EARLY=EARLY), score_ptr="*fp32",
      id_ptr="*i32")
build("candidates", filtered._candidates_kernel,
      dict(HAS_IDS=True, PER_BLOCK=16, BLOCK=2048, PIECE=128, EARLY=EARLY), **draw, target_id_ptr="*i32",
      column_ptr="*i32")
build("filter", filtered._filter_kernel,
      dict(HAS_IDS=True, CHOICE=True, IS_TOP_K=False, KEPT=64, PER_BLOCK=16, BLOCK=1024, BLOCKS=64, EARLY=EARLY),
      **draw, target_id_ptr="*i32", column_ptr="*i32", sorted_ptr="*fp32", sorted_column_ptr="*i32",
      score_ptr="*fp32", id_ptr="*i32", top_p="fp32", scale="fp32")
integers = dict(dtype="i32", draft_ptr="*i32", pool_score_ptr="*fp32", level_score_ptr="*fp32", score_ptr="*fp32",
                parent_score_ptr="*fp32")
build("graft", tree_nodes._graft_kernel, dict(NODES=64, EARLY=EARLY), warps=1, **integers, position_ptr="*i64")
build("walk", tree_nodes._walk_kernel, dict(NODES=64, EARLY=EARLY), warps=1, **integers, sampled_ptr="*i64")
build("level", draft_tree._level_kernel, dict(BLOCK=128, CHUNK=32, EARLY=EARLY), **integers)
build("tree", draft_tree._best_kernel, dict(NODES=64, BLOCK=512, CHUNK=32, EARLY=EARLY), warps=8, **integers)
for dtype in ("bf16", "fp16"):  # an embedding keeps the type of its file
    build(f"pairs {dtype}", pair_rows._pair_kernel, dict(HAS_NORM=True, BLOCK=4096, EARLY=EARLY), token_ptr="*i32",
          row_ptr="*i32", embedding_ptr="*" + dtype)
build("embed", step_rows._embed_kernel, dict(EARLY=EARLY), token_ptr="*i32", embedding_ptr="*fp16")
build("keep", step_rows._keep_kernel, dict(HAS_KEPT=True, EARLY=EARLY))
build("best", sampling._row_best_kernel, dict(BLOCK=64, EARLY=EARLY), out_ptr="*i64")
for bits in (8, 4):
    constants = dict(MOST=round_rows.MOST[bits], SCALE_BITS=round_rows.SCALE_BITS[bits], GROUP=128, STRIDE=16,
                     LANES=2 * bits, BLOCK=round_rows.BLOCK, EARLY=EARLY)
    build(f"rounded rows {bits}", round_rows._round_rows_kernel, constants)
    constants = dict(MOST=round_rows.MOST[bits], SCALE_BITS=round_rows.SCALE_BITS[bits], STRIDE=16, BLOCK=1024,
                     BY_LANE=bits == 8, EARLY=EARLY)
    build(f"codes of x {bits}", act_codes._round_codes_kernel, constants, code_ptr="*i8", scale_ptr="*fp32")
    build(f"codes of a norm {bits}", act_codes._norm_codes_kernel, constants | dict(BLOCK=8192), warps=16,
          code_ptr="*i8", scale_ptr="*fp32")
for rows, form, silu, stages in ((16, 0, True, 4), (32, 1, False, 3), (64, 2, False, 2)):
    constants = dict(FORM=form, SCALE_FP16=True, BLOCK_N=64, BLOCK_M=rows, MOST=4, STAGES=stages, HAS_BIAS=True,
                     HAS_RESIDUAL=True, SILU=silu, PTX=True, EARLY=EARLY)
    build(f"default w4a8 {rows}", w4a8._w4a8_kernel, constants, x_ptr="*i8", w_ptr="*i8", scale_ptr="*fp32")
    constants = dict(FORM=form, SCALE_FP16=True, GROUPS=4, STRIDE=1, HAS_BIAS=True, HAS_RESIDUAL=True, SILU=silu,
                     PTX=True, EARLY=EARLY)
    build(f"default w4a8 row {form}", w4a8_row.w4a8_row_kernel, constants, x_ptr="*i32", scale_ptr="*fp32")
build("follow", follow_sample._follow_kernel, dict(EARLY=EARLY), sampled_ptr="*i64", chain_ptr="*i32", id_ptr="*i32",
      position_ptr="*i64")
for lanes in (0, 32):
    build(f"sides {lanes}", group_sums._sides_kernel, dict(GROUP=32, STRIDE=32, LANES=lanes, EARLY=EARLY))
build("dequantize", w4_prefill._dequantize_kernel, dict(GROUP=32, FORM=3, SCALE_FP16=True))
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
from specq_kernels import w4_rows

for blocks, k_warps, n_warps, parts, rows, form, silu in ((1, 4, 1, 3, 8, 0, False), (2, 2, 2, 1, 16, 2, True)):
    constants = dict(BLOCKS=blocks, BLOCK_M=rows, K_WARPS=k_warps, N_WARPS=n_warps, PARTS=parts, SPLIT=k_warps // 2,
                     STRIDE=16, FORM=form, SCALE_FP16=True, HAS_BIAS=True, HAS_RESIDUAL=True, SILU=silu,
                     EVEN=not silu, FEW=True, HOLD=True, POLICY="evict_first", DTYPE=gl.bfloat16, EARLY=EARLY,
                     LATE=silu, FMA=silu)
    build(f"few rows {rows}", w4_rows._w4_rows_kernel, constants, x_ptr="*i32")
if ARCH == 90:
    from specq_kernels import w4_hopper

    for rows, form, silu, groups, halves, sync in ((16, 2, True, 1, 2, False), (64, 0, False, 2, 2, False),
                                                   (32, 1, False, 2, 1, False), (64, 0, True, 4, 1, False),
                                                   (16, 0, True, 1, 2, True)):
        columns = groups * halves * 64
        config = dict(block_m=rows, block_n=columns, groups=groups, stages=99)
        stages = w4_hopper.stages_of(config, folds=True)
        constants = dict(BLOCK_M=rows, STAGES=stages, MOST=4, FORM=form, SCALE_FP16=True, HAS_BIAS=True,
                         HAS_RESIDUAL=True, SILU=silu, GROUPS=groups, HALVES=halves,
                         LATER=w4_hopper.REGISTERS[groups, halves][1], ADDS=halves == 1 or silu, FOLDS=True,
                         TOGETHER=not silu and halves == 1, SYNC=sync, FMA=form == 0)
        ptx = build(f"roles {columns} {groups} {sync}", w4_hopper._w4a16_hopper_kernel, constants,
                    x_desc=f"tensordesc<bf16[{rows},128],{w4_hopper.X_LAYOUT!r}>",
                    w_desc=f"tensordesc<i32[{columns // 16},256],{w4_hopper.CODES_LAYOUT!r}>",
                    meta_desc=f"tensordesc<i32[{columns}],{w4_hopper.LINE_LAYOUT!r}>",
                    sums_desc=f"tensordesc<fp32[{max(rows, 32)}],{w4_hopper.LINE_LAYOUT!r}>")
        product = "mma.sync" if sync else "wgmma.mma_async"
        turns = [block for block in ptx.split("\\n$L__BB") if product in block]
        assert len(turns) == groups
        for turn in turns:  # a stage is given back in the turn behind its own, before that reads: no copy overtakes
            assert turn.rindex("mbarrier.arrive.shared") < turn.index("ld.shared")
print(json.dumps(report))
'''


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler comes with its Linux wheels only")
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_compile_and_fit_shared_memory(architecture: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(architecture)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    report = json.loads(ran.stdout.splitlines()[-1])
    assert len(report) == (65 if architecture == 90 else 60)
    too_large = {name: size for name, size in report.items() if name.startswith("default") and size > 48 * 1024}
    assert not too_large
    for name, size in report.items():
        if name.startswith("roles"):  # as many stages as fit, one or two programs on a multiprocessor of 228 KB
            programs = 256 // int(name.split()[1])
            assert 150 * 1024 < programs * (size + 1024) <= 228 * 1024, name
