"""Compiles the grammars of requests in processes that may be killed.

A schema of a few hundred bytes can take hours or all memory. So each grammar is compiled, and its
first mask computed, off the event loop, within limits that are small enough for the engine to do
the same again. The result is cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tgi_cli.process.worker_pool import LimitError, Limits, WorkerPool
from tgi_cli.text.grammar.grammar import Grammar, GrammarError
from tgi_cli.text.tokenizer import Tokenizer

_CACHE_BYTES = 16 << 20
_KEEP_SECONDS = 60.0
"""Time to cache a failure by slowness: the load of the machine may have been the cause."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    grammar: str
    error: str = ""
    until: float = float("inf")

    @property
    def size(self) -> int:
        return len(self.grammar) + len(self.error) + 200


class GrammarChecker:
    """Compiles grammars for one model, each once.

    Args:
        tokenizer: Grammars may name its added tokens.
        ends: Ids that end a text.
        limits: Limits of each grammar and of all of them.

    Attributes:
        pool: The processes.
        cached_bytes: Size of the cached results.
    """

    def __init__(
        self, tokenizer: Tokenizer, ends: Collection[int], limits: Limits | None = None
    ) -> None:
        self.pool = WorkerPool(
            "tgi_cli.text.grammar.compile_process",
            token_setup(tokenizer, ends),
            limits or Limits(),
            what="grammar compiler",
            remedy="see its output above, or use --disable-grammar-support",
            environment={"RAYON_NUM_THREADS": "1"},
        )
        self._cache: OrderedDict[bytes, _Verdict] = OrderedDict()
        self.cached_bytes = 0
        self._pending: dict[bytes, asyncio.Task[_Verdict]] = {}

    async def compile(self, grammar: Grammar) -> str:
        """Compile a grammar into the engine's form.

        Raises:
            GrammarError: It is invalid, or costs too much.
            WorkersBusy: No process was free in time.
            WorkerError: No process can be started, or processes are killed from outside.
        """
        key = hashlib.sha256(grammar.form).digest()
        verdict = self._known(key)
        if verdict is None:
            pending = self._pending.get(key)
            if pending is None:
                pending = self._begin(key, grammar.form)
            verdict = await asyncio.shield(pending)  # other requests may wait for it
        if verdict.error:
            raise GrammarError(verdict.error)
        return verdict.grammar

    def close(self) -> None:
        """End the processes, and with them what they compile."""
        self.pool.close()

    def _known(self, key: bytes) -> _Verdict | None:
        verdict = self._cache.get(key)
        if verdict is None:
            return None
        if verdict.until < time.monotonic():
            self.cached_bytes -= self._cache.pop(key).size
            return None
        self._cache.move_to_end(key)
        return verdict

    def _begin(self, key: bytes, form: bytes) -> asyncio.Task[_Verdict]:
        pending = asyncio.create_task(self._verdict(form))
        self._pending[key] = pending

        def done(task: asyncio.Task[_Verdict]) -> None:
            del self._pending[key]
            if not task.cancelled() and task.exception() is None:
                self._keep(key, task.result())

        pending.add_done_callback(done)
        return pending

    def _keep(self, key: bytes, verdict: _Verdict) -> None:
        self._cache[key] = verdict
        self.cached_bytes += verdict.size
        while self.cached_bytes > _CACHE_BYTES:
            self.cached_bytes -= self._cache.popitem(last=False)[1].size

    async def _verdict(self, form: bytes) -> _Verdict:
        try:
            answer = await self.pool.run_async(form)
        except LimitError as error:
            cause = f"it takes {error} to compile"
            return _Verdict("", cause, time.monotonic() + _KEEP_SECONDS)
        return _Verdict(answer.get("grammar", ""), answer.get("error", ""))


def token_setup(tokenizer: Tokenizer, ends: Collection[int]) -> dict[str, Any]:
    """Arguments of :class:`~tgi_cli.text.grammar.tokens.SpecialTokens` as JSON values."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {
        "added": {token.content: index for index, token in added.items()},
        "special": [token.content for token in added.values() if token.special],
        "ends": sorted(ends),
    }
