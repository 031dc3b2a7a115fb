"""``file:`` URLs reach files below one folder, and nothing else."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tgi_cli.vision.errors import MediaError
from tgi_cli.vision.local_files import read_file_url

IMAGE = b"the bytes of an image"
MISSING = "Could not fetch image: there is no such file below the allowed folder"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "in ner").mkdir(parents=True)
    (root / "a.png").write_bytes(IMAGE)
    (root / "in ner" / "ü%.png").write_bytes(IMAGE)
    (root / "empty").touch()
    (root / "link").symlink_to(root / "a.png")
    (root / "out").symlink_to(tmp_path)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-secret").write_bytes(b"secret")
    os.mkfifo(root / "pipe")
    return root


def read(root: Path, path: str, start: str = "file://", most: int = 100) -> bytes:
    return read_file_url(start + path, root, most)


@pytest.mark.parametrize("start", ["file://", "FILE://", "file://localhost"])
def test_files_below_the_folder_are_read(root: Path, start: str) -> None:
    assert read(root, f"{root}/a.png", start) == IMAGE
    assert read(root, f"{root}/in%20ner/%C3%BC%25.png", start) == IMAGE
    assert read(root, f"{root}/in ner/ü%25.png", start) == IMAGE


def test_the_folder_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert read(tmp_path / "alias", f"{tmp_path}/alias/a.png") == IMAGE


@pytest.mark.parametrize(
    "path",
    [
        *("ROOT/none", "ROOT", "ROOT/", "ROOT/in%20ner", "/", "", "/etc/passwd", "ROOT/a.png/b"),
        *("ROOT/../secret", "ROOT/%2e%2e/secret", "ROOT/in ner/../../secret", "ROOT/./a.png"),
        *("ROOT//a.png", "ROOT-secret", "TMP/secret", "TMP/media-secret", "ROOT/pipe"),
        *(
            "ROOT/\ud800",
            "ROOT/" + "x" * 5000,
            "ROOT/link",
            "ROOT/out/secret",
            "ROOT/out/media/a.png",
            "ROOT/..%2fsecret",
            "/dev/zero",
        ),
    ],
)
def test_nothing_else_is_read_and_one_text_answers(root: Path, path: str, tmp_path: Path) -> None:
    with pytest.raises(MediaError) as caught:
        read(root, path.replace("ROOT", str(root)).replace("TMP", str(tmp_path)))
    assert str(caught.value) == MISSING


@pytest.mark.parametrize(
    "url",
    [
        *("file://other/media/a.png", "file:a.png", "file:///a%00b", "file:///a?b", "file:///a%ff"),
        *("file://[/a", "file://user@localhost/a"),
    ],
)
def test_other_forms_are_refused(root: Path, url: str) -> None:
    with pytest.raises(MediaError, match=r"^invalid image content: "):
        read_file_url(url, root, 100)


def test_sizes_have_a_limit(root: Path) -> None:
    assert read(root, f"{root}/a.png", most=len(IMAGE)) == IMAGE
    with pytest.raises(
        MediaError, match=r"^Image size 21 bytes exceeds maximum allowed size of 20"
    ):
        read(root, f"{root}/a.png", most=20)
    with pytest.raises(MediaError, match=r"^invalid image: it is empty$"):
        read(root, f"{root}/empty")


def descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_files_are_closed(root: Path) -> None:
    before = descriptors()
    for path in ("a.png", "in%20ner", "in%20ner/x", "pipe", "link", "empty", "a.png/b"):
        with contextlib.suppress(MediaError):
            read(root, f"{root}/{path}")
    assert descriptors() == before
