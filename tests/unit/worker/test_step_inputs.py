from __future__ import annotations

import random

import numpy as np
import torch

from tests.unit.worker.fakes import GREEDY, new_row, step_of
from tgi_cli.engine.step import BlockAppend, Step, TokenAppend
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.step_inputs import DecodeInputs, StepBatch, StepInputs
from tgi_cli.worker.upload import Uploader

CPU = torch.device("cpu")
BLOCK = 4
ROWS = 6


def make() -> tuple[InputBatch, DecodeInputs]:
    rows = InputBatch(ROWS, 60, BLOCK, Uploader(CPU))
    return rows, DecodeInputs(rows)


def take(rows: InputBatch, inputs: DecodeInputs, step: Step) -> StepInputs | None:
    rows.apply(step)
    return inputs.prepare(StepBatch(step, np.array(step.rows)))


def check(rows: InputBatch, ready: StepInputs, step: Step) -> None:
    """Against the rows themselves, one by one."""
    meta = ready.metadata
    assert ready.positions.tolist() == step.starts
    assert meta.query_start_loc.tolist() == list(range(len(step.rows) + 1))
    assert meta.kv_lens.tolist() == meta.kv_lens_host == [start + 1 for start in step.starts]
    assert meta.num_decodes == len(step.rows)
    assert meta.query_lens_host == step.counts
    assert ready.batch.rows.tolist() == step.rows
    assert ready.batch.positions.tolist() == meta.kv_lens_host
    for tensor in (ready.input_ids, ready.positions, meta.slot_mapping, ready.targets):
        assert tensor.dtype == torch.int64
    for tensor in (meta.query_start_loc, meta.kv_lens, meta.block_table):
        assert tensor.dtype == torch.int32
    for place, (row, start) in enumerate(zip(step.rows, step.starts, strict=True)):
        blocks = rows.host_blocks[row]
        held = start // BLOCK + 1
        assert ready.input_ids[place] == rows.tokens[row, start]
        assert ready.targets[place] == row * rows.width + start + 1
        assert meta.block_table[place, :held].tolist() == blocks[:held].tolist()
        assert meta.slot_mapping[place] == blocks[start // BLOCK] * BLOCK + start % BLOCK
        assert (
            ready.batch.records[place]["seed"]
            == rows.sampling.select(np.array([row]), np.array([start])).records["seed"]
        )


def test_steps_of_sequences_that_come_grow_and_go():
    dice = random.Random(3)
    rows, inputs = make()
    lengths: dict[int, int] = {}
    fresh = iter(range(1, 10_000))
    for _ in range(300):
        freed = [row for row in lengths if lengths[row] > 50 or dice.random() < 0.03]
        for row in freed:
            del lengths[row]
        new, entries, appended = [], [], []
        decoding = dice.sample(sorted(lengths), len(lengths))
        if dice.random() < 0.2:
            decoding = decoding[:-1]
        for row in decoding:
            start = lengths[row]
            if start % BLOCK == 0:
                appended.append(BlockAppend(row, start // BLOCK, [next(fresh)]))
            entries.append((row, start, 1, True))
            lengths[row] += 1
        free = [row for row in range(ROWS) if row not in lengths]
        count = 0
        if free and dice.random() < 0.4:
            row, count = free[0], dice.randrange(1, 12)
            tokens = [dice.randrange(1000) for _ in range(count)]
            blocks = [next(fresh) for _ in range(-(-count // BLOCK))]
            new.append(new_row(row, tokens, blocks, SamplingParams(seed=next(fresh))))
            entries.append((row, 0, count, True))
            lengths[row] = count
        if not entries:
            continue
        step = step_of(*entries, freed=freed, new=new, appended=appended)
        ready = take(rows, inputs, step)
        assert (ready is None) == (count > 1)
        if ready is not None:
            check(rows, ready, step)
        written = torch.tensor([dice.randrange(1000) for _ in entries])
        flat = [row * rows.width + start + length for row, start, length, _ in entries]
        rows.write(torch.tensor(flat), written)


def test_the_arrays_of_a_row_are_made_anew_for_its_next_sequence():
    rows, inputs = make()
    steps = [
        step_of((0, 0, 2, True), new=[new_row(0, [7, 8], [1, 2], GREEDY)]),
        step_of((0, 2, 1, True)),
        step_of((0, 0, 3, True), freed=[0], new=[new_row(0, [4, 5, 6], [9], GREEDY)]),
        step_of((0, 3, 1, True)),
    ]
    for step in steps:
        ready = take(rows, inputs, step)
    assert ready is not None
    check(rows, ready, steps[-1])
    assert ready.metadata.block_table.tolist() == [[9]]


def test_stop_ids_may_be_chosen_once_enough_tokens_are_there():
    rows, inputs = make()
    patient = SamplingParams(temperature=0.0, min_new_tokens=3)
    new = new_row(0, [7, 8], [1, 2], patient)
    step = step_of((0, 0, 2, True), new=[new])
    rows.apply(step)
    rows.sampling.set(0, patient, 2, (5,))
    flags = []
    for start in (2, 3, 4, 5, 6):
        later = step_of((0, start, 1, True))
        ready = take(rows, inputs, later)
        assert ready is not None
        flags.append(bool(ready.batch.flags))
    assert flags == [True, True, False, False, False]


def test_a_step_that_verifies_drafts_leaves_the_arrays_right() -> None:
    rows, inputs = make()
    new = [new_row(row, [7, 8, 9], [1 + row], SamplingParams(seed=row)) for row in (0, 1)]
    take(rows, inputs, step_of((0, 0, 3, True), (1, 0, 3, True), new=new))
    first = step_of((0, 3, 1, True), (1, 3, 1, True))
    ready = take(rows, inputs, first)
    assert ready is not None
    check(rows, ready, first)
    # Those with drafts come last, and reach into another block.
    verification = step_of((1, 4, 1, True), (0, 4, 3, True))
    verification.num_decodes, verification.samples = 2, [1, 3]
    verification.drafts.append(TokenAppend(0, 5, [21, 22]))
    verification.appended += [BlockAppend(0, 1, [5]), BlockAppend(1, 1, [6])]
    assert take(rows, inputs, verification) is None
    assert rows.tokens[0, 5:7].tolist() == [21, 22]
    behind = step_of((0, 6, 1, True), (1, 5, 1, True))
    ready = take(rows, inputs, behind)
    assert ready is not None
    check(rows, ready, behind)
