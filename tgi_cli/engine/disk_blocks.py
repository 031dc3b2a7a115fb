"""Copies of KV blocks on a disk, written and read by threads (``--kv-cache-dir``)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import cast

from tgi_cli.config import EngineConfig
from tgi_cli.config.settings.engine import DEFAULT_KV_CACHE_DIR_SIZE
from tgi_cli.engine.block_files import BlockFiles
from tgi_cli.engine.block_store import BlockExporter, StoreEvent
from tgi_cli.errors import ConfigError
from tgi_cli.process.units import format_size

log = logging.getLogger(__name__)

WRITE_BYTES = 256 << 20
"""Limit of the bytes that wait to be written: beyond it, sequences offer their blocks later."""

_MOST_WRITES = 10_000
"""Writes that wait, beyond which it is not noted when blocks were used: the disk may hang."""

READ_BYTES = 64 << 20
"""Lower bound of the limit of the bytes that were read and not taken yet."""

_READ_SHARE = 4
"""Blocks that were read and not taken yet may have the size of 1 / ``_READ_SHARE`` of the cache."""

FIRST_BANDWIDTH = 500e6
"""Assumed bytes per second of reading, before any was measured."""

OVERHEAD_SECONDS = 0.008
"""Time that a run of blocks waits for the reading thread and for the engine's loop."""

_NEW = 0.3
"""Weight of the latest measurement in a moving average."""

_PAUSE_SECONDS = 60.0
"""Time without writing after the disk has refused."""

_LEAST_WAIT = 1.0
_MOST_WAIT = 10.0
"""Bounds of the seconds that a sequence waits for its blocks."""


def open_disk_blocks(
    config: EngineConfig, worker: object, cache_bytes: int, step_seconds: float
) -> DiskBlocks | None:
    """Open the store of a worker's blocks; None without ``--kv-cache-dir``.

    Args:
        config: as warm-up has left it.
        worker: with one shard a BlockExporter, warmed up.
        cache_bytes: bytes of its cache.
        step_seconds: the warm-up's estimate for the largest step; 0 if unknown.

    Raises:
        ConfigError: the folder cannot be used.
    """
    folder = config.kv_cache_dir
    if folder is None:
        return None
    if config.num_shard > 1:
        raise ConfigError("--kv-cache-dir needs one shard", "leave it or --num-shard off")
    exporter = cast(BlockExporter, worker)
    limit = config.kv_cache_dir_size or DEFAULT_KV_CACHE_DIR_SIZE
    try:
        files = BlockFiles(folder.expanduser(), limit, exporter.block_identity())
    except OSError as error:
        raise ConfigError(
            f"--kv-cache-dir {folder} cannot be used: {error.strerror or error}",
            "name a folder that this user may write into",
        ) from error
    used, most = format_size(files.num_bytes), format_size(limit)
    log.info("KV blocks are kept in %s: %s of at most %s", folder, used, most)
    return DiskBlocks(
        files,
        exporter.export_block,
        config.block_size,
        exporter.block_bytes,
        cache_bytes // _READ_SHARE,
        step_seconds / config.max_batch_prefill_tokens,
    )


class DiskRead:
    """Implements :class:`tgi_cli.engine.block_store.StoredBlocks`: one run of blocks.

    Args:
        names: names of the files.
        deadline: in ``time.monotonic()``; from then on, it is not worth waiting for the rest.
        release: called once, when the blocks were taken.
    """

    def __init__(
        self, names: Sequence[str], deadline: float, release: Callable[[], object]
    ) -> None:
        self.names = names
        self.read: list[bytes] = []
        self.finished = False
        self.taken = False
        self._deadline = deadline
        self._release = release

    @property
    def done(self) -> bool:
        return self.finished or time.monotonic() >= self._deadline

    @property
    def num_ready(self) -> int:
        return len(self.read)

    def take(self) -> list[bytes]:
        read, self.read = self.read, []
        if not self.taken:
            self.taken = True
            self._release()
        return read


