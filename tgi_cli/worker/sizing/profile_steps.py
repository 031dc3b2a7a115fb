"""The worst steps that the limits allow, run once before the first request.

They trigger all initialisation at first use, and show how much memory a step takes. Their cache is
small: the block tables of all rows repeat the same blocks, which changes the values that attention
reads and not its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tgi_cli.attention import StateCache
from tgi_cli.config import EngineConfig
from tgi_cli.engine.step import NO_EXTRAS, NewRow, OptionalOutputs, Step
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.mixed_graphs import MixedGraphs
from tgi_cli.worker.runner import ModelRunner

WARMUP_BLOCKS = 64
"""Size of the small cache."""

WARMUP_SLOTS = 4
"""State slots in the small cache, which rows share as well."""

CPU_CONTEXT = 128
"""Limit of contexts on a CPU, of decodes and before a prefill chunk; there is one step with both. A
server should start within seconds even on a busy machine, where each of the hundreds of barriers in
a step may cost a time slice. The share of memory that is left over (see
:mod:`tgi_cli.worker.sizing.kv_cache`) covers the difference many times."""

CPU_PART = 4
"""A CPU runs 1 / ``CPU_PART`` of the rows and of the prefill, for the same reason. A step's memory
and time grow at most in proportion, so that the whole takes at most ``CPU_PART`` times as much."""

ONE_THREAD_BYTES = 512 << 20
"""Size of weights up to which one thread runs the steps on a CPU, in a second at most. Several are
little faster on a quiet machine (0.25 s against 0.3, 135 million parameters, two cores), and took
1 to 9 s on a busy one."""

_EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    relative_frequency_penalty=0.1,
    watermark=True,
    top_logprobs=5,
)
"""Enables every stage of the sampler that takes memory, so that its temporaries are counted."""

_PROMPT = OptionalOutputs(prompt_logprobs=5)


CHECKED_LENGTHS = (5, 18, 33)
"""Contexts on which graphs are compared with eager steps, with different numbers of blocks."""

MAX_DEVIATION = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Tolerance of that comparison, as a share of the logits' (or states') root mean square: sums may
be split in other ways. A value that a graph recorded at its capture causes larger deviations."""


def part_of_worst(config: EngineConfig) -> int:
    """The factor from the memory taken by :func:`worst_steps` to that of whole steps."""
    return CPU_PART if config.device == "cpu" else 1


