"""Grammars by llguidance, over the model's own tokenizer.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of derivatives of regular
expressions, which walks a trie of the vocabulary. A mask takes microseconds, forced tokens follow
the tokenizer's own encoding, and errors name unsupported features.

Microseconds on one 2025 server core, with a vocabulary of 151643 and an object of eight fields
(strings, integers, arrays of enums; tokens drawn at random): a mask 7 (median; mean 49, the 99th
percentile 1,400, where the lexer meets a state for the first time), accepting a token 4, looking
up forced tokens 1.4. Reading the vocabulary takes 1.5 s, compiling such a schema 0.7 to 5 ms and
its first mask 0.1 to 1.3 ms; all of these release the interpreter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tgi_cli.device import default_threads
from tgi_cli.engine.step import GrammarMatcher
from tgi_cli.errors import no_panic
from tgi_cli.files import read_json, require_tokenizer
from tgi_cli.worker.grammar_errors import NOTHING_FITS, limit_passed

log = logging.getLogger(__name__)

MAX_COMPILED = 64
"""Compiled grammars in the cache."""

_COMPILERS = 2
"""Threads that compile grammars."""

_MAX_FILLERS = 8
_PARALLEL = 8
"""Number of masks from which on several threads are faster than one."""

_MOST_IDS = 1 << 24
"""Limit of token ids, above any vocabulary's: its tables take 80 MB and most of a second."""

_NO_TOKEN = "no token of the vocabulary may come next"

_SLOW_SECONDS = 0.2
"""Processor time above which a token of a grammar is slow."""
_MAX_SLOW = 2
"""Slow tokens after which a grammar fails."""
_TOO_SLOW = "it takes too long to follow: the same text can be read in too many ways"


