"""The loaded LoRA adapters, on the host and on the device. The store holds the weights.

    ===========  =================================  ============================================
    an adapter   from                               to
    ===========  =================================  ============================================
    is loaded    LoadAdapter                        UnloadAdapter, and the end of its last request
    on the host  its folder was read on a thread    another evicts it from the host, and none of
                                                    its requests waits for a slot
    has a slot   a step puts it on the device       another evicts it from the slot, and none of
                                                    its requests runs
    ===========  =================================  ============================================

Both caches evict the least recently used adapter (a device cache before a host cache, after
TensorRT-LLM's peft cache manager). An evicted adapter is read again for its next request; no other
request waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import AdapterAnswer, GenerationRequest, LoadAdapter
from tgi_cli.engine.step import AdapterStore, Step
from tgi_cli.errors import TgiError

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Adapter:
    """A loaded adapter.

    Attributes:
        live: requests that wait or run.
        running: requests that have a row.
        slot: its slot on the device, or -1.
        on_host: whether the store has it.
        answered: whether its LoadAdapter has been answered.
        unloading: whether an UnloadAdapter is to be answered.
        leaving: whether it is removed after its last request: it is unloading, or could not be
            read.
        used: number of the event at which a request of it last began or stopped running.
        reading: done when its folder has been read; None unless it is being read.
    """

    message: LoadAdapter
    live: int = 0
    running: int = 0
    slot: int = -1
    on_host: bool = False
    answered: bool = False
    unloading: bool = False
    leaving: bool = False
    used: int = 0
    reading: Future[None] | None = None

    @property
    def label(self) -> str:
        return f"adapter {self.message.name!r}"

    @property
    def wanted_on_host(self) -> bool:
        """Whether a request waits for it, and the device has no copy."""
        return self.slot < 0 and self.live > self.running


class LoraSlots:
    """Caches adapters on the host and in slots of the device.

    Args:
        config: number of slots, and of adapters on the host.
        store: the worker, or None without slots.

    Attributes:
        answers: outcomes of loads and unloads, not yet taken.
    """

    def __init__(self, config: SchedulerConfig, store: AdapterStore | None) -> None:
        self._max_on_host = config.max_cpu_loras
        self._store = store
        self._adapters: dict[int, _Adapter] = {}
        self._used_ids: set[int] = set()
        self._slots: list[_Adapter | None] = [None] * (config.max_loras if store else 0)
        self._busy = 0
        self._to_read: dict[int, None] = {}
        self._reading: dict[int, _Adapter] = {}
        self.answers: list[AdapterAnswer] = []
        self._events = 0

    # ------------------------------------------------------------------ messages

    def load(self, message: LoadAdapter) -> None:
        """Add an adapter; the answer follows once its folder has been read."""
        adapter_id = message.adapter_id
        if not self._slots:
            self._answer(adapter_id, "there are no slots for adapters; start with --max-loras")
        elif adapter_id < 1 or adapter_id in self._used_ids:
            self._answer(adapter_id, f"adapter id {adapter_id} was used before, or is below 1")
        else:
            self._used_ids.add(adapter_id)
            self._adapters[adapter_id] = _Adapter(message)
            self._to_read[adapter_id] = None
            self.read_wanted()

    def unload(self, adapter_id: int) -> None:
        """Refuse new requests for it; the answer follows once all others have ended."""
        adapter = self._adapters.get(adapter_id)
        if adapter is None or adapter.leaving:
            self._answer(adapter_id, f"adapter id {adapter_id} is not loaded")
            return
        adapter.leaving = adapter.unloading = True
        if not adapter.answered and not adapter.live and adapter.reading is None:
            adapter.answered = True
            self._answer(adapter_id, "it was unloaded before it was read")
        self._remove_if_unused(adapter)

    def take_answers(self) -> list[AdapterAnswer]:
        """The answers since the last call."""
        answers, self.answers = self.answers, []
        return answers

    # ------------------------------------------------------------------ reading

    @property
    def reading(self) -> bool:
        """Whether folders are being read, for :meth:`collect` to wait for."""
        return bool(self._reading)

    def read_wanted(self) -> None:
        """Start reading the adapters that requests need, in order, while the host can hold them.

        Must not be called between scheduling a step and its launch: the step may still need an
        adapter that this evicts.
        """
        if not self._to_read:
            return
        to_read, self._to_read = self._to_read, {}
        for adapter_id in to_read:
            adapter = self._adapters.get(adapter_id)
            if adapter is None or adapter.on_host or adapter.reading is not None:
                continue
            if not self._free_host_slot():
                if not adapter.answered:
                    self._to_read[adapter_id] = None  # no request needs it
                continue
            assert self._store is not None
            message = adapter.message
            adapter.reading = self._store.prepare_adapter(adapter_id, message.name, message.path)
            self._reading[adapter_id] = adapter

    def collect(self) -> list[tuple[int, str]]:
        """Take the adapters that have been read; returns the ids and causes of failed ones."""
        failed = []
        for adapter in [a for a in self._reading.values() if a.reading and a.reading.done()]:
            adapter_id, future = adapter.message.adapter_id, adapter.reading
            assert future is not None
            del self._reading[adapter_id]
            adapter.reading = None
            adapter.on_host = future.exception() is None
            self._touch(adapter)
            error = "" if adapter.on_host else f"{adapter.label}: {_cause(future.exception())}"
            if error:
                log.warning("%s", error)
                failed.append((adapter_id, error))
            if not adapter.answered:
                adapter.answered = True
                self._answer(adapter_id, error)
                # An adapter that could not be read is not loaded; its path may be tried again.
                adapter.leaving = adapter.leaving or bool(error)
            self._remove_if_unused(adapter)
        return failed

    def _free_host_slot(self) -> bool:
        """Whether the host can hold one more, perhaps by evicting the least recently used."""
        cached = [adapter for adapter in self._adapters.values() if adapter.on_host]
        if len(cached) + len(self._reading) < self._max_on_host:
            return True
        evictable = [adapter for adapter in cached if not adapter.wanted_on_host]
        if not evictable:
            return False
        self._evict(min(evictable, key=lambda adapter: adapter.used))
        return True

    def _evict(self, adapter: _Adapter) -> None:
        assert self._store is not None
        adapter.on_host = False
        self._store.forget_adapter(adapter.message.adapter_id)

    # ------------------------------------------------------------------ requests

    def validate(self, request: GenerationRequest) -> None:
        """Check that a request's adapter can be used. Raises ValueError."""
        if not request.adapter_id:
            return
        adapter = self._adapters.get(request.adapter_id)
        if adapter is None:
            raise ValueError(f"adapter id {request.adapter_id} is not loaded")
        if adapter.leaving:
            raise ValueError(f"{adapter.label} is being unloaded")

    def add_request(self, adapter_id: int) -> None:
        """Count a queued request."""
        if adapter_id:
            self._adapters[adapter_id].live += 1

    def remove_request(self, adapter_id: int) -> None:
        """Discount a request that has ended, and does not run."""
        if adapter_id:
            adapter = self._adapters[adapter_id]
            adapter.live -= 1
            self._remove_if_unused(adapter)

    def is_ready(self, adapter_id: int) -> bool:
        """Whether an adapter is on the host or the device; queues it for reading otherwise."""
        if not adapter_id:
            return True
        adapter = self._adapters[adapter_id]
        ready = adapter.on_host or adapter.slot >= 0
        if not ready and adapter.reading is None:
            self._to_read[adapter_id] = None
        return ready

    def has_slot(self, adapter_id: int) -> bool:
        """Whether an adapter that is ready has a slot, or can get one now."""
        if not adapter_id or self._busy < len(self._slots):
            return True
        return self._adapters[adapter_id].slot >= 0

    def have_slots(self, adapter_ids: Collection[int]) -> bool:
        """Whether all these adapters, which are ready, have slots or can get them now."""
        more = sum(not self._adapters[adapter_id].running for adapter_id in adapter_ids)
        return self._busy + more <= len(self._slots)

    def acquire(self, adapter_id: int, step: Step) -> int:
        """The slot for a request that begins to run, or -1 for none; ``step`` may fill it."""
        if not adapter_id:
            return -1
        adapter = self._adapters[adapter_id]
        if adapter.slot < 0:
            self._take_slot(adapter)
            step.adapters.append((adapter.slot, adapter_id))
        adapter.running += 1
        self._busy += adapter.running == 1
        self._touch(adapter)
        return adapter.slot

    def release(self, adapter_id: int) -> None:
        """Give up the slot of a request that ended or was preempted."""
        if adapter_id:
            adapter = self._adapters[adapter_id]
            adapter.running -= 1
            self._busy -= adapter.running == 0
            self._touch(adapter)

    def _take_slot(self, adapter: _Adapter) -> None:
        """Take an empty slot, or that of an idle adapter, one without waiting requests first."""
        if None in self._slots:
            slot = self._slots.index(None)
        else:
            idle = [a for a in self._slots if a is not None and not a.running]
            victim = min(idle, key=lambda a: (a.live > 0, a.used))
            slot, victim.slot = victim.slot, -1
        self._slots[slot] = adapter
        adapter.slot = slot

    def _touch(self, adapter: _Adapter) -> None:
        self._events += 1
        adapter.used = self._events

    def _remove_if_unused(self, adapter: _Adapter) -> None:
        """Remove an adapter that is leaving, once nothing needs it."""
        if not adapter.leaving or adapter.live or adapter.reading is not None:
            return
        adapter_id = adapter.message.adapter_id
        del self._adapters[adapter_id]
        if adapter.slot >= 0:
            self._slots[adapter.slot] = None
        if adapter.on_host:
            self._evict(adapter)
        if adapter.unloading:
            self._answer(adapter_id)

    def _answer(self, adapter_id: int, error: str = "") -> None:
        self.answers.append(AdapterAnswer(adapter_id, error))


def _cause(error: BaseException | None) -> str:
    """A cause in one line."""
    if isinstance(error, TgiError):
        return f"{error.cause}; {error.remedy}" if error.remedy else error.cause
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}"
