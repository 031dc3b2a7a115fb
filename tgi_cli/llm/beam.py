"""Beam search, as a client of the engine.

At every step, each beam requests one token and its likeliest alternatives. The prefix of a beam is
in the prefix cache, so that a step computes its last block at most. Semantics are those of
transformers (``GenerationMixin._beam_search``): there are more candidates than beams, so that
enough remain when some end; the score of a hypothesis is its log-probability divided by its length
to the power of ``length_penalty``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from tgi_cli.engine.messages import EngineInfo, FinishReason, GenerationRequest, ImageInput
from tgi_cli.errors import TgiError
from tgi_cli.llm.collector import Throughput
from tgi_cli.llm.engine import InProcessEngine, RequestGroup
from tgi_cli.llm.options import Prompt, new_tokens_of
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.sequence_text import SequenceText
from tgi_cli.text.tokenizer import Tokenizer

MAX_WIDTH = 8

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamHypothesis:
    """A result of beam search, with T generated tokens.

    Attributes:
        token_ids: [T], including the stop id.
        text: Text without special tokens.
        cumulative_logprob: Sum of the tokens' log-probabilities.
        score: ``cumulative_logprob / T ** length_penalty``, by which hypotheses are ranked.
        finish_reason: ``eos_token`` or ``length``.
    """

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """Options of :meth:`tgi_cli.llm.llm.LLM.beam_search`. Raises ValueError."""

    width: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping
    stop_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.width <= MAX_WIDTH, f"beam_width must be between 1 and {MAX_WIDTH}"),
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (
                self.early_stopping in (True, False, "never"),
                'early_stopping must be True, False or "never"',
            ),
        )
        for holds, message in checks:
            if not holds:
                raise ValueError(message)

    @property
    def candidates(self) -> int:
        """Candidates per beam and step: enough remain even if all stop ids are among them."""
        return max(2, 1 + len(self.stop_token_ids)) * self.width


@dataclass(frozen=True, slots=True)
class Beam:
    """Generated tokens and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class _Found:
    beam: Beam
    score: float


