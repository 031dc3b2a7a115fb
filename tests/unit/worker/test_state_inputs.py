"""Slots of recurrent states on their way from steps to layers."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint
from tests.unit.engine.test_core import running
from tests.unit.engine.test_scheduler import limits, request
from tests.unit.worker.fakes import CPU, VOCAB, FakeModel, make_runner, new_row, next_token, step_of
from tgi_cli.attention import StateCache, StateSpec, StateTensor
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import Snapshot
from tgi_cli.errors import ConfigError
from tgi_cli.worker.factory import load_worker, use_chunks
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.sizing import kv_cache
from tgi_cli.worker.sizing.profile_steps import with_slots
from tgi_cli.worker.step_inputs import InputPreparer, StepBatch
from tgi_cli.worker.upload import Uploader
from tgi_cli.worker.worker import ModelWorker

SPEC = StateSpec((StateTensor("digest", (1,), torch.int64),))


class StatefulModel(FakeModel):
    """As its base, from states alone: the digest of the tokens so far, and how many they are."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, images: object = None
    ) -> Tensor:
        hidden = torch.zeros(len(input_ids), 1)

        def run(tokens: slice, state: Tensor) -> None:
            for index in range(tokens.start, tokens.stop):
                digest = 7 + int(state[0])  # a fresh state is 0
                token, position = int(input_ids[index]), int(positions[index])
                digest = (digest * 31 + (token + 1) * (position + 1)) % 1_000_003
                state[0] = digest - 7
                hidden[index] = digest % VOCAB

        attention.states.advance(0, "digest", run)
        return hidden