class Matcher:
    """Implements :class:`tgi_cli.engine.step.GrammarMatcher`."""

    __slots__ = ("_canonical", "_slow", "error", "inner")

    def __init__(self, inner: llguidance.LLMatcher, canonical: bool) -> None:
        self.inner = inner
        self.error = ""
        self._canonical = canonical
        self._slow = 0

    @property
    def stopped(self) -> bool:
        return not self.error and self.inner.is_stopped()

    def accept(self, token_id: int) -> bool:
        start = time.thread_time()
        accepted = self.inner.consume_token(token_id)
        self.took(time.thread_time() - start)
        return not self.error and (accepted or not self.failed())

    def allows(self, token_ids: Sequence[int]) -> bool:
        return self.num_allowed(token_ids) == len(token_ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        count: int = self.inner.validate_tokens(list(token_ids))
        return count

    def forced(self) -> list[int]:
        return self.inner.compute_ff_tokens() if self._canonical else []

    def failed(self) -> bool:
        """Whether it has failed; the first error is stored."""
        if not self.error and self.inner.is_error():
            self.error = _reason(self.inner)
        return bool(self.error)

    def took(self, seconds: float) -> None:
        """Count the processor time of a call: a grammar must not hold up all other requests."""
        if seconds > _SLOW_SECONDS:
            self._slow += 1
            if self._slow > _MAX_SLOW:
                self.error = _TOO_SLOW


class LLGuidance:
    """Implements :class:`tgi_cli.engine.step.GrammarCompiler`.

    Args:
        tokenizer: content of a tokenizer.json.
        vocab_size: width of the logits, which may be more or less than the tokenizer has.
        eos_token_ids: tokens that may follow a complete text. Default, also if the tokenizer
            knows none of them: the tokenizer's own.

    Raises:
        ValueError: the tokenizer's tokens cannot be converted to bytes.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        known = Backend.from_str(tokenizer).get_vocab_size(with_added_tokens=True)
        eos = [i for i in dict.fromkeys(eos_token_ids) if i < known]
        try:
            with no_panic():
                self._tokenizer = llguidance.LLTokenizer(
                    tokenizer, n_vocab=max(vocab_size, known), eos_token=eos or None
                )
        except Exception as error:
            raise ValueError(_first_line(str(error))) from error
        self.eos_token_ids: tuple[int, ...] = tuple(eos or self._tokenizer.eos_tokens)
        self._words = -(-vocab_size // 32)
        self._bits: NDArray[np.int32] = np.zeros((1, -(-max(vocab_size, known) // 32)), np.int32)
        # Errors without the parser's state: they reach clients.
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._pool = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")
        self._fillers: llguidance.LLExecutor | None = None
        self._look_for_slow = False
        self._lock = threading.Lock()
        """Guards the field below."""
        self.compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()

    def compile(self, grammar: str) -> Future[GrammarMatcher]:
        """See the protocol. The error is a ValueError."""
        with self._lock:
            compiled = self.compiled.get(grammar)
            if compiled is None:
                compiled = self.compiled[grammar] = self._pool.submit(self._make, grammar)
                if len(self.compiled) > MAX_COMPILED:
                    self.compiled.popitem(last=False)
            self.compiled.move_to_end(grammar)
        matcher: Future[GrammarMatcher] = Future()

        def copy_matcher(done: Future[llguidance.LLMatcher]) -> None:
            error = done.exception()
            if error is not None:
                matcher.set_exception(error)
            else:
                copy = done.result().deep_copy()
                matcher.set_result(Matcher(copy, self._tokenizer.is_canonical))

        compiled.add_done_callback(copy_matcher)
        return matcher

    def _make(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        # The first mask takes longest, as the lexer is built lazily; copies share it.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(_reason(matcher))
        return matcher

    def fill(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] | None = None
    ) -> NDArray[np.int32]:
        """See the protocol."""
        count = len(matchers) + sum(map(len, drafts or ()))
        if len(self._bits) < count:
            self._bits = np.zeros((count, self._bits.shape[1]), np.int32)
        if drafts is not None:
            return self._fill_with_drafts(matchers, drafts)[:, : self._words]
        known = [matcher for matcher in matchers if isinstance(matcher, Matcher)]
        address, size = self._bits.ctypes.data, self._bits.strides[0]
        start = time.thread_time()
        if count < _PARALLEL or self._look_for_slow:
            self._look_for_slow = False
            for index, matcher in enumerate(known):
                matcher.inner.unsafe_compute_mask_ptr(address + index * size, size)
                end = time.thread_time()
                matcher.took(end - start)
                start = end
        else:
            pairs = [(matcher.inner, index) for index, matcher in enumerate(known)]
            begun = time.monotonic()
            self._executor.unsafe_compute_mask_ptr(pairs, address, size, count)
            # With several threads, it is unknown which of them failed.
            self._look_for_slow = time.monotonic() - begun > _SLOW_SECONDS
        for index, matcher in enumerate(known):
            # The library lets a grammar without a next token end the text; here it is an error.
            if matcher.failed():
                self._bits[index] = 0
        return self._bits[:count, : self._words]

    def _fill_with_drafts(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]]
    ) -> NDArray[np.int32]:
        """Masks before and after each draft; the matchers keep their positions."""
        count = sum(1 + len(tokens) for tokens in drafts)
        # Where a draft is forbidden, the library stops filling.
        self._bits[:count] = -1
        address, size, begin = self._bits.ctypes.data, self._bits.strides[0], 0
        behind: list[tuple[Matcher, int, list[int]]] = []
        for matcher, tokens in zip(matchers, drafts, strict=True):
            assert isinstance(matcher, Matcher)
            if tokens:
                behind.append((matcher, begin, list(tokens)))
            else:
                start = time.thread_time()
                matcher.inner.unsafe_compute_mask_ptr(address + begin * size, size)
                matcher.took(time.thread_time() - start)
                if matcher.failed():
                    self._bits[begin] = 0
            begin += 1 + len(tokens)
        alone, self._look_for_slow = self._look_for_slow, False
        for part in [[each] for each in behind] if alone else [behind]:
            begun = time.monotonic()
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                [(matcher.inner, first, tokens) for matcher, first, tokens in part],
                address,
                size,
                count,
            )
            seconds = time.monotonic() - begun
            if alone:
                part[0][0].took(seconds)
            elif seconds > _SLOW_SECONDS:
                self._look_for_slow = True
        for matcher, begin, tokens in behind:
            if matcher.failed():
                self._bits[begin : begin + 1 + len(tokens)] = 0
        return self._bits[:count]

    @property
    def _executor(self) -> llguidance.LLExecutor:
        if self._fillers is None:
            self._fillers = llguidance.LLExecutor(min(default_threads(), _MAX_FILLERS))
        return self._fillers

    def close(self) -> None:
        """End the threads once they have finished their work."""
        self._pool.shutdown(wait=False)


def load_grammars(
    model_path: Path, vocab_size: int, eos_token_ids: Sequence[int], trust_remote_code: bool = False
) -> LLGuidance | None:
    """Create the compiler of grammars for a model; None, with a warning, if that fails."""
    try:
        tokenizer = read_tokenizer(model_path, trust_remote_code)
        return LLGuidance(tokenizer, vocab_size, eos_token_ids)
    except Exception as error:  # foreign files and foreign code; the model runs without them
        log.warning("grammars are unavailable: the tokenizer cannot be used: %s", _cause(error))
        return None


def read_tokenizer(model_path: Path, trust_remote_code: bool = False) -> str:
    """The content of a folder's tokenizer.json, or of the one that transformers makes.

    Added tokens that only tokenizer_config.json lists are included, as in :mod:`tgi_cli.text`.
    """
    path = model_path / "tokenizer.json"
    if path.is_file():
        require_tokenizer(path)
        with no_panic():
            backend = Backend.from_file(str(path))
    else:
        from transformers import AutoTokenizer  # takes seconds, and is rarely needed

        tokenizer = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        backend = tokenizer.backend_tokenizer
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > _MOST_IDS:  # tables are as long
        raise ValueError(f"it has a token with the id {largest}")
    config = model_path / "tokenizer_config.json"
    listed: Any = {}
    if config.is_file():
        listed = read_json(config).get("added_tokens_decoder")
    missing = [
        entry
        for _, entry in sorted((listed or {}).items(), key=lambda item: int(item[0]))
        if backend.token_to_id(entry["content"]) is None
    ]
    backend.add_tokens([AddedToken(e["content"], special=e.get("special", False)) for e in missing])
    backend.no_padding()
    backend.no_truncation()
    content: str = backend.to_str()
    return content


def _reason(inner: llguidance.LLMatcher) -> str:
    """The reason for a matcher's error state."""
    line = _first_line(inner.get_error())
    return _NO_TOKEN if line == NOTHING_FITS else limit_passed(line) or line


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _cause(error: Exception) -> str:
    return _first_line(str(error)) or type(error).__name__
