"""Blocks written and read by threads, and when reading is worth it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.tools.server_process import poll
from tgi_cli.engine import disk_blocks
from tgi_cli.engine.block_files import BlockFiles
from tgi_cli.engine.disk_blocks import DiskBlocks, DiskRead

BLOCK_BYTES = 4096
CONTENTS = [bytes([i]) * 16 for i in range(10)]


def block_bytes(block: int) -> bytes:
    return bytes([block]) * BLOCK_BYTES


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DiskBlocks]]:
    """Makes stores over one folder."""
    made = []

    def make(**options: float) -> DiskBlocks:
        files = BlockFiles(tmp_path / "kv", 1 << 30, b"model")
        made.append(DiskBlocks(files, block_bytes, 16, BLOCK_BYTES, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for blocks in made:
        blocks.close()


def written(blocks: DiskBlocks) -> DiskBlocks:
    for block, content in enumerate(CONTENTS):
        assert blocks.save(content, block)
    blocks.close()
    return blocks


def finished(read: DiskRead | None) -> list[bytes]:
    assert read is not None
    poll(lambda: read.finished, 20, "it is read")
    return read.take()


def test_what_one_writes_another_reads(make: Callable[..., DiskBlocks]) -> None:
    written(make())
    blocks = make()
    assert blocks.load([b"unknown" * 2]) is None
    assert finished(blocks.load([*CONTENTS, b"unknown" * 2])) == [*map(block_bytes, range(10))]
    assert not blocks.loading
    assert not blocks.is_full


def test_a_torn_file_ends_a_run(make: Callable[..., DiskBlocks], tmp_path: Path) -> None:
    written(make())
    blocks = make()
    files = BlockFiles(tmp_path / "kv", 1 << 30, b"model")
    os.truncate(tmp_path / "kv" / files.name_of(CONTENTS[3]), 100)
    assert finished(blocks.load(CONTENTS)) == [*map(block_bytes, range(3))]
    assert finished(blocks.load(CONTENTS)) == [*map(block_bytes, range(3))]
    assert counted(blocks) == {"damaged": 1, "hit": 3 + 3, "miss": 7 + 7}


def test_a_disk_that_hangs_does_not_fill_the_memory(
    make: Callable[..., DiskBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_blocks, "_MOST_WRITES", 5)
    released, begun = threading.Event(), threading.Event()
    touch, touched = BlockFiles.touch, []

    def hang(files: BlockFiles, names: Iterable[str]) -> None:
        begun.set()
        released.wait(60)
        touched.append(1)
        touch(files, names)

    monkeypatch.setattr(BlockFiles, "touch", hang)
    blocks = make()
    blocks.touch(CONTENTS)
    assert begun.wait(60)
    for _ in range(20):
        blocks.touch(CONTENTS)
    released.set()
    written(blocks)
    assert len(touched) == 6
    assert counted(blocks) == {"written": len(CONTENTS)}


def counted(blocks: DiskBlocks) -> dict[str, int]:
    return {event.value: count for event, count in blocks.counts.items() if count}


def test_what_happens_to_blocks_is_counted(make: Callable[..., DiskBlocks]) -> None:
    first = written(make())
    assert counted(first) == {"written": len(CONTENTS)}
    blocks = make(token_seconds=1e-12)
    assert blocks.num_bytes == first.num_bytes > len(CONTENTS) * BLOCK_BYTES
    assert blocks.load([*CONTENTS, b"unknown" * 2]) is None, "computed sooner"
    assert counted(blocks) == {"skipped": len(CONTENTS), "miss": 1}


def test_evictions_and_refusals_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = BlockFiles(tmp_path / "kv", 6 * BLOCK_BYTES, b"model")
    blocks = written(DiskBlocks(files, block_bytes, 16, BLOCK_BYTES))
    counts = counted(blocks)
    assert counts["written"] == len(CONTENTS)
    assert counts["evicted"] == len(CONTENTS) - files.num_known > 0
    assert blocks.num_bytes <= 6 * BLOCK_BYTES

    def refuse(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "write", refuse)
    full = DiskBlocks(BlockFiles(tmp_path / "other", 1 << 30, b""), block_bytes, 16, BLOCK_BYTES)
    full.save(CONTENTS[0], 0)
    full.close()
    assert counted(full) == {"failed": 1}


def test_what_is_computed_faster_is_not_read(make: Callable[..., DiskBlocks]) -> None:
    written(make())
    blocks = make(token_seconds=1e-9)
    assert blocks.load(CONTENTS) is None
    blocks.timed(1000, 1000.0)  # a second for each token
    assert len(finished(blocks.load(CONTENTS))) == 10


def test_short_runs_are_computed(make: Callable[..., DiskBlocks]) -> None:
    written(make())
    blocks = make(token_seconds=disk_blocks.OVERHEAD_SECONDS / 16 / 4)
    assert blocks.load(CONTENTS[:3]) is None
    assert blocks.load(CONTENTS) is not None


def test_a_disk_that_was_slow_once_is_tried_again(make: Callable[..., DiskBlocks]) -> None:
    written(make())
    blocks = make(token_seconds=0.002)
    blocks._bandwidth = 100.0
    assert blocks.load(CONTENTS) is None
    for _ in range(2000):
        if blocks.load(CONTENTS) is not None:
            return
    raise AssertionError("it never is")


def test_a_writer_that_is_behind_has_sequences_wait(
    make: Callable[..., DiskBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_blocks, "WRITE_BYTES", 2 * BLOCK_BYTES)
    blocks = make()
    release = []
    monkeypatch.setattr(blocks._files, "write", lambda *_: poll(lambda: release, 20, "released"))
    assert blocks.save(CONTENTS[0], 0)
    assert blocks.save(CONTENTS[1], 1)
    assert not blocks.save(CONTENTS[2], 2)
    release.append(True)
    poll(lambda: blocks.save(CONTENTS[2], 2), 20, "it is accepted")


def test_a_full_disk_stops_writing_for_a_while(
    make: Callable[..., DiskBlocks],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = make()
    calls = []

    def write(name: str, payload: bytes) -> None:
        calls.append(name)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks._files, "write", write)
    assert blocks.save(CONTENTS[0], 0)
    poll(lambda: "No space left" in caplog.text, 20, "it is logged")
    for block, content in enumerate(CONTENTS):
        assert blocks.save(content, block), "dropped"
    blocks.close()
    assert len(calls) == 1


@pytest.mark.parametrize("rest", [0, BLOCK_BYTES - 1])
def test_what_was_read_and_not_taken_is_bounded(
    rest: int, make: Callable[..., DiskBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences wait for the others' blocks, also where the limit is no whole number of blocks."""
    monkeypatch.setattr(disk_blocks, "READ_BYTES", 4 * BLOCK_BYTES + rest)
    written(make())
    blocks = make(read_bytes=0)
    first = blocks.load(CONTENTS)
    assert blocks.is_full
    assert blocks.load(CONTENTS) is None
    assert len(finished(first)) == 4, "the rest is computed"
    assert not blocks.is_full


def test_nobody_waits_for_ever(
    make: Callable[..., DiskBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(make())
    monkeypatch.setattr(disk_blocks, "_LEAST_WAIT", 1.0)
    blocks = make(token_seconds=0.001)
    release: list[bool] = []
    monkeypatch.setattr(blocks._files, "read", lambda *_: poll(lambda: release, 20, "released"))
    read = blocks.load(CONTENTS)
    assert read is not None
    assert not read.done
    poll(lambda: read.done, 20, "the time is up")
    assert not read.finished
    assert read.take() == []
    release.append(True)
