"""Tuned configurations: the shipped tables are consistent, the user's own file wins, the untuned are told once."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specq_kernels import bench_attention, bench_w4a16, bench_w16a16, configs, tune
from specq_kernels.launch import may_share_device

SHIPPED = Path(configs.__file__).parent / "configs"


def clear_caches() -> None:
    for cached in (configs.lookup, configs.read, configs.warn_untuned):
        cached.cache_clear()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path))
    clear_caches()
    yield tmp_path
    clear_caches()


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_name_tiles_that_divide_their_columns(path: Path) -> None:
    entries = json.loads(path.read_text())["w4a16"]
    assert entries
    for key, entry in entries.items():
        n, k = (int(size) for size in key.split("g")[0].split("x"))
        split, tail_split, tail_from = configs.split_of(entry, n=n, k=k)
        assert (split, tail_split) == (entry["split"], entry["tail_split"])  # none was cut down to K
        if "parts" in entry:
            assert entry["parts"] in tune.parts_for(entry)
        assert set(entry["rows"]) >= {"16", "32", "64"}
        for rows, tile in entry["rows"].items():
            if tile.get("lanes"):
                assert split in (1, tail_split)
                allowed = [{**fits, "us": tile["us"]} for fits in tune.lanes_configs(int(rows), entry["parts"], n)]
                assert {"block_m": max(8, int(rows)), **tile} in allowed
            else:
                assert tail_from % tile["block_n"] == 0 == n % tile["block_n"]


def test_the_users_file_wins_over_the_shipped_one(own_cache: Path) -> None:
    shipped = configs.lookup("NVIDIA H200", "w4a16", "8192x8192g128")
    assert shipped is not None
    clear_caches()
    path = configs.user_file("NVIDIA H200")
    assert path.parent.parent == own_cache
    path.parent.mkdir()
    path.write_text(json.dumps({"w4a16": {"8192x8192g128": {"split": 77}}}))
    assert configs.lookup("NVIDIA H200", "w4a16", "8192x8192g128") == {"split": 77}
    assert configs.lookup("NVIDIA H200", "w4a16", "10240x8192g128") is not None
    assert configs.lookup("NVIDIA H200", "w4a16", "1x1g128") is None


class RowsOnGpu:
    """What `product_config` asks of x: a number of rows, on the first CUDA device."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, rows: int) -> None:
        self.shape = (rows, 4096)


def test_a_tuned_table_of_both_kernels_is_read_back_by_both(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "device_name", lambda index: "Some GPU")
    tiles = {kernel: {rows: tune.tile_configs(kernel, rows) for rows in (16, 32, 64)} for kernel in ("w4a16", "w16a16")}
    splits = {"w4a16": {"split": 2, "tail_split": 4, "tail_from": 256}, "w16a16": {"split": 2}}
    chosen = {kernel: tune.choose([splits[kernel]], tiles[kernel], lambda config: 1.0) for kernel in tiles}
    path = configs.user_file("Some GPU")
    path.parent.mkdir()
    path.write_text(
        json.dumps({kernel: {"512x4096" + "g128" * (kernel == "w4a16"): chosen[kernel]} for kernel in tiles})
    )
    for kernel, group in (("w4a16", 128), ("w16a16", None)):
        for rows in (1, 32, 64):
            config = configs.product_config(kernel, RowsOnGpu(rows), n=512, k=4096, group=group)
            assert {"block_m", "block_n", "warps", "stages", *splits[kernel]} <= set(config)
            assert rows <= config["block_m"]


def test_tiles_for_few_rows_are_read_where_x_can_be_had_in_lane_order(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "device_name", lambda index: "Some GPU")
    split = {"split": 2, "tail_split": 2, "tail_from": 512}
    wide = {rows: (10.0, tune.tile_configs("w4a16", rows)[0]) for rows in (16, 32, 64)}
    few: dict[int, tune.Found] = {
        parts: {rows: (us + rows // 16, tune.lanes_configs(rows, parts, 512)[0]) for rows in (4, 16)}
        for parts, us in ((2, 9.0), (8, 5.0))
    }
    tiles = {rows: [tile] for rows, (_, tile) in wide.items()}
    thirds = {**split, "split": 3, "tail_split": 3}  # 2 and 8 parts do not fall into them
    entry = tune.best_entry([(split, wide), (thirds, wide)], few, tiles, lambda config: 10.5)
    assert tune.best_entry([(split, wide)], few, tiles, lambda config: 40.0)["parts"] == 2  # where folding costs more
    assert entry["parts"] == 8
    path = configs.user_file("Some GPU")
    path.parent.mkdir()
    path.write_text(json.dumps({"w4a16": {"512x4096g128": entry}}))
    for rows, block_m, has_lanes in ((1, 8, True), (4, 8, True), (5, 8, True), (16, 16, True), (17, 32, False)):
        config = configs.product_config("w4a16", RowsOnGpu(rows), n=512, k=4096, group=128, lanes=True)
        assert (config["block_m"], bool(config.get("lanes"))) == (block_m, has_lanes)
        assert configs.parts_of(config, n=512, k=4096) == (8, 8)
        plain = configs.product_config("w4a16", RowsOnGpu(rows), n=512, k=4096, group=128)
        assert not plain.get("lanes")
        assert plain["block_m"] == max(16, block_m)
        assert plain["block_n"] == 64 or rows > 16
        assert configs.parts_of(plain, n=512, k=4096) == (8, 8)


def test_an_untuned_device_is_told_the_command_once(recwarn: pytest.WarningsRecorder) -> None:
    clear_caches()
    for _ in range(3):
        configs.warn_untuned("Some GPU", "w4a16")
    assert [str(w.message) for w in recwarn] == [
        "`w4a16` is not tuned for `Some GPU`: run `python -m specq_kernels.tune` once"
    ]


def test_default_split_fills_the_device_and_leaves_work_to_each_part() -> None:
    assert configs.default_split(57344, 8192, 132) == 1
    assert configs.default_split(4096, 4096, 132) == 4
    assert configs.default_split(640, 768, 132) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the device that is asked for")
@pytest.mark.parametrize("module", [tune, bench_w4a16, bench_w16a16, bench_attention])
def test_measuring_without_a_gpu_says_so(module: ModuleType) -> None:
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        module.main([])


def test_a_multi_process_service_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    may_share_device.cache_clear()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    assert may_share_device()
    may_share_device.cache_clear()
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    assert may_share_device() == Path("/tmp/nvidia-mps").exists()
    may_share_device.cache_clear()
