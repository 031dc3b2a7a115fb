"""Follows a compiled grammar for a few texts, as the engine will.

llguidance creates the states of its lexer and the rows of its parser lazily. So a grammar that
compiles may still exceed a limit at the first token, or at the tenth. A dry run generates a few
texts that the grammar allows, byte by byte, within the engine's limits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits

from tgi_cli.worker.grammar_errors import limit_passed

_LETTERS = 48
"""Length of each text, apart from forced bytes."""
_TEXTS = 3
_SECONDS = 0.5
"""Time for all texts; most grammars take 2 ms."""
_FORCED = 256
_REPEATED = 256
"""Length of a repetitive text: an ambiguous grammar takes ever longer to parse it."""
_PIECE = 32
_PERIODS = (1, 2, 3, 5)
_REPEATED_SECONDS = 0.25
"""CPU time for each repetitive text; most grammars take 1 ms."""
_SLOW = "it takes too long to follow: the same text can be parsed in too many ways"

Choice = Callable[[], int]


def matcher_limits() -> LLParserLimits:
    """The engine's limits, halved where they also depend on the size of the vocabulary."""
    engine = LLParserLimits()
    return LLParserLimits(
        step_lexer_fuel=engine.step_lexer_fuel // 2,
        step_max_items=engine.step_max_items // 2,
        verbose_errors=False,  # errors without the parser's state: they reach clients
    )


def find_error(matcher: LLMatcher, source: str, letter_ids: Sequence[int]) -> str:
    """An error in a compiled grammar; empty if none is found.

    Args:
        matcher: A matcher at its start.
        source: Source of the grammar; its letters are tried first.
        letter_ids: Token of each byte.
    """
    until = time.monotonic() + _SECONDS
    matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()
    found = random.Random(0)
    letters = source.encode(errors="surrogatepass")
    plain = [byte for byte in letters if chr(byte).isalnum()] or [ord("a")]
    same = max(set(plain), key=plain.count)
    choices: list[Choice] = [
        lambda: same,
        *[lambda: letters[found.randrange(len(letters))]] * (_TEXTS - 2),
        lambda: found.randrange(256),
    ]
    for choice in choices:
        walked = matcher.deep_copy()
        text = _walk(walked, choice, letter_ids, until)
        error = walked.get_error() or _repeated(matcher, text)
        # A dead end is not an error: the model may choose another text.
        if error == _SLOW or limit_passed(error):
            return error
    return ""


def _walk(matcher: LLMatcher, choice: Choice, letter_ids: Sequence[int], until: float) -> list[int]:
    text: list[int] = []
    for _ in range(_LETTERS):
        if matcher.is_stopped() or time.monotonic() > until:
            break
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        token = _allowed(mask, choice(), letter_ids)
        if token is None or not matcher.consume_token(token):
            break
        text.append(token)
        forced = matcher.compute_ff_tokens()[:_FORCED]
        if forced and not matcher.consume_tokens(forced):
            break
        text += forced
    return text


def _repeated(matcher: LLMatcher, text: list[int]) -> str:
    """An error when the beginning of the text repeats; empty if none."""
    for period in _PERIODS:
        for begin in {1, len(text) - period}:
            if begin < 1 or begin + period > len(text):
                continue
            copy = matcher.deep_copy()
            if copy.try_consume_tokens(text[:begin]) < begin:
                continue
            until = time.thread_time() + _REPEATED_SECONDS
            unit = text[begin : begin + period] * (_PIECE // period)
            for _ in range(_REPEATED // _PIECE):
                taken = copy.try_consume_tokens(unit)
                if copy.is_error():
                    return copy.get_error()
                if time.thread_time() > until:
                    return _SLOW
                if taken < len(unit):
                    break
    return ""


def _allowed(mask: bytes, first: int, letter_ids: Sequence[int]) -> int | None:
    """A letter that may come next: the one that is asked for, or the first after it."""
    for place in range(first, first + 256):
        token = letter_ids[place & 255]
        if mask[token >> 3] >> (token & 7) & 1:
            return token
    bits = int.from_bytes(mask, "little")  # special tokens alone
    return (bits & -bits).bit_length() - 1 if bits else None
