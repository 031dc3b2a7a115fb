"""Times steps at warm-up to measure the cost of draft tokens: rows of a sequence, and sequences.

The block tables of all rows repeat a few blocks, whose content is not indexed; the cost of
attention does not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tgi_cli.config import EngineConfig
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.step import NewRow, Step, StepTime, TokenAppend
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.sizing.profile_steps import WARMUP_BLOCKS, add_row

CONTEXTS = (128, 2048)
"""Contexts of the sequences, as far as the limits allow."""

MAX_SECONDS = 1.0
"""Approximate limit of the total time of the steps, doubled with a drafter that has weights. Steps
beyond it are interpolated."""

_REPEATS = 2
"""Timed runs of each step, after a first one. The fastest counts: others only delay steps."""

LAG = 256
"""Tokens of a prompt that a drafter which catches up is timed with, as far as the limits allow."""

_GREEDY = SamplingParams(temperature=0.0)


class _Shape(NamedTuple):
    """A step of ``sequences`` with ``drafts`` after each, and the ``proposals`` that follow it.

    If it is ``late``, the drafter has to compute the context first.
    """

    sequences: int
    drafts: int
    context: int
    proposals: int = 0
    late: bool = False

    @property
    def rows(self) -> int:
        return self.sequences * (1 + self.drafts)

    @property
    def is_needed(self) -> bool:
        """Whether it is timed regardless of the limit, as unknown proposals would count as free."""
        return self.sequences == 1 and self.proposals > 0


def time_steps(
    run: Callable[[Step], object],
    config: EngineConfig,
    shard: Shard,
    num_blocks: int,
    most_proposed: int = 0,
    assume_computed: Callable[[], None] = lambda: None,
    forget_computed: Callable[[], None] | None = None,
) -> tuple[StepTime, ...]:
    """The durations of steps with and without drafts; all shards get the same.

    Args:
        run: runs a step to its end.
        config: with the limits that hold.
        shard: this process's share of the model.
        num_blocks: KV blocks.
        most_proposed: drafts that a drafter with weights proposes for a sequence; 0 without one.
        assume_computed: makes the drafter take the blocks of a step that proposes for computed.
        forget_computed: makes it take none for computed; None if it does not catch up.
    """
    times: list[StepTime] = []
    left, latest = MAX_SECONDS * (2 if most_proposed else 1), 0.0
    for shape in _shapes(config, most_proposed, forget_computed is not None):
        if times and not shape.is_needed and left < latest * (_REPEATS + 1):
            break
        first, *steps = _steps(shape, config.block_size, min(num_blocks, WARMUP_BLOCKS))
        if shape.proposals:
            assume_computed()
        run(first)
        durations = []
        for step in steps:
            if shape.late and forget_computed is not None:
                forget_computed()
            began = time.perf_counter()
            run(step)
            durations.append(time.perf_counter() - began)
        # In microseconds, for all shards to agree.
        latest = -shard.smallest(-int(min(durations) * 1e6)) / 1e6
        left -= latest * (_REPEATS + 1)
        sequences, proposals = shape.sequences, shape.proposals
        lag = shape.context if shape.late else 0
        times.append(StepTime(sequences, shape.rows, shape.context, latest, proposals, lag))
    return tuple(times)


def _shapes(config: EngineConfig, most_proposed: int, catches_up: bool) -> Iterator[_Shape]:
    """The steps that the limits allow, the most important first."""
    most = config.max_total_tokens - 2
    context, longer = (min(each, most // 2) for each in CONTEXTS)
    available = most - context
    if context < 1:
        return
    yield _Shape(1, 0, context)
    proposals = sorted({min(1, most_proposed), most_proposed} - {0})
    for count in proposals:
        yield _Shape(1, 0, context, count)
    if proposals and catches_up:
        yield _Shape(1, 0, min(LAG, most // 2), 1, late=True)
    for drafts in (1, 3, 7):
        if drafts <= available:
            yield _Shape(1, drafts, context)
    for count in proposals:
        for sequences in (4, 16):
            if sequences <= config.max_batch_size:
                yield _Shape(sequences, 0, context, count)
    # Kernels take up to 12 rows at once (AVX-512): 13 cost more than the line from 12 to 16 shows.
    for drafts in (2, 5, 15, 31, 11, 12):
        if drafts <= available:
            yield _Shape(1, drafts, context)
    for sequences in (2, 4, 8, 16, 32):
        if sequences <= config.max_batch_size:
            yield _Shape(sequences, 0, context)
    if longer >= 4 * context:
        for drafts in (0, 7):
            yield _Shape(1, min(drafts, most - longer), longer)


def _steps(shape: _Shape, block_size: int, num_blocks: int) -> Iterator[Step]:
    """A step that creates the rows, and others that repeat it, as if no draft were right."""
    end = shape.context + 1 + shape.drafts
    blocks = [block % num_blocks for block in range(-(-end // block_size))]
    known = [token % 7 for token in range(shape.context + 1)]
    for number in range(_REPEATS + 1):
        step = Step(number, num_decodes=shape.sequences)
        step.proposals = [shape.proposals] * shape.sequences if shape.proposals else []
        for row in range(shape.sequences):
            if not number:
                step.new.append(NewRow(row, row, known, len(known), blocks, _GREEDY))
            add_row(step, row, shape.context, 1 + shape.drafts)
            step.samples[-1] = 1 + shape.drafts
            if shape.drafts:
                drafts = [token % 7 for token in range(shape.drafts)]
                step.drafts.append(TokenAppend(row, shape.context + 1, drafts))
        yield step
