"""The runtime folder is private while it is there, and nothing stays behind."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tgi_cli
from tgi_cli.process import unix_socket
from tgi_cli.process.runtime_dir import (
    SOCKET,
    default_uds_path,
    runtime_folder,
)

PACKAGE = Path(tgi_cli.__file__).parent


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_the_folder_is_private_and_removed_afterwards(base: Path) -> None:
    with runtime_folder() as folder:
        assert folder.parent == base
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        unix_socket.claim(folder / SOCKET)
        (folder / SOCKET).touch()
    assert list(base.iterdir()) == []


def test_folders_of_killed_servers_are_removed_but_not_those_in_use(base: Path) -> None:
    with runtime_folder() as running:
        dead = base / "tgi-dead"
        dead.mkdir(mode=0o700)
        for name in ("lock", SOCKET):
            (dead / name).touch()
        for folder in (dead, running):
            os.utime(folder / "lock", (0, 0))
        with runtime_folder():
            assert not dead.exists()
            assert running.exists()


def test_a_link_to_a_folder_is_not_taken_for_one_of_a_killed_server(base: Path) -> None:
    mine = base / "mine"
    mine.mkdir()
    for name in ("lock", SOCKET):
        (mine / name).touch()
    os.utime(mine / "lock", (0, 0))
    (base / "tgi-link").symlink_to(mine)
    with runtime_folder():
        assert {path.name for path in mine.iterdir()} == {"lock", SOCKET}


def test_a_folder_with_other_files_is_not_removed(base: Path) -> None:
    with runtime_folder() as folder:
        (folder / "notes.txt").touch()
    assert (folder / "notes.txt").exists()


def test_a_base_path_too_long_for_a_socket_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="tgi-test-" + "x" * 90) as long:
        monkeypatch.setenv("XDG_RUNTIME_DIR", long)
        with runtime_folder() as folder:
            assert not folder.is_relative_to(long)


def test_the_default_socket_is_in_a_private_folder(base: Path) -> None:
    base.chmod(0o700)
    assert default_uds_path() == base / "tgi" / SOCKET
    base.chmod(0o755)
    assert str(os.geteuid()) in default_uds_path().parent.name


def test_the_servers_files_are_removed_with_the_folder(base: Path) -> None:
    with runtime_folder() as folder, socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "steps-0123"))  # of a router that was killed meanwhile
    assert list(base.iterdir()) == []
