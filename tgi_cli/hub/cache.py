"""huggingface_hub's cache on disk: blobs by checksum, snapshots of links to them, refs to commits.

The layout is shared with every other tool of the hub, and documented at
https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tgi_cli.errors import CorruptFileError, DiskFullError, HubError, ModelNotFoundError
from tgi_cli.files import read_text
from tgi_cli.hub.repository import RepoFile

_COMMIT_LENGTH = 40


@dataclass(frozen=True)
class RepoCache:
    """The part of the cache that belongs to one model."""

    root: Path
    model_id: str

    @property
    def folder(self) -> Path:
        """``<cache>/models--org--name``."""
        return self.root / "--".join(["models", *self.model_id.split("/")])

    def snapshot(self, commit: str) -> Path:
        """The folder that looks like the repository at ``commit``."""
        return self.folder / "snapshots" / commit

    def blob(self, file: RepoFile) -> Path:
        """Where the bytes of ``file`` are, once they are complete and verified."""
        return self.folder / "blobs" / file.checksum

    def partial(self, file: RepoFile) -> Path:
        """Where the bytes of ``file`` grow; a later run goes on at its end."""
        return self.folder / "blobs" / f"{file.checksum}.incomplete"

    def lock(self, file: RepoFile) -> Path:
        """Held while ``file`` is being written, against a second process."""
        return self.root / ".locks" / self.folder.name / f"{file.checksum}.lock"

    def has(self, file: RepoFile) -> bool:
        """Whether the whole of ``file`` is there."""
        blob = self.blob(file)
        return blob.is_file() and blob.stat().st_size == file.size

    def missing_bytes(self, file: RepoFile) -> int:
        """Bytes of ``file`` that are still to be had."""
        if self.has(file):
            return 0
        partial = self.partial(file)
        return max(file.size - (partial.stat().st_size if partial.is_file() else 0), 0)

    def link(self, file: RepoFile, commit: str) -> Path:
        """Put ``file`` into the snapshot, as a link where the file system has links."""
        place = self.place(file.name, commit)
        blob = self.blob(file)
        if place.exists() and place.stat().st_size == file.size:
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        try:
            place.symlink_to(os.path.relpath(blob, place.parent))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.copyfile(blob, place)
        return place

    def place(self, name: str, commit: str) -> Path:
        """The path of the repository's file ``name``; refuses names that lead elsewhere."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or not pure.parts:
            raise CorruptFileError(f"{self.model_id} lists a file with the path {name!r}")
        return self.snapshot(commit).joinpath(*pure.parts)

    def _ref(self, revision: str) -> Path:
        if ".." in PurePosixPath(revision).parts or revision.startswith("/"):
            raise ModelNotFoundError(
                f"{revision!r} is no revision", "give a branch, a tag, a commit or refs/pr/N"
            )
        return self.folder / "refs" / revision

    def remember(self, revision: str, commit: str) -> None:
        """Note that the branch or tag ``revision`` stood at ``commit``, for offline use."""
        if revision != commit:
            ref = self._ref(revision)
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)

    def commit_of(self, revision: str | None) -> str | None:
        """The commit that ``revision`` stood at when it was last seen, or None."""
        ref = self._ref(revision or "main")
        if ref.is_file():
            return read_text(ref).strip()
        if revision is None:
            return None
        folder = self.folder / "snapshots"
        found = [
            path.name
            for path in (folder.iterdir() if folder.is_dir() else ())
            if len(path.name) == _COMMIT_LENGTH and path.name.startswith(revision)
        ]
        return found[0] if len(found) == 1 and len(revision) >= 7 else None


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` against other threads and processes, as huggingface_hub does."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(path):
        yield


def human_bytes(count: float) -> str:
    """A size as the hub writes it, in powers of 1000.

    >>> human_bytes(14_500_000_000)
    '14.5 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise DiskFullError unless ``needed`` bytes are free where ``folder`` is, or will be."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DiskFullError(
            f"{what} needs {human_bytes(needed)} and {folder} has {human_bytes(free)} free",
            "free some space, or set HF_HUB_CACHE to a larger disk",
        )


def disk_error(error: OSError, folder: Path) -> HubError:
    """What an OSError while writing into the cache means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"the disk of {folder} is full",
            "free some space or set HF_HUB_CACHE to a larger disk, then run the same again: "
            "it goes on where it stopped",
        )
    reason = error.strerror or str(error)
    return HubError(
        f"cannot write into {folder}: {reason}", "set HF_HUB_CACHE to a folder that can be written"
    )
