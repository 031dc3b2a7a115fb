"""Transfers of several files at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tgi_cli.hub.cache import RepoCache
from tgi_cli.hub.repository import RepoFile, Repository
from tgi_cli.hub.transfers import Fetch, download_files
from tgi_cli.process.progress import ProgressReporter


def test_whatever_a_transfer_raises_ends_the_download(tmp_path: Path) -> None:
    """An IndexError, too, which is also that of an empty queue."""
    files = {name: RepoFile(name, 1, name * 40) for name in "abc"}
    cache = RepoCache(tmp_path, "org/m")

    @contextmanager
    def connect(*_: object) -> Iterator[Fetch]:
        def fetch(file: RepoFile) -> None:
            if file.name == "b":
                raise IndexError("a defect")

        yield fetch

    with pytest.raises(IndexError, match="a defect"):
        download_files(
            Repository("org/m", "main", "0" * 40, files),
            (tuple(files),),
            cache,
            ProgressReporter(show_bar=False, log_interval=None),
            connect,
        )
    assert cache.commit_of(None) is None, "it does not count as complete"
