"""Compiles what requests ask their answers to be, in processes that may be killed.

A schema of a few hundred bytes can cost hours or all memory. So each is compiled, and its first
mask computed, away from the event loop, within a time and a memory that are small enough for the
engine to do the same again; what came of it is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import select
import site
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tgi_cli
from tgi_cli.errors import RouterError
from tgi_cli.text.grammar import Grammar, GrammarError
from tgi_cli.text.grammar_worker import HEAD
from tgi_cli.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_CACHE_BYTES = 16 << 20
_KEEP_SECONDS = 60.0
"""What was too slow once may have been so because of everything else: it may come again then."""
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


class CheckerBusy(Exception):
    """Too many grammars wait to be compiled."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What compiling may cost.

    Attributes:
        processes: at work at once; started when they are needed.
        seconds, megabytes: of one grammar.
        wait_seconds: how long one may wait for a process.
    """

    processes: int = 2
    seconds: float = 5.0
    megabytes: int = 512
    wait_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class _Verdict:
    grammar: str
    error: str = ""
    until: float = float("inf")

    @property
    def size(self) -> int:
        return len(self.grammar) + len(self.error) + 200


class GrammarChecker:
    """Compiles grammars for one model; the same one only once.

    Args:
        tokenizer: its added tokens may be named in a grammar.
        ends: ids that end a text.
        limits: of each grammar, and of all.
    """

    def __init__(
        self, tokenizer: Tokenizer, ends: Collection[int], limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits()
        added = tokenizer.backend.get_added_tokens_decoder()
        self._hello = {
            "added": {token.content: index for index, token in added.items()},
            "special": [token.content for token in added.values() if token.special],
            "ends": sorted(ends),
            "seconds": self._limits.seconds,
            "megabytes": self._limits.megabytes,
        }
        self._cache: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._cached = 0
        self._pending: dict[bytes, asyncio.Future[_Verdict]] = {}
        self._threads = ThreadPoolExecutor(self._limits.processes, thread_name_prefix="grammar")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _kill_all, self._all)

    async def compile(self, grammar: Grammar) -> str:
        """The grammar as the engine takes it.

        Raises:
            GrammarError: it cannot be, or costs too much.
            CheckerBusy: no process was free in time.
            RouterError: no process can be started.
        """
        key = hashlib.sha256(grammar.form).digest()
        verdict = self._known(key)
        if verdict is None:
            pending = self._pending.get(key)
            if pending is None:
                pending = self._begin(key, grammar.form)
            verdict = await asyncio.shield(pending)  # others may wait for the same
        if verdict.error:
            raise GrammarError(verdict.error)
        return verdict.grammar

    def close(self) -> None:
        """End the processes; what is being compiled is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _known(self, key: bytes) -> _Verdict | None:
        verdict = self._cache.get(key)
        if verdict is None:
            return None
        if verdict.until < time.monotonic():
            self._cached -= self._cache.pop(key).size
            return None
        self._cache.move_to_end(key)
        return verdict

    def _begin(self, key: bytes, form: bytes) -> asyncio.Future[_Verdict]:
        latest = time.monotonic() + self._limits.wait_seconds
        loop = asyncio.get_running_loop()
        pending = loop.run_in_executor(self._threads, self._compile, form, latest)
        self._pending[key] = pending

        def done(future: asyncio.Future[_Verdict]) -> None:
            del self._pending[key]
            if not future.cancelled() and future.exception() is None:
                self._keep(key, future.result())

        pending.add_done_callback(done)
        return pending

    def _keep(self, key: bytes, verdict: _Verdict) -> None:
        self._cache[key] = verdict
        self._cached += verdict.size
        while self._cached > _CACHE_BYTES:
            self._cached -= self._cache.popitem(last=False)[1].size

    def _compile(self, form: bytes, latest: float) -> _Verdict:
        """In a thread: what a process says of the grammar, or what became of the process."""
        if time.monotonic() > latest:
            raise CheckerBusy
        process = self._take()
        limits = self._limits
        try:
            process.send(form)
            answer = process.receive(limits.seconds)
        except TimeoutError:
            self._end_of(process)
            cause = f"it takes more than {limits.seconds:g} s to compile"
            return _Verdict("", cause, time.monotonic() + _KEEP_SECONDS)
        except (OSError, EOFError):
            self._end_of(process)
            cause = f"it takes more than {limits.megabytes} MB of memory to compile"
            return _Verdict("", cause, time.monotonic() + _KEEP_SECONDS)
        if answer.get("defect"):
            logger.error("a grammar could not be compiled: %s", answer["error"])
        if answer["last"]:
            self._end_of(process)
        else:
            with self._lock:
                self._idle.append(process)
        return _Verdict(answer.get("grammar", ""), answer.get("error", ""))

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                self._all.discard(process)
        process = _Process()
        with self._lock:
            self._all.add(process)
        try:
            process.send(json.dumps(self._hello).encode())
            process.receive(_START_SECONDS)
        except (OSError, EOFError, TimeoutError) as error:
            self._end_of(process)
            raise RouterError(
                f"the process that compiles grammars did not start: {type(error).__name__} {error}",
                "see its own words above; without grammars: --disable-grammar-support",
            ) from error
        return process

    def _end_of(self, process: _Process) -> None:
        process.kill()
        with self._lock:
            self._all.discard(process)


class _Process:
    """One :mod:`tgi_cli.text.grammar_worker`, used by one thread at a time."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            # -P: files in the working directory do not pass for modules.
            [sys.executable, "-P", "-m", "tgi_cli.text.grammar_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT, **_where_this_is()},
            bufsize=0,
            # An interrupt of the terminal's is for the router, which ends it then.
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def send(self, body: bytes) -> None:
        """Raises OSError when it is gone."""
        assert self._popen.stdin is not None
        left = memoryview(HEAD.pack(len(body)) + body)
        while left:
            left = left[self._popen.stdin.write(left) :]

    def receive(self, seconds: float) -> dict[str, Any]:
        """Raises TimeoutError, and EOFError when it is gone."""
        until = time.monotonic() + seconds
        (length,) = HEAD.unpack(self._read(HEAD.size, until))
        answer: dict[str, Any] = json.loads(self._read(length, until))
        return answer

    def _read(self, count: int, until: float) -> bytes:
        assert self._popen.stdout is not None
        source = self._popen.stdout.fileno()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        found = b""
        while len(found) < count:
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1e3):
                raise TimeoutError(f"no answer within {left:g} s")
            piece = os.read(source, count - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found

    def kill(self) -> None:
        """End it now."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


def _where_this_is() -> dict[str, str]:
    """What lets another Python find this package, if it is not installed."""
    root = str(Path(tgi_cli.__file__).resolve().parents[1])
    if root in [*site.getsitepackages(), site.getusersitepackages()]:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _kill_all(processes: set[_Process]) -> None:
    for process in list(processes):
        process.kill()
