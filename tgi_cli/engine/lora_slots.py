"""Which LoRA adapters are known, read, and on the device. Numbers only; the store has the weights.

    ===========  =================================  ============================================
    an adapter   from                               to
    ===========  =================================  ============================================
    is known     LoadAdapter                        UnloadAdapter, and the end of its last request
    is held      its folder was read on a thread    room is needed on the host, and none of its
                                                    requests waits for a slot
    has a slot   a step puts it on the device       another needs the slot, and none of its
                                                    requests runs
    ===========  =================================  ============================================

Both caches give up what was used longest ago (a device cache before a host cache, after
TensorRT-LLM's peft cache manager). An adapter that was given up is read again when a request
asks for it; that request waits, nobody else does.
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
    """Attributes:

    live: requests that wait or run.
    running: those of them that have a row.
    answered: the outcome of its LoadAdapter was told.
    unloading: an UnloadAdapter came and is to be answered.
    leaving: that, or it could not be loaded: it goes once no request is left.
    used: when a request of it last began or ended to run, in events.
    """

    message: LoadAdapter
    live: int = 0
    running: int = 0
    slot: int = -1
    held: bool = False
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
        """Whether a request waits for it that the device's copy does not serve."""
        return self.slot < 0 and self.live > self.running


class LoraSlots:
    """Gives slots of the device to adapters whose requests run, and room on the host to others.

    Args:
        config: how many slots there are, and how many adapters the host may hold.
        store: the worker; None where there are no slots.

    Attributes:
        answers: what became of loads and unloads, to be told.
    """

    def __init__(self, config: SchedulerConfig, store: AdapterStore | None) -> None:
        self._max_held = config.max_cpu_loras
        self._store = store
        self._known: dict[int, _Adapter] = {}
        self._spent: set[int] = set()
        self._slots: list[_Adapter | None] = [None] * (config.max_loras if store else 0)
        self._busy = 0
        self._wanted: dict[int, None] = {}
        self._reading: dict[int, _Adapter] = {}
        self.answers: list[AdapterAnswer] = []
        self._events = 0

    # ------------------------------------------------------------------ messages

    def load(self, message: LoadAdapter) -> None:
        """Take in a new adapter; the answer follows once it was read."""
        adapter_id = message.adapter_id
        if not self._slots:
            error = "no room for adapters was made; start the server with --max-loras"
            self.answers.append(AdapterAnswer(adapter_id, error))
        elif adapter_id < 1 or adapter_id in self._spent:
            error = f"adapter id {adapter_id} cannot be used: it was given before, or is below 1"
            self.answers.append(AdapterAnswer(adapter_id, error))
        else:
            self._spent.add(adapter_id)
            self._known[adapter_id] = _Adapter(message)
            self._wanted[adapter_id] = None
            self.read_wanted()

    def unload(self, adapter_id: int) -> None:
        """Refuse new requests for it; the answer follows once the last of the others has ended."""
        adapter = self._known.get(adapter_id)
        if adapter is None or adapter.leaving:
            error = f"adapter id {adapter_id} is not loaded"
            self.answers.append(AdapterAnswer(adapter_id, error))
            return
        adapter.leaving = adapter.unloading = True
        if not adapter.answered and not adapter.live and adapter.reading is None:
            adapter.answered = True
            self.answers.append(AdapterAnswer(adapter_id, "it was unloaded before it was read"))
        self._drop_if_left(adapter)

    def take_answers(self) -> list[AdapterAnswer]:
        """Those since the last call."""
        answers, self.answers = self.answers, []
        return answers

    # ------------------------------------------------------------------ reading

    @property
    def reading(self) -> bool:
        """Whether folders are being read; :meth:`collect` takes in what is done."""
        return bool(self._reading)

    def read_wanted(self) -> None:
        """Start to read what was asked for, in that order, as far as the host has room.

        Not to be called between scheduling a step and its launch: the step may still need what
        is given up.
        """
        if not self._wanted:
            return
        wanted, self._wanted = self._wanted, {}
        for adapter_id in wanted:
            adapter = self._known.get(adapter_id)
            if adapter is None or adapter.held or adapter.reading is not None:
                continue
            if not self._make_room():
                if not adapter.answered:
                    self._wanted[adapter_id] = None  # nobody else asks for it again
                continue
            assert self._store is not None
            message = adapter.message
            adapter.reading = self._store.prepare_adapter(adapter_id, message.name, message.path)
            self._reading[adapter_id] = adapter

    def collect(self) -> list[tuple[int, str]]:
        """Take in the readings that are done; returns the ids of those that failed, and why."""
        failed = []
        for adapter in [a for a in self._reading.values() if a.reading and a.reading.done()]:
            adapter_id, future = adapter.message.adapter_id, adapter.reading
            assert future is not None
            del self._reading[adapter_id]
            adapter.reading = None
            adapter.held = future.exception() is None
            self._touch(adapter)
            error = "" if adapter.held else f"{adapter.label}: {_cause(future.exception())}"
            if error:
                log.warning("%s", error)
                failed.append((adapter_id, error))
            if not adapter.answered:
                adapter.answered = True
                self.answers.append(AdapterAnswer(adapter_id, error))
                # One that could not be loaded is not known; the same path may be tried again.
                adapter.leaving = adapter.leaving or bool(error)
            self._drop_if_left(adapter)
        return failed

    def _make_room(self) -> bool:
        """Whether the host can hold one more, after giving up what was used longest ago."""
        held = [adapter for adapter in self._known.values() if adapter.held]
        if len(held) + len(self._reading) < self._max_held:
            return True
        free = [adapter for adapter in held if not adapter.wanted_on_host]
        if not free:
            return False
        self._forget(min(free, key=lambda adapter: adapter.used))
        return True

    def _forget(self, adapter: _Adapter) -> None:
        assert self._store is not None
        adapter.held = False
        self._store.forget_adapter(adapter.message.adapter_id)

    # ------------------------------------------------------------------ requests

    def validate(self, request: GenerationRequest) -> None:
        """Check that a request's adapter can be used. Raises ValueError."""
        if not request.adapter_id:
            return
        adapter = self._known.get(request.adapter_id)
        if adapter is None:
            raise ValueError(f"adapter id {request.adapter_id} is not loaded")
        if adapter.leaving:
            raise ValueError(f"{adapter.label} is being unloaded")

    def joined(self, adapter_id: int) -> None:
        """A request was queued."""
        if adapter_id:
            self._known[adapter_id].live += 1

    def ended(self, adapter_id: int) -> None:
        """A request, which does not run any more, has ended."""
        if adapter_id:
            adapter = self._known[adapter_id]
            adapter.live -= 1
            self._drop_if_left(adapter)

    def is_ready(self, adapter_id: int) -> bool:
        """Whether a slot is all that a request may lack; asks for a reading otherwise."""
        if not adapter_id:
            return True
        adapter = self._known[adapter_id]
        ready = adapter.held or adapter.slot >= 0
        if not ready and adapter.reading is None:
            self._wanted[adapter_id] = None
        return ready

    def has_slot(self, adapter_id: int) -> bool:
        """Whether an adapter that is ready has a slot, or can have one now."""
        if not adapter_id or self._busy < len(self._slots):
            return True
        return self._known[adapter_id].slot >= 0

    def have_slots(self, adapter_ids: Collection[int]) -> bool:
        """Whether all these, which are ready, have slots or can have them now."""
        more = sum(not self._known[adapter_id].running for adapter_id in adapter_ids)
        return self._busy + more <= len(self._slots)

    def enter(self, adapter_id: int, step: Step) -> int:
        """The slot of a request that begins to run, -1: it needs none. ``step`` may fill it."""
        if not adapter_id:
            return -1
        adapter = self._known[adapter_id]
        if adapter.slot < 0:
            self._take_slot(adapter)
            step.adapters.append((adapter.slot, adapter_id))
        adapter.running += 1
        self._busy += adapter.running == 1
        self._touch(adapter)
        return adapter.slot

    def leave(self, adapter_id: int) -> None:
        """A request runs no more: it ended or was preempted."""
        if adapter_id:
            adapter = self._known[adapter_id]
            adapter.running -= 1
            self._busy -= adapter.running == 0
            self._touch(adapter)

    def _take_slot(self, adapter: _Adapter) -> None:
        """An empty slot, or that of an idle adapter: rather of one that nobody waits for."""
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

    def _drop_if_left(self, adapter: _Adapter) -> None:
        """Forget an adapter that is unloaded, once nothing needs it."""
        if not adapter.leaving or adapter.live or adapter.reading is not None:
            return
        adapter_id = adapter.message.adapter_id
        del self._known[adapter_id]
        if adapter.slot >= 0:
            self._slots[adapter.slot] = None
        if adapter.held:
            self._forget(adapter)
        if adapter.unloading:
            self.answers.append(AdapterAnswer(adapter_id))


def _cause(error: BaseException | None) -> str:
    """In one line."""
    if isinstance(error, TgiError):
        return f"{error.cause}; {error.remedy}" if error.remedy else error.cause
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}"
