"""Blocks in a folder: whole or missing, bounded, and shared."""

from __future__ import annotations

import errno
import os
import stat
import time
import tracemalloc
from pathlib import Path

import pytest

from tgi_cli.engine import block_files
from tgi_cli.engine.block_files import HEADER_BYTES, BlockFiles

PAYLOAD = bytes(range(256)) * 4
SIZE = HEADER_BYTES + len(PAYLOAD)


def files(folder: Path, limit: int = 100 * SIZE, identity: bytes = b"model") -> BlockFiles:
    return BlockFiles(folder, limit, identity)


def test_a_block_is_found_again_by_another_process(tmp_path: Path) -> None:
    first = files(tmp_path / "kv")
    name = first.name_of(b"content")
    assert not first.has(name)
    first.write(name, PAYLOAD)
    assert first.read(name, len(PAYLOAD)) == PAYLOAD
    second = files(tmp_path / "kv")
    assert second.has(name)
    assert second.read(name, len(PAYLOAD)) == PAYLOAD
    assert second.num_bytes == SIZE
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "kv" / name).stat().st_mode) == 0o600


def test_another_model_or_content_has_another_name(tmp_path: Path) -> None:
    one, other = files(tmp_path), files(tmp_path, identity=b"another")
    assert len({one.name_of(b"a"), one.name_of(b"b"), other.name_of(b"a")}) == 3


@pytest.mark.parametrize("where", [0, 8, 20, HEADER_BYTES, SIZE - 1])
def test_a_flipped_bit_is_a_miss_and_removed(tmp_path: Path, where: int) -> None:
    kept = files(tmp_path)
    name = kept.name_of(b"content")
    kept.write(name, PAYLOAD)
    data = bytearray((tmp_path / name).read_bytes())
    data[where] ^= 1
    (tmp_path / name).write_bytes(data)
    assert kept.read(name, len(PAYLOAD)) is None
    assert not (tmp_path / name).exists()
    assert not kept.has(name)
    kept.write(name, PAYLOAD)
    assert kept.read(name, len(PAYLOAD)) == PAYLOAD


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, SIZE - 1, SIZE + 1])
def test_a_torn_file_is_a_miss_and_removed(tmp_path: Path, length: int) -> None:
    kept = files(tmp_path)
    name = kept.name_of(b"content")
    kept.write(name, PAYLOAD)
    os.truncate(tmp_path / name, length)
    assert kept.read(name, len(PAYLOAD)) is None
    assert not (tmp_path / name).exists()


def test_a_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    kept = files(tmp_path)
    one, other = kept.name_of(b"one"), kept.name_of(b"other")
    kept.write(one, PAYLOAD)
    (tmp_path / one).rename(tmp_path / other)
    assert files(tmp_path).read(other, len(PAYLOAD)) is None


def test_the_least_recently_used_go_first_and_tails_before_heads(tmp_path: Path) -> None:
    kept = files(tmp_path, limit=10 * SIZE)
    old = [kept.name_of(bytes([i])) for i in range(5)]
    new = [kept.name_of(bytes([i])) for i in range(5, 10)]
    for age, names in ((100.0, old), (50.0, new)):
        for name in names:
            kept.write(name, PAYLOAD)
            os.utime(tmp_path / name, (time.time() - age,) * 2)
    kept.touch(old)
    kept.write(kept.name_of(b"more"), PAYLOAD)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) <= 10
    assert set(old) < left, "they were used last"
    kept.shrink(3 * SIZE)
    assert {path.name for path in tmp_path.iterdir()} <= {*old[:2], kept.name_of(b"more")}
    assert kept.num_bytes <= 3 * SIZE


def test_the_bound_counts_files_of_others(tmp_path: Path) -> None:
    one, other = files(tmp_path, 6 * SIZE), files(tmp_path, 6 * SIZE, b"another")
    for i in range(5):
        one.write(one.name_of(bytes([i])), PAYLOAD)
    other.scan()
    for i in range(5):
        other.write(other.name_of(bytes([i])), PAYLOAD)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * SIZE


def test_remains_of_dead_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.1-1.tmp").write_bytes(b"half")
    os.utime(tmp_path / "a.1-1.tmp", (1.0, 1.0))
    (tmp_path / "b.2-2.tmp").write_bytes(b"half, being written")
    files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b.2-2.tmp"]


def test_a_removed_file_is_a_miss(tmp_path: Path) -> None:
    kept = files(tmp_path)
    name = kept.name_of(b"content")
    kept.write(name, PAYLOAD)
    (tmp_path / name).unlink()
    assert kept.read(name, len(PAYLOAD)) is None
    assert not kept.has(name)


def test_a_folder_in_which_no_file_can_be_created_is_an_error() -> None:
    """As root, too, to whom permissions do not apply."""
    with pytest.raises(OSError, match="directory"):
        files(Path("/proc/self"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(dir: Path) -> None:
        raise OSError(code, "full")

    monkeypatch.setattr(block_files.tempfile, "TemporaryFile", full)
    assert files(tmp_path).num_bytes == 0


class TestWhereOthersMayWrite:
    """Links and other things that somebody has put into the folder."""

    def test_a_link_in_the_place_of_a_new_file_is_not_written_through(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = files(tmp_path / "kv")
        name = kept.name_of(b"content")
        monkeypatch.setattr(block_files.secrets, "token_hex", lambda _: "known")
        (tmp_path / "mine").write_bytes(b"precious")
        scratch = (tmp_path / "kv" / name).with_suffix(".known.tmp")
        scratch.symlink_to(tmp_path / "mine")
        with pytest.raises(FileExistsError):
            kept.write(name, PAYLOAD)
        assert (tmp_path / "mine").read_bytes() == b"precious"

    def test_links_and_folders_do_not_count(self, tmp_path: Path) -> None:
        large = tmp_path / "large"
        with large.open("wb") as file:
            file.truncate(1 << 40)
        os.utime(large, (1.0, 1.0))
        folder = tmp_path / "kv"
        folder.mkdir()
        (folder / "a.kv").symlink_to(large)
        (folder / "b.kv").mkdir()
        (folder / "c.tmp").mkdir()
        os.utime(folder / "c.tmp", (1.0, 1.0))
        kept = files(folder)
        assert kept.num_known == kept.num_bytes == 0
        kept.touch(["a.kv"])
        assert large.stat().st_mtime == 1.0

    def test_no_more_is_read_than_a_block_has(self, tmp_path: Path) -> None:
        kept = files(tmp_path)
        name = kept.name_of(b"content")
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
        tracemalloc.start()
        try:
            assert kept.read(name, len(PAYLOAD)) is None
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert not (tmp_path / name).exists()

    def test_it_is_warned_of(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        files(tmp_path / "private")
        assert caplog.text == ""
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        files(tmp_path / "open")
        assert "other users may write into --kv-cache-dir" in caplog.text
