"""Steps with drafts are timed within the limits, once, and alike on all shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools.checkpoints import make_llama
from tests.unit.worker.test_kv_cache import CONFIG
from tgi_cli.config import ServeConfig
from tgi_cli.device.distributed import ALONE
from tgi_cli.engine.speculation import create_speculator
from tgi_cli.engine.step import Step, StepTime
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.sizing import draft_timing, saved_profile
from tgi_cli.worker.sizing.draft_timing import time_steps


class Recorder:
    """Runs steps in no time, or in that of a made-up clock."""

    def __init__(self, num_blocks: int, seconds: float = 0.0) -> None:
        self.num_blocks = num_blocks
        self.seconds = seconds
        self.now = 0.0
        self.steps: list[Step] = []
        self.known: dict[int, int] = {}
        self.blocks: dict[int, int] = {}

    def __call__(self, step: Step) -> None:
        self.steps.append(step)
        self.now += self.seconds
        for new in step.new:
            assert max(new.block_ids) < self.num_blocks
            self.known[new.row], self.blocks[new.row] = len(new.token_ids), len(new.block_ids)
        drafts = {draft.row: draft for draft in step.drafts}
        for row, start, count, samples in zip(
            step.rows, step.starts, step.counts, step.samples, strict=True
        ):
            assert start + 1 == self.known[row], "one known token is to be computed"
            assert count == samples
            assert start + count <= 16 * self.blocks[row]
            if count > 1:
                assert drafts[row].start == start + 1
                assert len(drafts[row].token_ids) == count - 1
        assert step.num_decodes == len(step.rows)


def timed(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> list[StepTime]:
    config = replace(CONFIG, **limits)
    monkeypatch.setattr(draft_timing.time, "perf_counter", lambda: recorder.now)
    times = time_steps(recorder, config, ALONE, recorder.num_blocks)
    assert len({(t.sequences, t.rows, t.context) for t in times}) == len(times)
    ends = [
        start + count
        for step in recorder.steps
        for start, count in zip(step.starts, step.counts, strict=True)
    ]
    assert max(ends) < config.max_total_tokens
    return list(times)


def test_rows_sequences_and_contexts_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = timed(Recorder(500, 0.001), monkeypatch, max_total_tokens=9000, max_batch_size=8)
    rows = sorted(t.rows for t in times if t.sequences == 1 and t.context == 128)
    assert rows == [1, 2, 3, 4, 6, 8, 12, 13, 16, 32]
    assert sorted(t.sequences for t in times if t.sequences > 1) == [2, 4, 8]
    assert {t.rows for t in times if t.context == 2048} == {1, 8}
    assert all(t.seconds == pytest.approx(0.001, abs=1e-6) for t in times)


@pytest.mark.parametrize("total", [4, 5, 10, 40, 300])
def test_short_limits_are_kept(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    times = timed(Recorder(3, 0.001), monkeypatch, max_total_tokens=total, max_batch_size=2)
    assert times[0].rows == 1


def test_without_room_for_drafts_nothing_is_timed() -> None:
    config = replace(CONFIG, max_total_tokens=3)
    assert time_steps(Recorder(3), config, ALONE, 3) == ()


def test_a_slow_model_is_timed_where_it_matters_most(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(500, 0.06)
    times = timed(recorder, monkeypatch, max_total_tokens=9000, max_batch_size=64)
    assert [t.rows for t in times] == [1, 2, 4, 8, 3]
    assert recorder.now < draft_timing.MAX_SECONDS + 1


# --------------------------------------------------------------------------- in a warm-up


def warmed(path: Path, **said: Any) -> Any:
    limits = {"max_batch_prefill_tokens": 64, "max_batch_size": 4}
    worker, config = load_worker(ServeConfig(model_id="m", dtype="float32", **limits, **said), path)
    return worker.warmup(), config


def test_a_warm_up_times_steps_unless_nothing_is_speculated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_llama(tmp_path / "llama")
    capacity, config = warmed(path)
    assert config.speculate == capacity.config.speculate == 7
    assert {t.rows for t in capacity.step_times} >= {1, 2, 4, 8}
    assert create_speculator(capacity.config, capacity.step_times) is not None
    without, _ = warmed(path, speculate=0)
    assert without.step_times == ()
    assert create_speculator(without.config, without.step_times) is None


def test_saved_times_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_llama(tmp_path / "llama")
    capacity, config = warmed(path)
    key = saved_profile.key_of(config)
    saved_profile.save(key, capacity.profile)
    found = saved_profile.load(key)
    assert found is not None
    assert found.step_times == capacity.step_times
    assert isinstance(found.step_times[0], StepTime)
    monkeypatch.setattr("tgi_cli.worker.worker.time_steps", lambda *_: pytest.fail("measured"))
    assert warmed(path)[0].step_times == capacity.step_times
    assert warmed(path, speculate=3)[0].step_times == capacity.step_times, "of any number"


def test_figures_without_times_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_llama(tmp_path / "llama")
    capacity, config = warmed(path, speculate=0)
    saved_profile.save(saved_profile.key_of(config), capacity.profile)
    assert warmed(path)[0].step_times


def test_proposals_are_timed_however_long_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow model, too: a drafter whose time is unknown would seem to take none."""
    recorder, assumed = Recorder(500, 3.0), []
    config = replace(CONFIG, max_total_tokens=9000, max_batch_size=64)
    monkeypatch.setattr(draft_timing.time, "perf_counter", lambda: recorder.now)
    times = time_steps(recorder, config, ALONE, 500, 5, lambda: assumed.append(len(recorder.steps)))
    assert [(t.sequences, t.rows, t.proposals) for t in times] == [(1, 1, 0), (1, 1, 1), (1, 1, 5)]
    assert [step.proposals for step in recorder.steps] == [[]] * 3 + [[1]] * 3 + [[5]] * 3
    assert assumed == [3, 6], "before the steps that propose"


def test_proposals_of_more_sequences_are_timed_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(500, 0.001)
    config = replace(CONFIG, max_total_tokens=9000, max_batch_size=8)
    monkeypatch.setattr(draft_timing.time, "perf_counter", lambda: recorder.now)
    times = time_steps(recorder, config, ALONE, 500, 3)
    assert [(t.sequences, t.proposals) for t in times if t.proposals] == [
        (1, 1),
        (1, 3),
        (4, 1),
        (4, 3),
    ]


def test_a_drafter_that_catches_up_is_timed_behind_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt takes it three seconds, and is computed anew in each of the steps."""
    recorder, forgotten = Recorder(500, 0.1), []

    def forget() -> None:
        forgotten.append(len(recorder.steps))
        recorder.seconds = 3.0

    def run(step: Step) -> None:
        recorder(step)
        recorder.seconds = 0.1

    config = replace(CONFIG, max_total_tokens=9000, max_batch_size=8)
    monkeypatch.setattr(draft_timing.time, "perf_counter", lambda: recorder.now)
    times = time_steps(run, config, ALONE, 500, 3, forget_computed=forget)
    (late,) = (time for time in times if time.lag)
    assert late == StepTime(1, 1, 256, pytest.approx(3.0, abs=1e-5), 1, 256)
    first = recorder.steps.index(next(s for s in recorder.steps if s.starts == [256]))
    assert forgotten == [first + 1, first + 2], "before the steps that are timed"
    assert all(time.seconds == pytest.approx(0.1, abs=1e-5) for time in times if not time.lag)
