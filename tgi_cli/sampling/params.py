"""Sampling parameters of one request. No torch: the router and the scheduler use them too.

Integers are bounded by the wire, lists by what a step can handle at negligible cost. Floats may be
any finite number that has a meaning: the sampler clamps what float32 cannot hold (see
:class:`tgi_cli.sampling.table.SamplingTable`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tgi_cli.config.settings import default

_UINT64 = (1 << 64) - 1
_INT32 = (1 << 31) - 1
_SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio (Knuth, TAOCP 6.4): the seeds of samples stay distinct, and far
from small numbers."""

MAX_TOKEN_IDS = 4096
"""Upper bound of the lengths of ``logit_bias`` and of lists of token ids."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_IDS = 8192
"""Token ids of all bad words of a request: each step compares them with the end of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the logits, for every step of one request.

    The neutral value of each field disables its processor. Processors run in TGI's order:
    logit_bias, watermark, repetition, frequency and presence penalties, then masks
    (allowed_token_ids, bad_words, stop ids before min_new_tokens), temperature, top_k, top_p,
    min_p, typical_p.

    Attributes:
        temperature: divides the logits; 0 is greedy (argmax, without filters).
        top_k: keep the k likeliest tokens; 0 keeps all, as does any k above the vocabulary size
            (so it is clamped to an int32).
        top_p: keep the smallest set of tokens whose probability reaches p (Holtzman et al. 2020).
        min_p: keep tokens with at least min_p times the top probability (Nguyen et al. 2024).
        typical_p: locally typical sampling (Meister et al. 2022).
        repetition_penalty: divides positive, multiplies negative logits of the tokens that the
            prompt or the output holds (Keskar et al. 2019).
        frequency_penalty: OpenAI's: subtracts penalty x count in the output.
        presence_penalty: OpenAI's: subtracts penalty from each token that the output holds.
        seed: 64-bit; a token's randomness depends on (seed, its position) alone, so that a seed
            gives the same text whatever else is in the batch.
        top_logprobs: number of the likeliest tokens to report with each token.
        relative_frequency_penalty: TGI's frequency_penalty on its native routes: subtracts
            penalty x count / length, both over prompt and output.
        logit_bias: (token id, bias) pairs, added to the raw logits (OpenAI); at most
            ``MAX_TOKEN_IDS``.
        bad_words: token sequences that must not appear in the output; at most
            ``MAX_BAD_WORDS``, with ``MAX_BAD_WORD_IDS`` tokens in total.
        min_new_tokens: stop ids are not chosen before this number of tokens.
        allowed_token_ids: only these are chosen, and stop ids only if listed (vLLM); all if
            empty. At most ``MAX_TOKEN_IDS``. Log-probabilities remain those of the whole
            vocabulary.
        watermark: mark the text by Kirchenbauer et al. 2023: a share ``watermark_gamma`` of the
            vocabulary, seeded by the token before, gets ``watermark_delta`` added.

    Raises:
        ValueError: a value is out of range; the message is fit for an API error.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    top_logprobs: int = 0
    relative_frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    watermark: bool = False
    watermark_gamma: float = default("watermark_gamma")
    watermark_delta: float = default("watermark_delta")
    allowed_token_ids: tuple[int, ...] = ()
    greedy: bool = field(init=False)

    def __post_init__(self) -> None:
        bias_ids = [i for i, _ in self.logit_bias]
        word_ids = sum(map(len, self.bad_words))
        checks = (
            (0.0 <= self.temperature < float("inf"), "`temperature` must be 0 or positive"),
            (self.top_k >= 0, "`top_k` must be 0 or positive"),
            (0.0 < self.top_p <= 1.0, "`top_p` must be > 0.0 and <= 1.0"),
            (0.0 <= self.min_p <= 1.0, "`min_p` must be between 0.0 and 1.0"),
            (0.0 < self.typical_p <= 1.0, "`typical_p` must be > 0.0 and <= 1.0"),
            (0.0 < self.repetition_penalty < float("inf"), "`repetition_penalty` must be positive"),
            (-2.0 <= self.frequency_penalty <= 2.0, "`frequency_penalty` must be in [-2, 2]"),
            (-2.0 <= self.presence_penalty <= 2.0, "`presence_penalty` must be in [-2, 2]"),
            (0 <= self.seed <= _UINT64, "`seed` must be an unsigned 64-bit number"),
            (0 <= self.top_logprobs <= _INT32, "`top_logprobs` must be 0 or positive"),
            (
                -2.0 <= self.relative_frequency_penalty <= 2.0,
                "`frequency_penalty` must be in [-2, 2]",
            ),
            (
                len(bias_ids) <= MAX_TOKEN_IDS,
                f"`logit_bias` takes up to {MAX_TOKEN_IDS} tokens. Given: {len(bias_ids)}",
            ),
            (
                _are_ids(bias_ids) and all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias),
                "`logit_bias` must map token ids to numbers in [-100, 100]",
            ),
            (all(self.bad_words), "`bad_words` must not be empty"),
            (
                len(self.bad_words) <= MAX_BAD_WORDS,
                f"`bad_words` takes up to {MAX_BAD_WORDS} token sequences. "
                f"Given: {len(self.bad_words)}",
            ),
            (
                word_ids <= MAX_BAD_WORD_IDS,
                f"`bad_words` may have up to {MAX_BAD_WORD_IDS} tokens together. Given: {word_ids}",
            ),
            (all(map(_are_ids, self.bad_words)), "`bad_words` must be sequences of token ids"),
            (
                0 <= self.min_new_tokens <= _INT32,
                f"`min_new_tokens` must be between 0 and {_INT32}",
            ),
            (
                len(self.allowed_token_ids) <= MAX_TOKEN_IDS,
                f"`allowed_token_ids` takes up to {MAX_TOKEN_IDS} token ids. "
                f"Given: {len(self.allowed_token_ids)}",
            ),
            (_are_ids(self.allowed_token_ids), "`allowed_token_ids` must be token ids"),
            (0.0 < self.watermark_gamma < 1.0, "`watermark_gamma` must be between 0.0 and 1.0"),
            (math.isfinite(self.watermark_delta), "`watermark_delta` must be a number"),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)
        object.__setattr__(self, "top_k", min(self.top_k, _INT32))
        object.__setattr__(self, "greedy", self.temperature == 0.0)


def _are_ids(ids: Sequence[int]) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) <= _INT32)


def sample_seed(seed: int, sample: int) -> int:
    """The seed of a prompt's sample 0, 1, ...; sample 0 has the prompt's own.

    A request with this seed alone generates the same text.
    """
    return (seed + sample * _SEED_STEP) & _UINT64
