"""What one request wants of the sampler. No torch: the router and the scheduler read it too."""

from __future__ import annotations

from dataclasses import dataclass, field

_UINT64 = (1 << 64) - 1
_INT32 = (1 << 31) - 1

MAX_TOKEN_IDS = 4096
"""Of a list of token ids that shapes sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from the logits, for every step of one request.

    The neutral value of each field switches its processor off. Processors run in TGI's order:
    logit_bias, watermark, repetition, frequency and presence penalties, then what may not be
    chosen (all but allowed_token_ids, bad_words, stop ids before min_new_tokens), temperature,
    top_k, top_p, min_p, typical_p.

    Attributes:
        temperature: divides the logits; 0 means greedy (argmax, nothing else of the filters).
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p (Holtzman et al. 2020).
        min_p: keep tokens with at least min_p times the top probability (Nguyen et al. 2024).
        typical_p: locally typical sampling (Meister et al. 2022).
        repetition_penalty: divides positive, multiplies negative logits of the tokens that the
            prompt or the output holds (Keskar et al. 2019).
        frequency_penalty: OpenAI's: subtracts penalty x count in the output.
        presence_penalty: OpenAI's: subtracts penalty from each token that the output holds.
        seed: 64-bit; a token's randomness depends on (seed, its position) alone, so that a seed
            gives the same text whatever else is in the batch.
        top_logprobs: how many of the likeliest tokens to report with each token (0: none).
        relative_frequency_penalty: TGI's frequency_penalty on its native routes: subtracts
            penalty x count / length, both over prompt and output.
        logit_bias: (token id, bias) pairs, added to the raw logits (OpenAI).
        bad_words: token sequences that must not appear in the output.
        min_new_tokens: the request's stop ids are not chosen before so many tokens.
        allowed_token_ids: only these are chosen, stop ids too only if they are among them (vLLM);
            empty: all. Log-probabilities remain those of the whole vocabulary.
        watermark: mark the text by Kirchenbauer et al. 2023: a share ``watermark_gamma`` of the
            vocabulary, seeded by the token before, gets ``watermark_delta`` added.

    Raises:
        ValueError: a value outside its range, in words fit for an API's error.
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
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    allowed_token_ids: tuple[int, ...] = ()
    greedy: bool = field(init=False)

    def __post_init__(self) -> None:
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
            (self.top_logprobs >= 0, "`top_logprobs` must be 0 or positive"),
            (
                -2.0 <= self.relative_frequency_penalty <= 2.0,
                "`frequency_penalty` must be in [-2, 2]",
            ),
            (
                all(i >= 0 and -100.0 <= bias <= 100.0 for i, bias in self.logit_bias),
                "`logit_bias` must map token ids to numbers in [-100, 100]",
            ),
            (all(self.bad_words), "`bad_words` must not be empty"),
            (self.min_new_tokens >= 0, "`min_new_tokens` must be 0 or positive"),
            (
                len(self.allowed_token_ids) <= MAX_TOKEN_IDS,
                f"`allowed_token_ids` takes up to {MAX_TOKEN_IDS} token ids. "
                f"Given: {len(self.allowed_token_ids)}",
            ),
            (
                all(0 <= i <= _INT32 for i in self.allowed_token_ids),
                "`allowed_token_ids` must be token ids",
            ),
            (0.0 < self.watermark_gamma < 1.0, "`watermark_gamma` must be between 0.0 and 1.0"),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)
        object.__setattr__(self, "greedy", self.temperature == 0.0)