def make(num_slots: int, like_a_device: bool) -> ModelRunner:
    upload = Uploader(CPU, packed=like_a_device)
    rows = InputBatch(4, 96, 4, upload)
    _, _, attention = make_runner(num_blocks=200)
    attention.states = StateCache([SPEC], CPU)
    attention.states.allocate(num_slots)
    attention.states.tensors[0]["digest"].fill_(-(10**9))
    return ModelRunner(StatefulModel(), attention, rows, VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize("like_a_device", [True, False])
@pytest.mark.parametrize("spare", [0, 2, 12])
def test_an_engine_over_states_alone_gives_each_request_its_own_answer(
    spare: int, like_a_device: bool
) -> None:
    bounds = limits(
        max_batch_size=4,
        max_total_tokens=96,
        max_batch_prefill_tokens=24,
        num_blocks=32,
        num_state_slots=4 + spare,
    )
    dice = random.Random(spare)
    shared = dice.choices(range(VOCAB), k=60)
    prompts: dict[int, list[int]] = {}
    requests = []
    for i in range(24):
        prompts[i] = shared[: dice.randrange(60)] + dice.choices(range(VOCAB), k=5)
        requests.append(request(i, prompts[i], 20))
        if i % 3 == 0:
            prompts[100 + i] = prompts[i]
            requests.append(request(100 + i, prompts[i], 15, fork_of=i))
    worker: Any = make(4 + spare, like_a_device)
    with running(worker, bounds, requests=requests) as client:
        client.read_until_finished(*prompts)
        load = client.core.metrics.load
    assert bool(load.reused_tokens) == bool(spare)
    assert load.preemptions
    for i, prompt in prompts.items():
        text = list(prompt)
        for token in client.tokens[i]:
            assert token == next_token(text), i
            text.append(token)


@pytest.mark.parametrize("packed", [True, False])
def test_a_step_of_prefills_and_decodes_carries_its_slots(packed: bool) -> None:
    rows = InputBatch(4, 60, 4, Uploader(CPU, packed=packed))
    step = step_of(
        (0, 3, 1, True),
        (1, 0, 9, False),
        (2, 5, 7, True),
        new=[new_row(i, range(12), [i * 3, i * 3 + 1, i * 3 + 2]) for i in range(3)],
        state_in=[4, -1, 6],
        state_out=[4, 1, 2],
        snapshots=[Snapshot(1, 8, 3), Snapshot(2, 3, 5)],
    )
    rows.apply(step)
    metadata = InputPreparer(rows).prepare(StepBatch(step, np.array(step.rows))).metadata
    states = metadata.states
    assert states is not None
    assert states.query_start_loc.tolist() == metadata.query_start_loc.tolist() == [0, 1, 10, 17]
    assert states.slots_in.tolist() == states.slots_in_host == [4, -1, 6]
    assert states.slots_out.tolist() == states.slots_out_host == [4, 1, 2]
    assert states.snapshot_after.tolist() == states.snapshot_after_host == [0, 8, 3]
    assert states.snapshot_slots.tolist() == states.snapshot_slots_host == [-1, 3, 5]
    assert states.query_lens_host == [1, 9, 7]
    assert states.has_snapshots
    assert states.slots_in.dtype == states.snapshot_slots.dtype == torch.int64


def test_decodes_of_the_same_rows_may_change_their_slots() -> None:
    rows = InputBatch(4, 60, 4, Uploader(CPU))
    inputs = InputPreparer(rows)
    first = step_of((0, 0, 2, True), new=[new_row(0, [7, 8], [1, 2])])
    for step, slots in ((first, (-1, 3)), (step_of((0, 2, 1, True)), (3, 3))):
        for into, out in (slots, (slots[1], 1)):
            given = replace(step, state_in=[into], state_out=[out])
            rows.apply(given)
            states = inputs.prepare(StepBatch(given, np.array([0]))).metadata.states
            assert states is not None
            assert (states.slots_in.tolist(), states.slots_out.tolist()) == ([into], [out])
            assert not states.has_snapshots


def test_a_step_without_slots_has_no_states() -> None:
    rows = InputBatch(4, 60, 4, Uploader(CPU))
    inputs = InputPreparer(rows)
    for step in (
        step_of((0, 0, 2, True), new=[new_row(0, [7, 8], [1, 2])]),
        step_of((0, 2, 1, True)),
    ):
        rows.apply(step)
        assert inputs.prepare(StepBatch(step, np.array([0]))).metadata.states is None


def test_steps_of_warm_up_share_the_few_slots_that_there_are() -> None:
    step = step_of((0, 9, 1, True), (5, 0, 7, True))
    assert with_slots(step, 0).state_out == []
    assert with_slots(step, 4).state_out == [0, 1]
    assert step.state_in == [0, -1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with convolutions."""
    return make_checkpoint(CASES["LFM 2"], tmp_path_factory.mktemp("states"))


def load(path: Path) -> ModelWorker:
    serve = ServeConfig(model_id="m", dtype="float32", max_batch_size=2, max_total_tokens=64)
    worker, _ = load_worker(serve, path)
    assert isinstance(worker, ModelWorker)
    return worker


def test_warm_up_allocates_as_many_slots_as_the_scheduler_may_use(checkpoint: Path) -> None:
    worker = load(checkpoint)
    capacity = worker.warmup()
    states = worker.attention.states
    assert states is not None
    assert states.num_slots == capacity.num_state_slots == 2 + 4 * 2
    assert capacity.state_bytes == states.num_slots * states.slot_bytes
    worker.close()


def test_a_batch_whose_states_do_not_fit_is_lowered(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = load(checkpoint)
    assert worker.attention.states is not None
    slot_bytes = worker.attention.states.slot_bytes
    monkeypatch.setattr(kv_cache, "cache_budget", lambda *_: 1 << 20)
    monkeypatch.setattr(kv_cache, "STATE_SHARE", 1.5 * slot_bytes / (1 << 20))
    with caplog.at_level(logging.WARNING):
        capacity = worker.warmup()
    assert worker.info().max_batch_size == capacity.config.max_batch_size == 1
    assert "1 of 2 sequences: max_batch_size is 1" in caplog.text
    worker.close()


@pytest.mark.parametrize(
    ("tensor", "chunked"),
    [
        (StateTensor("recurrent", (2, 16, 8), torch.float32), True),
        (StateTensor("recurrent", (40, 16), torch.float32), False),  # Mamba's scan
        (StateTensor("conv", (3, 40), torch.float32), False),
        (None, False),
    ],
)
def test_prompts_in_chunks_are_for_models_with_matrices_as_states(
    tensor: StateTensor | None, chunked: bool
) -> None:
    states = None if tensor is None else StateCache([SPEC, StateSpec((tensor,))], CPU)
    if chunked:
        assert states is not None
        assert not states.chunked
        use_chunks(states)
        assert states.chunked
    else:
        with pytest.raises(ConfigError, match="linear attention or Mamba-2"):
            use_chunks(states)
