"""Collects the outputs of one sequence: its text from its tokens, and its prompt's scores."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from tgi_cli.engine.messages import FinishReason, PromptLogprobs
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.stop import StopBuffer, StopStrings
from tgi_cli.text.tokenizer import Tokenizer

_NO_STOPS = StopStrings()
_NO_IDS: frozenset[int] = frozenset()


class CutAt(Enum):
    """Where a stop string ends the text."""

    BEFORE_STOP = "before_stop"
    AFTER_STOP = "after_stop"
    AFTER_TOKEN = "after_token"
    """After the whole token that completes the stop string; no text is held back."""


class SequenceText:
    """Detokenizes one sequence, finds its stop strings and decides whether they end it.

    Args:
        tokenizer: Tokenizer of the model.
        prompt_ids: Tokens before the first generated one, as context of its text.
        stops: Stop strings.
        hidden_ids: Tokens that add nothing to the text (special and stop tokens).
        shown_ids: Hidden tokens that are part of the text all the same.
        cut_at: Where a stop string ends the text.
        min_tokens: Do not look for stop strings in this many first tokens.
        length_first: A stop string that is completed by token number ``length_first`` or later
            has the finish reason LENGTH, as in TGI. Default: STOP_SEQUENCE always.

    Attributes:
        num_tokens: Tokens so far.
        finish_reason: Why the sequence has ended, or None. Push no more tokens then.
    """

    __slots__ = (
        "_cut_at", "_detokenizer", "_hidden_ids", "_length_first", "_min_tokens", "_pieces",
        "_shown_ids", "_stops", "_surface", "_taken", "_truncates", "finish_reason", "num_tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: StopStrings = _NO_STOPS,
        *,
        hidden_ids: frozenset[int],
        shown_ids: frozenset[int] = _NO_IDS,
        cut_at: CutAt = CutAt.BEFORE_STOP,
        min_tokens: int = 0,
        length_first: int | None = None,
    ) -> None:
        self._surface = tokenizer.surface
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopBuffer(stops) if stops else None
        self._hidden_ids = hidden_ids
        self._shown_ids = shown_ids
        self._cut_at = cut_at
        self._truncates = cut_at is not CutAt.AFTER_TOKEN
        self._min_tokens = min_tokens
        self._length_first = length_first
        self._pieces: list[str] = []
        self._taken = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, token_id: int) -> str:
        """Add a token. Returns its own text, which may differ from what it adds to the output."""
        self.num_tokens += 1
        if token_id not in self._hidden_ids:
            own = text = self._detokenizer.push(token_id)
        else:
            own = self._surface(token_id)
            text = ""
            if token_id in self._shown_ids:
                # A forced marker may follow a part of a character, which ends in front of it.
                text = self._detokenizer.flush() + own
        if text:
            stops = self._stops
            if stops is not None and self.num_tokens > self._min_tokens:
                shown = stops.push(text)
                if self._truncates:
                    text = shown
                if stops.hit is not None:
                    text += self._end_at_stop(stops.hit)
            self._pieces.append(text)
        return own

    def take(self) -> str:
        """The text that became final since the last call."""
        pieces, first = self._pieces, self._taken
        self._taken = taken = len(pieces)
        if taken == first + 1:
            return pieces[first]
        return "".join(pieces[first:])

    def finish(self, reason: FinishReason) -> None:
        """End the sequence, unless a stop string has ended it: held-back text becomes final."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        rest = self._detokenizer.flush()
        if self._stops is not None and self._truncates:
            rest = self._stops.push(rest) + self._stops.flush()
        self._pieces.append(rest)

    @property
    def text(self) -> str:
        """The text so far, without what is held back."""
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        """The stop string that was found, or None."""
        return None if self._stops is None else self._stops.hit

    def _end_at_stop(self, stop: str) -> str:
        """Set the finish reason. Returns what the output includes of the stop string."""
        limit = self._length_first
        at_limit = limit is not None and self.num_tokens >= limit
        self.finish_reason = FinishReason.LENGTH if at_limit else FinishReason.STOP_SEQUENCE
        return stop if self._cut_at is CutAt.AFTER_STOP else ""


class PromptLogprobTable:
    """The log-probabilities of one prompt, as parallel lists from token 1 on.

    Attributes:
        logprobs: Log-probability of each token after the first, from 32-bit floats.
        tops: Ids and log-probabilities of the likeliest alternatives.
    """

    __slots__ = ("logprobs", "tops")

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.tops: list[tuple[Sequence[int], Sequence[float]]] = []

    def take(self, run: PromptLogprobs) -> None:
        """Append a run; one that starts earlier (of a recomputed prompt) replaces the rest."""
        index = run.start - 1
        self.logprobs[index:] = run.logprobs
        top_ids = run.top_ids or [[]] * len(run.logprobs)
        top_logprobs = run.top_logprobs or [[]] * len(run.logprobs)
        self.tops[index:] = zip(top_ids, top_logprobs, strict=True)
