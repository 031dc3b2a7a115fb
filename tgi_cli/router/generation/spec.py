"""One prompt and its parameters, independent of the API."""

from __future__ import annotations

from dataclasses import dataclass, field

from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.fill_in_middle import PromptParts
from tgi_cli.text.grammar.grammar import Grammar
from tgi_cli.text.images import ImagePart
from tgi_cli.text.languages import Translation
from tgi_cli.text.reasoning import AnswerMarkers
from tgi_cli.text.stop import StopStrings

NO_STOPS = StopStrings()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A prompt and everything that shapes its continuation.

    Attributes:
        prompt: Text, token ids, or both in sequence.
        sampling: Sampling parameters, except the seed and the bad words.
        bad_words: Texts that must not be generated; not yet tokenized.
        prompt_param: Name of the prompt in its API, for errors.
        add_special_tokens: Encode the text with special tokens; rendered chats have them already.
        seed: Seed of the sampling. Default: random.
        max_new_tokens: Most tokens to generate. Default: as many as the context allows.
        truncate: Use the last n tokens of the prompt.
        stops: Stop strings.
        keep_stop: End the text after the stop string, as in TGI, not before it.
        length_first: A stop string in the last allowed token has the finish reason ``length``, as
            in TGI.
        ignore_eos: Continue after end tokens.
        stop_token_ids: Further ids that end the sequence; not part of the text.
        shown_ids: Special tokens that are part of the text, because they mark its regions.
        samples: Number of continuations; all but the first share its computed prompt. Sample i of
            a seed does not depend on the number of samples.
        prompt_logprobs: Return the log-probabilities of the prompt's tokens, and this number of the
            likeliest alternatives. Default: none.
        prompt_only: Return nothing of the continuation.
        line_seconds: End the text, once it has a line break, so long after its first token, in
            seconds. Default: no such limit.
        grammar: Grammar of the continuation, or None.
        reasoning: How the continuation marks reasoning, whose tokens are counted. Default: not at
            all.
        is_reasoning: The continuation begins within reasoning.
        thinking: The most reasoning, or None for any.
        prediction: Text that the continuation is expected to resemble, for drafts; it is no part of
            the prompt, and does not change the continuation.
        priority: Higher values are served first.
        cache_salt: Requests share cached prefixes only if they have the same salt, so that timing
            reveals nothing about other tenants' prompts.
        tenant: Whose API key the request has, as opaque bytes; empty without keys. Drafts are never
            taken from answers to other tenants.
        adapter: Name of the LoRA adapter; empty for the base model.
        session: Name of the conversation, for choosing a replica; empty if unknown.
        translation: Languages of the prompt and of the answer, of models that are told them, or
            None.
        images: Images of the prompt, a text with a placeholder for each. Whoever reads them empties
            the list: they are megabytes, and a generation may take minutes.
    """

    prompt: str | tuple[int, ...] | PromptParts
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
    line_seconds: float | None = None
    grammar: Grammar | None = None
    reasoning: AnswerMarkers | None = None
    is_reasoning: bool = False
    thinking: ThinkingBudget | None = None
    prediction: str = ""
    priority: int = 0
    cache_salt: bytes = b""
    tenant: bytes = b""
    adapter: str = ""
    session: str = ""
    translation: Translation | None = None
    images: list[ImagePart] = field(default_factory=list)
