"""Files that others wrote are read within bounds of kind, size, depth and number."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tgi_cli import files
from tgi_cli.files import FileRefusedError, decode_json, read_bytes, read_json, require_file
from tgi_cli.patterns import PatternError, Patterns


def test_files_within_the_limits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    deep = json.loads("[" * files.MAX_DEPTH + "]" * files.MAX_DEPTH)
    for value in ({"a": [1, 2.5, None]}, deep, "text", 10**400, [[]] * 1000):
        path.write_text(json.dumps(value))
        assert read_json(path) == value
    link = tmp_path / "link.json"
    link.symlink_to(path)  # as in the hub's cache
    assert read_json(link) == [[]] * 1000


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev/full"])
def test_devices_are_rejected(path: str) -> None:
    for read in (read_bytes, read_json, lambda path: require_file(path, 1 << 40)):
        with pytest.raises(FileRefusedError, match="a device"):
            read(Path(path))


def test_pipes_folders_and_sockets_are_rejected_at_once(tmp_path: Path) -> None:
    pipe, listening = tmp_path / "pipe", tmp_path / "s"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(listening))
        began = time.process_time()
        for path, error in (
            (pipe, FileRefusedError),
            (listening, FileRefusedError),
            (tmp_path, IsADirectoryError),
            (tmp_path / "none", FileNotFoundError),
        ):
            with pytest.raises(error):
                read_json(path)
        assert time.process_time() - began < 5


def test_a_pipe_is_read_where_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"x" * 100_000,))
    writer.start()
    assert read_bytes(pipe, pipes=True) == b"x" * 100_000
    writer.join()
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="nothing was written"):
        read_bytes(pipe, pipes=True)


def test_large_files_are_rejected_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # no blocks: it takes no space
    with pytest.raises(FileRefusedError, match="more than 16 MiB"):
        read_json(path)
    with pytest.raises(FileRefusedError, match="more than 1 MiB"):
        require_file(path, 1 << 20)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 200_000 + "1" + "}" * 200_000,
        "[" * (files.MAX_DEPTH + 2) + "]" * (files.MAX_DEPTH + 2),
        "1" * 100_000,
        "[" + "{}," * files.MAX_VALUES + "{}]",
        "",
        "nan",
        "\xff",
    ],
    ids=lambda text: text[:6],
)
def test_text_beyond_the_limits_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (of json's, too)
        decode_json(text.encode("latin-1"))
    assert len(str(caught.value)) < 200


def test_patterns_take_a_bounded_time() -> None:
    patterns = Patterns(0.3)
    assert patterns.match(r".*self_attn\.(q|k)_proj", "model.layers.0.self_attn.q_proj")
    assert not patterns.fullmatch("model", "model.layers")
    began = time.process_time()
    for _ in range(5):  # the time of all of them
        with pytest.raises(PatternError, match="takes too long"):
            patterns.match("(a|aa)+$", "a" * 60 + "b")
    assert time.process_time() - began < 5
    for pattern in ("(", "a" * 5000, "(?:" * 3000):
        with pytest.raises(PatternError):
            Patterns().match(pattern, "x")