class DiskBlocks:
    """Implements :class:`tgi_cli.engine.block_store.BlockStore` over a folder.

    A run of blocks is read only where that is expected to take less time than computing it: by the
    rate of reading and the cost of a prompt token, both measured as they occur. So there is a
    shortest run that is worth it, and on a slow disk there is none.

    Args:
        files: the folder.
        export: copies a block of the cache; called on the engine's thread.
        block_size: tokens of a block.
        block_bytes: its bytes.
        read_bytes: limit of what was read and not taken yet, of all sequences.
        token_seconds: time to compute a prompt token, as measured at warm-up; 0 if unknown.
    """

    def __init__(
        self,
        files: BlockFiles,
        export: Callable[[int], bytes],
        block_size: int,
        block_bytes: int,
        read_bytes: int = READ_BYTES,
        token_seconds: float = 0.0,
    ) -> None:
        self._files = files
        self._counts = files.counts
        self._export = export
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._read_bytes = max(read_bytes, READ_BYTES, block_bytes)
        self._token_seconds = token_seconds
        self._bandwidth = FIRST_BANDWIDTH
        self._lock = threading.Lock()
        self._untaken = 0
        self._reserved = 0
        self._waiting: set[str] = set()
        self._waiting_bytes = 0
        self._refused_at = -_PAUSE_SECONDS
        self._writes: SimpleQueue[tuple[str, bytes] | list[bytes] | None] = SimpleQueue()
        self._reads: SimpleQueue[DiskRead | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._write_all, name="kv-writer", daemon=True),
            threading.Thread(target=self._read_all, name="kv-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes(self) -> int:
        return self._files.num_bytes

    @property
    def counts(self) -> Mapping[StoreEvent, int]:
        return self._counts

    # ------------------------------------------------------------------ the engine's thread

    @property
    def loading(self) -> bool:
        return self._untaken > 0

    @property
    def is_full(self) -> bool:
        return self._reserved + self._block_bytes > self._read_bytes

    def save(self, content: bytes, block: int) -> bool:
        name = self._files.name_of(content)
        if self._files.has(name) or name in self._waiting:
            return True
        if time.monotonic() - self._refused_at < _PAUSE_SECONDS:
            return True  # dropped
        if self._waiting_bytes + self._block_bytes > WRITE_BYTES and self._waiting:
            return False
        with self._lock:
            self._waiting.add(name)
            self._waiting_bytes += self._block_bytes
        self._writes.put((name, self._export(block)))
        return True

    def load(self, contents: Sequence[bytes]) -> DiskRead | None:
        names = []
        num_free = max(0, self._read_bytes - self._reserved) // self._block_bytes
        for content in contents[:num_free]:
            name = self._files.name_of(content)
            if not self._files.has(name):
                break
            names.append(name)
        self._count(StoreEvent.MISS, min(num_free, len(contents)) - len(names))
        if not names or not self._is_worth_reading(len(names)):
            self._count(StoreEvent.SKIPPED, len(names))
            return None
        size = len(names) * self._block_bytes
        wait = self._compute_seconds(len(names)) if self._token_seconds else _MOST_WAIT
        deadline = time.monotonic() + min(max(wait, _LEAST_WAIT), _MOST_WAIT)
        with self._lock:
            self._untaken += 1
            self._reserved += size

        def release() -> None:
            with self._lock:
                self._reserved -= size
                self._untaken -= 1

        read = DiskRead(names, deadline, release)
        self._reads.put(read)
        return read

    def touch(self, contents: Sequence[bytes]) -> None:
        if self._writes.qsize() < _MOST_WRITES:
            self._writes.put(list(contents))

    def timed(self, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens >= 4 * self._block_size:
            cost = seconds / prompt_tokens
            known = self._token_seconds or cost
            self._token_seconds = (1 - _NEW) * known + _NEW * cost

    def _count(self, event: StoreEvent, blocks: int) -> None:
        with self._lock:
            self._counts[event] += blocks

    def _compute_seconds(self, count: int) -> float:
        return count * self._block_size * self._token_seconds

    def _is_worth_reading(self, count: int) -> bool:
        if not self._token_seconds:
            return True
        seconds = OVERHEAD_SECONDS + count * self._block_bytes / self._bandwidth
        if seconds < self._compute_seconds(count):
            return True
        self._bandwidth *= 1.02  # otherwise, a disk that was slow once would never be tried again
        return False

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits, for at most ``seconds``, and end the threads."""
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join(seconds)

    # ------------------------------------------------------------------ threads

    def _write_all(self) -> None:
        while True:
            try:
                item = self._writes.get(timeout=5.0)
            except Empty:
                self._guarded(self._files.scan_if_due)
                continue
            if item is None:
                return
            if isinstance(item, list):
                self._files.touch(map(self._files.name_of, item))
                continue
            name, payload = item
            if not self._guarded(partial(self._files.write, name, payload)):
                self._count(StoreEvent.FAILED, 1)
            with self._lock:
                self._waiting.discard(name)
                self._waiting_bytes -= self._block_bytes
            self._guarded(self._files.scan_if_due)

    def _guarded(self, work: Callable[[], object]) -> bool:
        """Do work on the disk, and pause if that fails. Returns whether it was done."""
        if time.monotonic() - self._refused_at < _PAUSE_SECONDS:
            return False
        try:
            work()
        except OSError as error:
            log.warning(
                "--kv-cache-dir: %s; nothing is written for %.0f s",
                error.strerror or error,
                _PAUSE_SECONDS,
            )
            self._refused_at = time.monotonic()
            return False
        return True

    def _read_all(self) -> None:
        while (read := self._reads.get()) is not None:
            try:
                self._read(read)
            except Exception:  # whatever it is, the sequence computes what was not read
                log.exception("--kv-cache-dir cannot be read")
            finally:
                read.finished = True

    def _read(self, read: DiskRead) -> None:
        began = time.perf_counter()
        count = 0
        for name in read.names:
            if read.taken:
                self._count(StoreEvent.SKIPPED, len(read.names) - count)
                break
            payload = self._files.read(name, self._block_bytes)
            if payload is None or len(payload) != self._block_bytes:
                self._count(StoreEvent.MISS, len(read.names) - count)
                break
            read.read.append(payload)
            count += 1
        self._count(StoreEvent.HIT, count)
        if count >= 4:
            rate = count * self._block_bytes / max(time.perf_counter() - began, 1e-9)
            self._bandwidth = (1 - _NEW) * self._bandwidth + _NEW * rate
