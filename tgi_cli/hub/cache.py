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
from tgi_cli.process.units import format_size

_COMMIT_LENGTH = 40


@dataclass(frozen=True)
class RepoCache:
    """One model's part of the cache."""

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
        """Path of the complete and verified bytes of ``file``."""
        return self.folder / "blobs" / file.checksum

    def partial(self, file: RepoFile) -> Path:
        """Path of an unfinished download of ``file``; a later run resumes at its end."""
        return self.folder / "blobs" / f"{file.checksum}.incomplete"

    def lock(self, file: RepoFile) -> Path:
        """Lock file that protects ``file`` from concurrent writers."""
        return self.root / ".locks" / self.folder.name / f"{file.checksum}.lock"

    def has(self, file: RepoFile) -> bool:
        """Whether ``file`` is complete."""
        blob = self.blob(file)
        return blob.is_file() and blob.stat().st_size == file.size

    def missing_bytes(self, file: RepoFile) -> int:
        """Number of bytes of ``file`` left to download."""
        if self.has(file):
            return 0
        partial = self.partial(file)
        return max(file.size - (partial.stat().st_size if partial.is_file() else 0), 0)

    def link(self, file: RepoFile, commit: str) -> Path:
        """Add ``file`` to the snapshot, as a symbolic link if the file system supports them."""
        path = self.snapshot_file(file.name, commit)
        blob = self.blob(file)
        if path.exists() and path.stat().st_size == file.size:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.copyfile(blob, path)
        return path

    def snapshot_file(self, name: str, commit: str) -> Path:
        """Path of the file ``name`` in the snapshot; CorruptFileError for names that escape it."""
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

    def save_ref(self, revision: str, commit: str) -> None:
        """Record that the branch or tag ``revision`` points to ``commit``, for offline use."""
        if revision != commit:
            ref = self._ref(revision)
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)

    def commit_of(self, revision: str | None) -> str | None:
        """The last known commit of ``revision``, or None. Default: main."""
        ref = self._ref(revision or "main")
        if ref.is_file():
            return read_text(ref).strip()
        if revision is None or len(revision) < 7:
            return None
        snapshots = self.folder / "snapshots"
        found = [
            path.name
            for path in (snapshots.iterdir() if snapshots.is_dir() else ())
            if len(path.name) == _COMMIT_LENGTH and path.name.startswith(revision)
        ]
        return found[0] if len(found) == 1 else None


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` against other threads and processes, as huggingface_hub does."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(path):
        yield


def require_space(folder: Path, needed: int, description: str) -> None:
    """Raise DiskFullError unless ``needed`` bytes are free on the disk of ``folder``."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DiskFullError(
            f"{description} needs {format_size(needed)} and {folder} has {format_size(free)} free",
            "free some space, or set HF_HUB_CACHE to a larger disk",
        )


def disk_error(error: OSError, folder: Path) -> HubError:
    """Translate an OSError while writing into the cache."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"the disk of {folder} is full",
            "free some space or set HF_HUB_CACHE to a larger disk, then run the same again: "
            "the download resumes",
        )
    reason = error.strerror or str(error)
    return HubError(
        f"cannot write into {folder}: {reason}", "set HF_HUB_CACHE to a writable folder"
    )
