"""What one prompt asks for, whatever API it came through."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.grammar.grammar import Grammar
from tgi_cli.text.stop import StopStrings

NO_STOPS = StopStrings()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A prompt and everything that shapes its continuation.

    Attributes:
        prompt: text, or the token ids themselves.
        prompt_param: what requests of its API call it, for errors.
        add_special_tokens: encode the text with the model's own; a rendered chat has them.
        sampling: all but the seed and the bad words.
        bad_words: texts that are not generated, not yet as token ids.
        seed: None draws one when sampling.
        max_new_tokens: None fills the model's context.
        truncate: keep the last n tokens of the prompt.
        stops: end the text; ``keep_stop`` leaves the one that did in it (TGI), else it is cut.
        keep_stop: see ``stops``.
        length_first: a stop string in the last token that was allowed is told as the length (TGI).
        ignore_eos: end tokens do not end it.
        stop_token_ids: further ids that end it, themselves no part of the text.
        shown_ids: special tokens that are part of the text, for whoever reads more than text in it.
        samples: how many continuations; all but the first share its computed prompt. Sample i of
            a seed is the same whatever the number of samples.
        prompt_logprobs: report log-probabilities of the prompt's tokens, and so many of the
            likeliest in place of each; None: do not.
        prompt_only: nothing of the continuation is wanted.
        grammar: what the continuation must be; None: anything.
        priority: higher is served first.
        cache_salt: only requests of the same salt share cached prefixes, so that nobody can find
            out by timing what another tenant has sent.
        adapter: name of the LoRA adapter; empty: the base model.
    """

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    bad_words: tuple[str, ...] = ()
    prompt_param: str = "prompt"
    add_special_tokens: bool = True
    seed: int | None = None
    max_new_tokens: int | None = None
    truncate: int | None = None
    stops: StopStrings = NO_STOPS
    keep_stop: bool = False
    length_first: bool = False
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()
    samples: int = 1
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: bytes = b""
    adapter: str = ""
