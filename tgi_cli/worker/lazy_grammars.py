"""Reads the vocabulary for grammars when the first grammar is compiled.

That takes tens of megabytes and up to seconds (see :mod:`tgi_cli.worker.grammar`), which servers
without such requests save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tgi_cli.engine.step import GrammarMatcher

if TYPE_CHECKING:
    from tgi_cli.worker.grammar import LLGuidance

log = logging.getLogger(__name__)

UNUSABLE = "the model's tokenizer cannot be used for grammars"


class LazyGrammars:
    """Implements :class:`tgi_cli.engine.step.GrammarCompiler`.

    Args:
        load: makes the compiler, on a thread; returns None, and logs why, if it cannot.
        eos_token_ids: the model's, used until the compiler is loaded.
    """

    def __init__(
        self, load: Callable[[], LLGuidance | None], eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._load = load
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._loading: Future[LLGuidance | None] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See the protocol."""
        made = self._made
        return self._eos_token_ids if made is None else made.eos_token_ids

    @property
    def _made(self) -> LLGuidance | None:
        loading = self._loading
        return loading.result() if loading is not None and loading.done() else None

    def compile(self, grammar: str) -> Future[GrammarMatcher]:
        """See the protocol. The error is a ValueError."""
        with self._lock:
            if self._loading is None:
                log.info("reading the vocabulary, for the first grammar")
                pool = ThreadPoolExecutor(1, thread_name_prefix="vocabulary")
                self._loading = pool.submit(self._load)
                pool.shutdown(wait=False)
        matcher: Future[GrammarMatcher] = Future()

        def compile_with(loaded: Future[LLGuidance | None]) -> None:
            made = loaded.result()
            if made is None:
                matcher.set_exception(ValueError(UNUSABLE))
            else:
                made.compile(grammar).add_done_callback(hand_over)

        def hand_over(compiled: Future[GrammarMatcher]) -> None:
            error = compiled.exception()
            if error is None:
                matcher.set_result(compiled.result())
            else:
                matcher.set_exception(error)

        self._loading.add_done_callback(compile_with)
        return matcher

    def fill(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> Any:
        """See the protocol."""
        made = self._made
        assert made is not None, "it has made the matchers"
        return made.fill(matchers, drafts)

    def close(self) -> None:
        """End the threads once they have finished their work."""
        made = self._made
        if made is not None:
            made.close()