class BeamSearch:
    """The state of the search for one prompt.

    Attributes:
        beams: Beams to continue, likeliest first; empty once the search is over.
        found: The best hypotheses, best first, at most ``width``.
    """

    def __init__(self, options: BeamOptions) -> None:
        self.options = options
        self.beams: list[Beam] = [Beam((), 0.0)]
        self.found: list[_Found] = []
        self._length = 0

    def advance(self, likeliest: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Advance by one token.

        Args:
            likeliest: For each of ``beams``, its ``candidates`` likeliest next tokens and their
                log-probabilities.
        """
        options = self.options
        self._length += 1
        candidates = sorted(
            (
                Beam((*beam.token_ids, token), beam.logprob + logprob)
                for beam, (tokens, logprobs) in zip(self.beams, likeliest, strict=True)
                for token, logprob in zip(tokens, logprobs, strict=True)
            ),
            key=lambda beam: -beam.logprob,
        )[: options.candidates]
        last = self._length == options.max_new_tokens
        ended = [last or beam.token_ids[-1] in options.stop_token_ids for beam in candidates]
        # Only an end among the likeliest candidates counts; the others replace ended beams.
        for beam, end in zip(candidates[: options.width], ended, strict=False):
            if end:
                self.found.append(_Found(beam, self._score(beam.logprob, self._length)))
        self.found.sort(key=lambda found: -found.score)
        del self.found[options.width :]
        going = [beam for beam, end in zip(candidates, ended, strict=True) if not end]
        self.beams = [] if not going or self._is_over(going[0]) else going[: options.width]

    def _is_over(self, best: Beam) -> bool:
        """Whether no beam is expected to improve on the hypotheses."""
        options = self.options
        if len(self.found) < options.width:
            return False
        if options.early_stopping is True or options.width == 1:
            return True  # width 1 is greedy search, which ends with its first hypothesis
        length = self._length
        if options.early_stopping == "never" and options.length_penalty > 0.0:
            length = options.max_new_tokens  # the longest hypothesis has the best possible score
        return self._score(best.logprob, length) <= self.found[-1].score

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self.options.length_penalty)


def search(
    engine: InProcessEngine,
    prompts: Sequence[Prompt],
    options: BeamOptions,
    info: EngineInfo,
    tokenizer: Tokenizer,
    progress: bool | None,
    adapter_id: int,
) -> list[list[BeamHypothesis]]:
    """The hypotheses of each prompt, best first.

    Raises:
        ValueError: A prompt is too long.
        TgiError: A beam failed.
        EngineDeadError: The engine's loop has ended.
    """
    if info.decoder_start_ids:
        raise ValueError("beams of encoder-decoder models are not supported")
    for prompt in prompts:
        new_tokens_of(prompt, options.max_new_tokens, info)
    hypotheses: list[list[BeamHypothesis]] = [[] for _ in prompts]
    ids = [prompt.ids for prompt in prompts]
    with (
        closing(RequestGroup(engine)) as group,
        Throughput(len(prompts), progress) as throughput,
    ):
        searches = run_searches(
            group,
            engine.request_ids,
            ids,
            options,
            info.vocab_size,
            adapter_id,
            [prompt.images for prompt in prompts],
        )
        for index, found in searches:
            hypotheses[index] = hypotheses_of(found, ids[index], tokenizer)
            throughput.add(len(ids[index]), len(hypotheses[index][0].token_ids), 1)
    return hypotheses


def run_searches(
    group: RequestGroup,
    ids: Iterator[int],
    prompts: Sequence[tuple[int, ...]],
    options: BeamOptions,
    vocab_size: int,
    adapter_id: int = 0,
    images: Sequence[tuple[ImageInput, ...]] | None = None,
) -> Iterator[tuple[int, BeamSearch]]:
    """Search over several prompts at once; each advances as soon as its own beams are answered.

    Yields:
        The index of a prompt and its search, when it is over.

    Raises:
        EngineDeadError: The engine's loop has ended.
        TgiError: A beam failed.
    """
    sampling = SamplingParams(temperature=0.0, top_logprobs=min(options.candidates, vocab_size))
    searches = [BeamSearch(options) for _ in prompts]
    submitted: dict[int, tuple[int, int]] = {}
    """Request id -> index of the prompt and of the beam."""
    answers: list[dict[int, tuple[list[int], list[float]]]] = [{} for _ in prompts]

    def submit(prompt: int) -> None:
        for index, beam in enumerate(searches[prompt].beams):
            request = GenerationRequest(
                request_id=next(ids),
                prompt_ids=prompts[prompt] + beam.token_ids,
                sampling=sampling,
                max_new_tokens=1,
                adapter_id=adapter_id,
                images=() if images is None else images[prompt],
            )
            submitted[request.request_id] = prompt, index
            group.submit(request)

    for prompt in range(len(prompts)):
        submit(prompt)
    while group.live:
        for request_id, _, batch in group.receive():
            if batch.finished is None:
                continue
            prompt, index = submitted.pop(request_id)
            if batch.finished.reason is not FinishReason.LENGTH:
                cause = batch.finished.error or "cancelled"
                raise TgiError(f"a beam of prompt {prompt} failed: {cause}")
            # Its one token and its end come together.
            search, answered = searches[prompt], answers[prompt]
            answered[index] = batch.top_ids[0], batch.top_logprobs[0]
            if len(answered) == len(search.beams):
                search.advance([answered[i] for i in range(len(search.beams))])
                answered.clear()
                submit(prompt)
                if not search.beams:
                    yield prompt, search


def hypotheses_of(
    search: BeamSearch, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> list[BeamHypothesis]:
    """The hypotheses of a search that is over, with their texts."""
    stops = search.options.stop_token_ids
    hypotheses = []
    for found in search.found:
        text = SequenceText(tokenizer, prompt_ids, hidden_ids=tokenizer.special_ids | stops)
        for token_id in found.beam.token_ids:
            text.push(token_id)
        stopped = found.beam.token_ids[-1] in stops
        reason = FinishReason.EOS_TOKEN if stopped else FinishReason.LENGTH
        text.finish(reason)
        hypotheses.append(
            BeamHypothesis(
                token_ids=list(found.beam.token_ids),
                text=text.text,
                cumulative_logprob=found.beam.logprob,
                score=found.score,
                finish_reason=reason.name.lower(),
            )
        )
    return hypotheses
