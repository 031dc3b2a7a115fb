"""Reads the tensors of checkpoint files: from mappings, or ahead of the loader and several at once.

A CPU copies each tensor out of the mapped file once, as it packs it. A GPU copies from pinned
memory at the full rate of its bus, and from mapped pages at a fraction of that: these are read from
the disk as they are touched, by one thread, and copied again by the driver
(https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#pinned-memory).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tgi_cli.errors import CheckpointError
from tgi_cli.hub.safetensors_header import TensorEntry
from tgi_cli.hub.streamed_model import RangeReader
from tgi_cli.models.stored_tensor import StoredTensor
from tgi_cli.models.weight_files import file_header, unreadable

_MAPPED_BYTES = 16 << 20
"""Bytes to read from a mapping before it is dropped."""

_THREADS = 8
"""Parts of files that are read at once: a thread copies some gigabytes per second from the page
cache, and disks need several requests in flight."""

_PART_BYTES = 32 << 20
_AHEAD_BYTES = 1 << 30
"""Size of a part, and limit of the bytes that were read ahead and not taken yet."""

_AHEAD_REMOTE_BYTES = 64 << 20
"""Limit of the bytes read ahead for streamed weights, which add to the memory of loading."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtypes by their names in safetensors; tensors of others are read from mappings."""


class TensorReader(Protocol):
    """Reads tensors of checkpoint files, in a given order."""

    def read(self, stored: StoredTensor) -> Tensor:
        """The tensor, on the CPU; valid for as long as it is referred to.

        Raises:
            CheckpointError: its file cannot be read.
        """
        ...

    def close(self) -> None:
        """Close the files. May be called twice."""
        ...


class MappedReader:
    """Implements :class:`TensorReader` by mappings, closed after every ``_MAPPED_BYTES`` read.

    Pages that were read count as resident until they are unmapped.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}  # safe_open has no types
        self._stack = ExitStack()
        self._read = 0

    def read(self, stored: StoredTensor) -> Tensor:
        if stored.span is not None:
            return map_bytes(stored.file, *stored.span)
        if self._read >= _MAPPED_BYTES:
            self.close()
        try:
            if stored.file not in self._open:
                tensors = safe_open(stored.file, framework="pt")
                self._open[stored.file] = self._stack.enter_context(tensors)
            tensor: Tensor = self._open[stored.file].get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise unreadable(stored.file, error) from error
        self._read += tensor.nbytes
        return tensor

    def close(self) -> None:
        self._open.clear()
        self._stack.close()
        self._read = 0


class _Pending(NamedTuple):
    """A tensor that is being read."""

    stored: StoredTensor
    tensor: Tensor
    parts: list[Future[None]]


class ReadAhead:
    """Implements :class:`TensorReader` by threads, which read ahead into pinned memory.

    Args:
        wanted: the tensors in the order of the calls of :meth:`read`.
        pin: whether to pin the memory, which needs CUDA.
        remote: reads ranges of files that are not on this machine; closed with this reader.
    """

    def __init__(
        self, wanted: Iterable[StoredTensor], pin: bool, remote: RangeReader | None = None
    ) -> None:
        self._wanted = iter(wanted)
        self._pin = pin
        self._remote = remote
        self._read_into = _read_into if remote is None else remote.read_into
        self._ahead_bytes = _AHEAD_BYTES if remote is None else _AHEAD_REMOTE_BYTES
        self._mapped = MappedReader()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._headers: dict[Path, dict[str, TensorEntry]] = {}
        self._pending: deque[_Pending] = deque()
        self._ahead = 0
        self._exhausted = False

    def read(self, stored: StoredTensor) -> Tensor:
        self._read_more()
        if stored.dtype not in _DTYPES:
            if self._remote is not None:
                raise CheckpointError(
                    f"{stored.name} is {stored.dtype}, which --load-format stream does not read",
                    "leave it off",
                )
            return self._mapped.read(stored)
        pending = self._pending.popleft()
        if pending.stored is not stored:
            raise ValueError(f"{stored.name} is read where {pending.stored.name} was expected")
        self._ahead -= pending.tensor.nbytes
        try:
            for part in pending.parts:
                part.result()
        except OSError as error:
            raise unreadable(stored.file, error) from error
        return pending.tensor

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._mapped.close()

    def _read_more(self) -> None:
        while not self._exhausted and (self._ahead < self._ahead_bytes or not self._pending):
            stored = next(self._wanted, None)
            if stored is None:
                self._exhausted = True
            elif stored.dtype in _DTYPES:
                self._submit(stored)

    def _submit(self, stored: StoredTensor) -> None:
        start, size = stored.span or self._safetensors_span(stored)
        memory = self._take(size)
        target = memoryview(memory.numpy())  # type: ignore[arg-type]
        parts = [
            self._pool.submit(
                self._read_into, target[begin : begin + _PART_BYTES], stored.file, start + begin
            )
            for begin in range(0, size, _PART_BYTES)
        ]
        tensor = memory.view(_DTYPES[stored.dtype]).view(stored.shape)
        self._pending.append(_Pending(stored, tensor, parts))
        self._ahead += size

    def _take(self, size: int) -> Tensor:
        """Memory to read into, uint8 [size].

        What is streamed to a CPU has a mapping of its own, which goes back to the system with the
        tensor. Blocks of the heap that are freed between weights which stay would not: with tensors
        of a few megabytes, half of a small model was left in such holes.
        """
        if self._remote is None or self._pin or not size:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def _safetensors_span(self, stored: StoredTensor) -> tuple[int, int]:
        if stored.file not in self._headers:
            self._headers[stored.file] = file_header(stored.file)
        entry = self._headers[stored.file][stored.name]
        return entry.start, entry.size


def map_bytes(file: Path, start: int, size: int) -> Tensor:
    """Bytes of a file as uint8 [size], mapped for as long as the tensor is referred to.

    A mapping for each tensor: its pages are resident only as long as it is.
    """
    offset = start % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as stream:
            # Private and writable as far as torch is concerned, which warns of memory that is not.
            mapped = mmap.mmap(
                stream.fileno(), size + offset, access=mmap.ACCESS_COPY, offset=start - offset
            )
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset)


def _read_into(target: memoryview, file: Path, offset: int) -> None:
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while target:
            count = stream.readinto(target)
            if not count:
                raise OSError(f"it ends {len(target)} bytes too early")
            target = target[count:]
