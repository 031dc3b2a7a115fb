from __future__ import annotations

import os
from pathlib import Path

from tgi_cli.hub.derived_folders import create_once, keep_last_used


def make(parent: Path, name: str, weights: Path, age: int) -> Path:
    def fill(folder: Path) -> None:
        (folder / "model.gguf").symlink_to(weights)
        (folder / "tokenizer.json").write_text("{}")

    folder = create_once(parent / name, fill, lambda folder: None)
    os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    return folder


def test_the_last_used_folders_are_kept(tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    weights.touch()
    folders = [make(tmp_path / "made", f"m{age}", weights, age) for age in range(5)]
    keep_last_used(folders[4], 3)  # the oldest, which is in use again
    assert [folder.is_dir() for folder in folders] == [True, True, False, False, True]
    keep_last_used(folders[1], 2)
    assert [folder.is_dir() for folder in folders] == [False, True, False, False, True]
    assert weights.is_file()


def test_folders_whose_file_is_gone_are_removed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for path in paths:
        path.touch()
    folders = [make(tmp_path / "made", path.stem, path, age) for age, path in enumerate(paths)]
    other = tmp_path / "made" / "notes.txt"
    other.write_text("of somebody else")
    paths[1].unlink()
    keep_last_used(folders[0], 64)
    assert [folder.is_dir() for folder in folders] == [True, False, True]
    assert other.is_file()