@contextmanager
def threads_for(weight_bytes: int, device: torch.device) -> Iterator[None]:
    """Compute with one thread while a small model is warmed up on a CPU."""
    before = torch.get_num_threads()
    few = device.type == "cpu" and weight_bytes <= ONE_THREAD_BYTES
    torch.set_num_threads(1 if few else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def worst_steps(config: EngineConfig, cacheable_tokens: int, spans: bool = False) -> Iterator[Step]:
    """Prefill alone, prefill with decodes, and a single decode; on a CPU the second alone.

    Args:
        config: the limits.
        spans: whether prompts have parts that must be computed at once, which may take the whole
            budget even beside decodes.
        cacheable_tokens: tokens that the device's whole memory could cache: all rows together
            cannot have more context.
    """
    part = part_of_worst(config)
    size, rows = config.block_size, max(1, config.max_batch_size // part)
    budget = max(1, config.max_batch_prefill_tokens // part)
    longest = max(1, min(_longest_prompt(config), cacheable_tokens))
    context = max(1, min(longest, cacheable_tokens // rows))
    if config.device == "cpu":
        longest = min(longest, budget + CPU_CONTEXT)
        context = min(context, CPU_CONTEXT)
    decodes = rows - 1
    loras = config.max_loras
    if config.device != "cpu" or not decodes:
        yield _step(size, longest, loras, prefill=min(budget, rows * longest))
    if decodes:
        # As the scheduler shares a step: prefill keeps a quarter of the budget at least.
        prefill = min(budget if spans else max(budget - decodes, budget // 4, 1), longest)
        yield _step(size, longest, loras, decodes=decodes, context=context, prefill=prefill)
    if config.device != "cpu":
        yield _step(size, longest, loras, decodes=1, context=context)


def _longest_prompt(config: EngineConfig) -> int:
    """The most tokens before a chosen one, or those of an encoder and the decoder's first."""
    longest = config.max_total_tokens - 1
    return longest if config.decoder is None else min(longest, config.max_input_tokens + 1)


def prompt_step(config: EngineConfig, tokens: int) -> Step:
    """A prompt of ``tokens``, or as many as the limits allow in a step."""
    length = min(tokens, config.max_batch_prefill_tokens, _longest_prompt(config))
    return _step(config.block_size, length, 0, prefill=length)


def first_steps(config: EngineConfig) -> Iterator[Step]:
    """A short prompt and a decode: they trigger initialisation, and compute little."""
    length = min(config.block_size, _longest_prompt(config))
    yield _step(config.block_size, length, config.max_loras, prefill=length)
    yield _step(config.block_size, length, config.max_loras, decodes=1, context=length)


def replays_agree(
    runner: ModelRunner,
    graphs: DecodeGraphs,
    config: EngineConfig,
    num_blocks: int,
    states: StateCache | None = None,
) -> bool:
    """Whether graphs compute what the model does, on contexts other than those of the capture.

    A varying value that was recorded as a constant (a length, a slot, an address) produces wrong
    tokens and no error; a model's own code may contain one. ``states`` are the model's, which a
    replay has to leave as a step does.
    """
    num_slots = 0 if states is None else states.num_slots
    steps = [with_slots(step, num_slots) for step in _checked_steps(config, num_blocks)]

    def use(used: bool) -> None:
        runner.graphs = graphs if used else None

    return _agree(runner, use, steps, config, states)


def mixed_replays_agree(
    runner: ModelRunner, graphs: MixedGraphs, config: EngineConfig, num_blocks: int
) -> bool:
    """As :func:`replays_agree`, for steps with prompts: all rows but the last one decode."""
    prefill, decode = _checked_steps(config, num_blocks)
    first, mixed = Step(0), Step(1)
    last = len(prefill.rows) - 1
    for index, new in enumerate(prefill.new):
        (first if index < last else mixed).new.append(new)
        if index < last:
            add_row(first, new.row, 0, new.prompt_tokens)
            add_row(mixed, new.row, decode.starts[index], 1)
        else:
            add_row(mixed, new.row, 0, new.prompt_tokens)
    mixed.num_decodes = last

    def use(used: bool) -> None:
        runner.mixed_graphs = graphs if used else None

    return _agree(runner, use, [first, mixed] if last else [mixed], config)


@torch.inference_mode()
def _agree(
    runner: ModelRunner,
    use: Callable[[bool], None],
    steps: Sequence[Step],
    config: EngineConfig,
    states: StateCache | None = None,
) -> bool:
    """Whether the last of the steps computes the same with and without graphs."""
    found = []
    use(False)
    try:
        for used in (False, True):
            # Before either: a decode leaves other states than it found.
            for step in steps[:-1]:
                runner.sample(runner.launch(step)).wait()
            use(used)
            handle = runner.launch(steps[-1])
            logits = runner.logits(handle).clone()
            choose = handle.forward.choose
            if choose is not None and not choose()[:, 0].equal(logits.argmax(-1).int()):
                return False
            use(False)
            found.append([logits, *_states_of(steps[-1], states)])
    finally:
        use(False)
    limit = MAX_DEVIATION[getattr(torch, config.dtype)]
    for expected, got in zip(*found, strict=True):
        apart, size = (each.square().mean().sqrt() for each in (got - expected, expected))
        if not apart <= limit * size:
            return False
    return True


def _states_of(step: Step, states: StateCache | None) -> list[Tensor]:
    """What a step has written, float32, per layer and kind.

    On the host: the device's memory may be full.
    """
    if states is None:
        return []
    slots = torch.tensor(step.state_out, device=states.device)
    tensors = [tensor for layer in states.tensors for tensor in layer.values()]
    return [tensor.index_select(0, slots).float().cpu() for tensor in tensors]


def _checked_steps(config: EngineConfig, num_blocks: int) -> tuple[Step, Step]:
    """A few rows' prompts, and a decode of them, in blocks of their own if there are enough."""
    prefill, decode = Step(0), Step(1)
    taken = 0
    for row, wanted in enumerate(CHECKED_LENGTHS[: config.max_batch_size]):
        length = min(wanted, config.max_total_tokens - 1)
        end = taken + -(-(length + 1) // config.block_size)
        if end > num_blocks and row:
            break
        tokens = [(7 * token + row) % 11 for token in range(length)]
        blocks = list(range(taken, end))
        prefill.new.append(NewRow(row, row, tokens, length, blocks, SamplingParams(temperature=0)))
        for step, start, count in ((prefill, 0, length), (decode, length, 1)):
            add_row(step, row, start, count)
        taken = end
    decode.num_decodes = len(decode.rows)
    return prefill, decode


def _step(
    block_size: int,
    longest: int,
    loras: int,
    *,
    decodes: int = 0,
    context: int = 0,
    prefill: int = 0,
) -> Step:
    """``decodes`` rows with ``context`` tokens; ``prefill`` tokens at the end of ``longest``.

    All ``loras`` slots are in use, if there are as many rows.
    """
    step = Step(0, num_decodes=decodes)
    for row in range(decodes):
        _add(step, row, context - 1, 1, block_size, loras)
    row = decodes
    while prefill > 0:
        count = min(prefill, longest)
        _add(step, row, longest - count, count, block_size, loras)
        prefill -= count
        row += 1
    return step


def _add(step: Step, row: int, start: int, count: int, block_size: int, loras: int) -> None:
    end = start + count
    blocks = [block % WARMUP_BLOCKS for block in range(-(-end // block_size))]
    extras = _PROMPT if count > 1 else NO_EXTRAS
    # The last slot for a single row: the products are of the columns up to the last in use.
    slot = (loras - 1 - row) % loras if loras else -1
    step.new.append(NewRow(row, row, [0] * end, end, blocks, _EVERYTHING, extras, slot))
    add_row(step, row, start, count)


def with_slots(step: Step, num_slots: int) -> Step:
    """The step of a model with ``num_slots`` state slots: each row has its own, as far as they go.

    Of a model without states (0), the step as it is.
    """
    if num_slots:
        step.state_out = [row % num_slots for row in step.rows]
        step.state_in = [
            slot if start else -1 for slot, start in zip(step.state_out, step.starts, strict=True)
        ]
    return step


def add_row(step: Step, row: int, start: int, count: int, samples: bool = True) -> None:
    """Schedule ``count`` tokens of a row from position ``start`` on."""
    step.rows.append(row)
    step.starts.append(start)
    step.counts.append(count)
    step.samples.append(int(samples))
