"""Steps that make Triton compile whatever serving can ask of it: compiling takes seconds.

A kernel is compiled for each combination of its constants: tile sizes, which depend on how
many tokens, rows and keys there are, and what a request may turn on. Those sizes change at powers
of two or between two of them, so steps of every power of two meet all of them. On a CPU, nothing is
compiled by a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from tgi_cli.config import EngineConfig
from tgi_cli.engine.step import NO_EXTRAS, NewRow, RowImage, Step
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.sizing.profile_steps import WARMUP_BLOCKS, add_row

CONTEXTS = (64, 512, 4096)
"""KV lengths besides the longest: attention splits long ones, into more parts the fewer rows."""

SHORT_CHUNKS = 64
"""Tokens of a sequence up to which attention may treat it as a decode: drafts, and what a cached
prefix leaves of a prompt."""

_GREEDY = SamplingParams(temperature=0.0)

SAMPLINGS = (
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=0.7, seed=1, top_k=50),
    SamplingParams(temperature=0.7, seed=1, top_p=0.9),
    SamplingParams(temperature=0.7, seed=1, min_p=0.01),
    SamplingParams(temperature=0.7, seed=1, top_k=50, top_p=0.9, min_p=0.01),
    # Of scores that are not the logits.
    SamplingParams(temperature=0.0, repetition_penalty=1.1),
    SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.1),
    SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.1, top_p=0.9),
    SamplingParams(temperature=0.0, top_logprobs=5),
)
"""Beside greedy ones."""


def variant_steps(
    config: EngineConfig, num_blocks: int, spans: bool = False, adapters: bool = False
) -> Iterator[Step]:
    """Steps that together launch every variant of every kernel, within the limits.

    To be run without graphs: steps that no graph supports launch the same kernels.

    Args:
        config: with the limits that hold.
        num_blocks: KV blocks: contexts of decodes together are no longer than these.
        spans: whether the model's attention has bidirectional spans.
        adapters: whether there are slots for adapters.
    """
    rows, budget = config.max_batch_size, config.max_batch_prefill_tokens
    longest, cached = config.max_total_tokens - 1, num_blocks * config.block_size
    builder = _Builder(config, num_blocks)
    for tokens in powers_of_two(budget):
        yield builder.step(prompts=_cut(tokens, longest, rows))
    for count in powers_of_two(rows):
        for context in _contexts(min(longest, max(1, cached // count))):
            yield builder.step(decodes=count, context=context)
    for chunk in powers_of_two(min(SHORT_CHUNKS, longest, budget)):
        for context in _contexts(longest):
            if context < chunk:
                continue
            yield builder.step(chunks=[chunk], context=context)
            if rows > 2:
                yield builder.step(decodes=1, chunks=[chunk], context=context)
            if rows > 2 and budget > chunk:
                prompts = [min(longest, 2 * SHORT_CHUNKS, budget - chunk)]
                yield builder.step(decodes=1, chunks=[chunk], context=context, prompts=prompts)
    if spans:  # of few tokens, and of many
        for tokens in sorted({min(each, longest, budget) for each in (2, 2 * SHORT_CHUNKS)}):
            yield builder.step(prompts=[tokens], spans=True)
    if adapters:  # their kernels are the same for any number of tokens
        yield builder.step(decodes=1, context=1, adapter_slot=0)
    for sampling in SAMPLINGS:
        for count in {1, rows}:
            yield builder.step(decodes=count, context=1, sampling=sampling)


def _contexts(longest: int) -> list[int]:
    return sorted({min(each, longest) for each in (*CONTEXTS, longest)})


def powers_of_two(limit: int) -> Iterator[int]:
    """1, 2, 4 and so on below ``limit``, then ``limit`` itself."""
    power = 1
    while power < limit:
        yield power
        power *= 2
    yield limit


def _cut(tokens: int, longest: int, rows: int) -> list[int]:
    """``tokens`` as prompts of at most ``longest``, or as many as ``rows`` prompts can have."""
    prompts: list[int] = []
    while tokens > 0 and len(prompts) < rows:
        prompts.append(min(tokens, longest))
        tokens -= prompts[-1]
    return prompts


class _Builder:
    """Makes steps whose rows share a few blocks."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self._block_size = config.block_size
        self._num_blocks = min(num_blocks, WARMUP_BLOCKS)

    def step(
        self,
        *,
        decodes: int = 0,
        chunks: list[int] | None = None,
        prompts: list[int] | None = None,
        context: int = 0,
        sampling: SamplingParams = _GREEDY,
        spans: bool = False,
        adapter_slot: int = -1,
    ) -> Step:
        """Decodes and chunks end ``context`` tokens; prompts begin at 0, and may be one span."""
        step = Step(0, num_decodes=decodes)
        for count in [*[1] * decodes, *(chunks or [])]:
            self._add(step, context - count, count, sampling, adapter_slot=adapter_slot)
        for count in prompts or []:
            images = (RowImage(((0, count),), bidirectional=True),) if spans else ()
            self._add(step, 0, count, sampling, images)
        return step

    def _add(
        self,
        step: Step,
        start: int,
        count: int,
        sampling: SamplingParams,
        images: tuple[RowImage, ...] = (),
        adapter_slot: int = -1,
    ) -> None:
        row, end = len(step.rows), start + count
        blocks = [block % self._num_blocks for block in range(-(-end // self._block_size))]
        tokens = [0] * end
        new = NewRow(row, row, tokens, end, blocks, sampling, NO_EXTRAS, adapter_slot, images)
        step.new.append(new)
        add_row(step, row, start, count)
