"""Batches straight on a shard, by TGI's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.bench.load.fake_shard import FakeShard
from tgi_cli.bench.events import (
    BatchDone,
    BenchRequest,
    BenchStep,
    BenchTarget,
    Event,
    StepEnded,
    StepFailed,
    StepProgress,
)
from tgi_cli.bench.settings import BenchSampling, RequestSettings
from tgi_cli.bench.step_driver import LoadDriver


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's may have 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="tgi-") as path:
        yield Path(path)


def batch(size: int, **more: int) -> BenchStep:
    return BenchStep(kind="batch", value=size, label=str(size), **more)


def prompts(max_tokens: int = 4) -> Iterator[BenchRequest]:
    number = 0
    while True:
        yield BenchRequest(prompt=f"prompt {number}", prompt_tokens=3, max_tokens=max_tokens)
        number += 1


async def driven(
    path: Path, step: BenchStep, settings: RequestSettings, max_tokens: int = 4
) -> list[Event]:
    driver = LoadDriver(BenchTarget(kind="shard-v3", address=str(path), model="m"), settings)
    events = []
    async with (
        asyncio.timeout(60),
        contextlib.aclosing(driver.drive(step, prompts(max_tokens))) as told,
    ):
        async for event in told:
            events.append(event)
    return events


async def test_a_run_is_a_prefill_and_its_decodes(folder: Path) -> None:
    settings = RequestSettings(sampling=BenchSampling(top_k=7, temperature=0.5, top_n_tokens=2))
    with FakeShard(prefill=0.05, decode=0.02).serving(folder / "shard-0") as shard:
        events = await driven(folder / "shard-0", batch(3, requests=3, warmup=1), settings)
    ended = events[-1]
    assert isinstance(ended, StepEnded)
    batches = ended.record.batches
    assert [event.record for event in events if isinstance(event, BatchDone)] == batches
    assert [record.warmup for record in batches] == [True, False, False]
    for record in batches:
        assert (record.batch_size, record.sequence_length, record.decode_length) == (3, 3, 4)
        assert record.prefill >= 0.05
        assert len(record.decodes) == 3
        assert all(seconds >= 0.02 for seconds in record.decodes)
    assert ended.record.duration == pytest.approx(
        sum(b.prefill + sum(b.decodes) for b in batches[1:])
    )
    assert [name for name, _ in shard.calls] == [
        "ClearCache",
        *["Prefill", "Decode", "Decode", "Decode"] * 3,
        "ClearCache",
    ]
    first, second, _ = shard.named("Prefill")
    assert (first.batch.size, first.batch.max_tokens) == (3, 21)
    assert [r.inputs for r in first.batch.requests] == ["prompt 0", "prompt 1", "prompt 2"]
    assert [r.inputs for r in second.batch.requests] == ["prompt 3", "prompt 4", "prompt 5"]
    for request in first.batch.requests:
        assert request.input_chunks.chunks[0].text == request.inputs
        assert (request.truncate, request.add_special_tokens) == (3, True)
        assert not request.blocks
        assert not request.slots
        assert request.stopping_parameters.ignore_eos_token
        assert request.stopping_parameters.max_new_tokens == 4
        assert (request.parameters.top_k, request.parameters.temperature) == (7, 0.5)
        assert request.top_n_tokens == 2
    assert any(isinstance(event, StepProgress) and event.expected == 3 for event in events)


async def test_one_token_takes_no_decode(folder: Path) -> None:
    with FakeShard().serving(folder / "s") as shard:
        events = await driven(folder / "s", batch(1, requests=1), RequestSettings(), max_tokens=1)
    assert isinstance(events[-1], StepEnded)
    assert events[-1].record.batches[0].decodes == []
    assert not shard.named("Decode")


async def test_every_shard_gets_every_call(folder: Path) -> None:
    with (
        FakeShard().serving(folder / "s-0") as first,
        FakeShard(prefill=0.1).serving(folder / "s-1") as second,
    ):
        first.urls = [f"unix://{folder}/s-0", f"unix://{folder}/s-1"]
        events = await driven(folder / "s-0", batch(2, requests=1), RequestSettings())
    assert isinstance(events[-1], StepEnded)
    assert events[-1].record.batches[0].prefill >= 0.1  # as slow as the slowest
    assert [name for name, _ in first.calls] == [name for name, _ in second.calls]


async def test_a_failed_run_is_reported_and_the_next_one_runs(folder: Path) -> None:
    with FakeShard(fail={"Decode": 1}).serving(folder / "s"):
        events = await driven(folder / "s", batch(2, requests=3), RequestSettings())
    failed = [event for event in events if isinstance(event, StepFailed)]
    assert len(failed) == 1
    assert not failed[0].fatal
    assert "no blocks left" in failed[0].cause
    assert isinstance(events[-1], StepEnded)
    assert len(events[-1].record.batches) == 2


async def test_a_batch_that_does_not_fit_ends_its_step_alone(folder: Path) -> None:
    with FakeShard(fail={"Prefill": 9}).serving(folder / "s"):
        events = await driven(folder / "s", batch(64, requests=9), RequestSettings())
    failed = [event for event in events if isinstance(event, StepFailed)]
    assert [event.fatal for event in failed] == [False, False]
    assert isinstance(events[-1], StepEnded)
    assert "no blocks left" in events[-1].record.stopped


async def test_a_shard_that_is_not_there_is_fatal(folder: Path) -> None:
    with FakeShard().serving(folder / "s"):
        pass
    events = await driven(folder / "s", batch(1, requests=1), RequestSettings(connect_timeout=0.5))
    failed = [event for event in events if isinstance(event, StepFailed)]
    assert [event.fatal for event in failed] == [True]
    assert "no shard answers" in failed[0].cause


async def test_a_step_on_a_shard_can_be_stopped(folder: Path) -> None:
    with FakeShard(decode=0.05).serving(folder / "s") as shard:
        driver = LoadDriver(
            BenchTarget(kind="shard-v3", address=str(folder / "s"), model="m"), RequestSettings()
        )
        events = []
        async with asyncio.timeout(30):
            async for event in driver.drive(batch(1), prompts(max_tokens=400)):
                events.append(event)
                if isinstance(event, StepProgress) and shard.named("Decode"):
                    driver.stop("asked to")
        assert shard.calls[-1][0] == "ClearCache"
    assert isinstance(events[-1], StepEnded)
    assert events[-1].record.stopped == "asked to"
    assert events[-1].record.batches == []
