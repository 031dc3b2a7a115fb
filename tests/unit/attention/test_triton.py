"""Triton's attention on a machine without a GPU: interpreted, and compiled for some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tgi_cli.attention
from tests.tools.triton_process import needs_triton, run_tests
from tgi_cli.attention import KVSpec, create_attention
from tgi_cli.attention import triton_tiles as tiles


@needs_triton
@pytest.mark.timeout(600)  # a minute where nothing else runs
@pytest.mark.parametrize(
    ("files", "interpret"),
    [
        (("triton_attention_results.py", "triton_work_results.py"), True),
        (("triton_attention_compile.py",), False),
    ],
    ids=["interpreted", "compiled"],
)
def test_kernels(files: tuple[str, ...], interpret: bool, tmp_path: Path) -> None:
    folder = Path(__file__).parent
    run_tests([folder / file for file in files], interpret, tmp_path, timeout=580)


class Chosen(Exception):
    """Raised in place of a backend that needs a GPU."""


def triton_backend(*_: object) -> None:
    raise Chosen("triton")


def torch_backend(*_: object) -> None:
    raise Chosen("torch")


@pytest.mark.parametrize("compiles", [True, False])
def test_cuda_takes_triton_where_it_compiles(
    monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    chosen = {"triton": f"{__name__}:triton_backend", "torch": f"{__name__}:torch_backend"}
    monkeypatch.setattr(tgi_cli.attention, "BACKENDS", chosen)
    monkeypatch.setattr(tgi_cli.attention, "has_triton", lambda: compiles)
    with pytest.raises(Chosen, match="triton" if compiles else "torch"):
        create_attention(None, [KVSpec(1, 16)], 16, torch.float16, torch.device("cuda"))


@needs_triton
def test_where_triton_cannot_compile_the_cause_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tgi_cli.attention import triton

    def probe() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton, "probe", probe)
    assert not tgi_cli.attention.has_triton.__wrapped__()
    assert "Failed to find C compiler" in caplog.text


@pytest.mark.parametrize(
    ("dims", "parts"),
    [
        (8, (16, 0)),
        (24, (32, 0)),
        (40, (32, 16)),
        (64, (64, 0)),
        (80, (64, 16)),
        (96, (64, 32)),
        (112, (128, 0)),
        (160, (128, 32)),
        (192, (128, 64)),
        (256, (256, 0)),
        (576, (512, 64)),
    ],
)
def test_heads_are_in_one_block_or_two(dims: int, parts: tuple[int, int]) -> None:
    head = tiles.HeadTile.of(dims)
    assert (head.block, head.rest) == parts
    assert head.dims >= dims


def test_programs_of_decodes_run_all_at_once() -> None:
    hardware = tiles.Hardware(processors=132)
    small, large = tiles.Tile(16, 64, 4, 5, registers=128), tiles.Tile(64, 64, 8, 5)
    assert tiles.programs_at_once(hardware, small, 72 * 1024) == 3 * 132
    assert tiles.programs_at_once(hardware, small, 8 * 1024) == 4 * 132
    assert tiles.programs_at_once(hardware, large, 72 * 1024) == 132
    assert tiles.programs_at_once(hardware, small, 300 * 1024) == 132


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("kv_itemsize", [1, 2, 4])
@pytest.mark.parametrize("dims", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 4, 7, 71])
@pytest.mark.parametrize(("shared", "capability"), [(227, (9, 0)), (163, (8, 0)), (99, (8, 9))])
def test_tiles_hold_all_heads_that_share_a_kv_head(
    itemsize: int,
    kv_itemsize: int,
    dims: int,
    group: int,
    shared: int,
    capability: tuple[int, int],
) -> None:
    hardware = tiles.Hardware(100, shared * 1024, capability)
    for tile in (
        tiles.prefill_tile(hardware, dims, itemsize, kv_itemsize, group),
        tiles.decode_tile(hardware, dims, itemsize, kv_itemsize, group),
    ):
        assert tile.rows >= max(group, 16)
        assert tile.keys >= 16
        for size in (tile.rows, tile.keys, tile.warps):
            assert size & (size - 1) == 0
        if dims <= 256 and group < 71:
            taken = (tile.rows * itemsize + 2 * tile.keys * kv_itemsize) * dims
            assert taken <= shared * 1024
