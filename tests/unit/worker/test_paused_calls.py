"""Calls that stop at layers: what they run before, what they give, and how they are given up."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tgi_cli.models.vision import PausePoints
from tgi_cli.worker.paused_calls import PausedCalls

CPU = torch.device("cpu")


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: int) -> int:
        self.count += 1
        return x + 1


@pytest.fixture
def layers():
    return [Counter() for _ in range(5)]


@pytest.fixture
def calls(layers):
    calls = PausedCalls(layers, CPU)
    yield calls
    calls.close()
    calls.close()


def passed(layers) -> int:
    return sum(layer.count for layer in layers)


def through(layers, x: int = 0) -> int:
    for layer in layers:
        x = layer(x)
    return x


def test_each_resumption_runs_so_many_layers(layers, calls):
    calls.start(lambda: through(layers))
    assert passed(layers) == 0
    assert not calls.resume(1)
    assert passed(layers) == 1
    assert not calls.resume(3)
    assert passed(layers) == 4
    assert calls.is_running
    assert calls.resume(None)
    assert not calls.is_running
    assert (passed(layers), calls.result()) == (5, 5)


def test_a_call_may_end_before_it_would_stop(layers, calls):
    calls.start(lambda: through(layers[:2]))
    assert calls.resume(3)
    assert calls.result() == 2
    calls.start(lambda: through(layers))
    assert not calls.resume(4), "what is left of an earlier allowance is not inherited"
    assert calls.resume(1)
    assert calls.result() == 5


def test_what_a_call_raises_is_raised_where_it_is_awaited(layers, calls):
    def fails() -> int:
        through(layers[:1])
        raise ValueError("no image")

    calls.start(fails)
    assert calls.resume(2)
    with pytest.raises(ValueError, match="no image"):
        calls.result()
    calls.start(lambda: through(layers))
    assert calls.resume(None)
    assert calls.result() == 5


def test_a_cancelled_call_unwinds_and_another_may_begin(layers, calls):
    ended = []

    def call() -> int:
        try:
            return through(layers)
        except Exception:
            ended.append("as if it had failed")
            raise
        finally:
            ended.append("unwound")

    calls.start(call)
    calls.resume(2)
    with pytest.raises(RuntimeError, match="a call is running"):
        calls.start(call)
    calls.cancel()
    assert ended == ["unwound"]
    assert passed(layers) == 2
    calls.start(call)
    calls.cancel()
    assert passed(layers) == 2, "nothing of it ran"
    calls.start(call)
    assert calls.resume(None)
    assert calls.result() == 5


def within(pauses: PausePoints, layers: list[Counter], passed: list[int]) -> int:
    """Layers with three points each."""
    for layer in layers:
        layer(0)
        for _ in range(3):
            passed.append(1)
            pauses()
    return len(passed)


def test_time_bounds_a_call_within_layers(layers):
    pauses = PausePoints()
    calls = PausedCalls(layers, CPU, None, pauses)
    points: list[int] = []
    calls.start(lambda: within(pauses, layers, points))
    seen = []
    while not calls.resume_for(0.0):
        seen.append((calls.layers_begun, len(points)))
        assert pauses.check is None, "others go on without stopping"
    assert len(seen) == 5 + 15, "at each layer, and at each point"
    assert seen == sorted(seen)
    assert calls.result() == 15
    calls.close()


def test_time_bounds_a_call_between_operations_of_torch(calls):
    def counted() -> float:
        x = torch.zeros(3)
        for _ in range(6):
            x = x + 1
            passed.append(1)
        return float(x.sum())

    passed: list[int] = []
    calls.start(counted)
    stops = 0
    while not calls.resume_for(0.0):
        stops += 1
    assert stops >= 8, "behind each of them"
    assert (len(passed), calls.result()) == (6, 18.0)
    calls.start(counted)
    assert calls.resume(None)
    assert calls.result() == 18.0


def test_after_some_time_layers_may_be_counted_again(layers):
    pauses = PausePoints()
    calls = PausedCalls(layers, CPU, None, pauses)
    points: list[int] = []
    calls.start(lambda: within(pauses, layers, points))
    for _ in range(3):
        assert not calls.resume_for(0.0)
    assert (calls.layers_begun, len(points)) == (1, 2)
    assert not calls.resume(2)
    assert (calls.layers_begun, len(points)) == (3, 9)
    assert calls.resume_for(60.0)
    assert calls.result() == 15
    calls.close()


def test_a_call_may_be_cancelled_within_a_layer(layers):
    pauses = PausePoints()
    calls = PausedCalls(layers, CPU, None, pauses)
    points: list[int] = []
    calls.start(lambda: within(pauses, layers, points))
    for _ in range(3):
        calls.resume_for(0.0)
    calls.cancel()
    assert not calls.is_running
    assert len(points) == 2
    calls.start(lambda: through(layers))
    assert calls.resume_for(60.0)
    assert calls.result() == 5
    calls.close()


def test_without_a_call_there_is_nothing_to_resume(calls):
    calls.cancel()
    with pytest.raises(RuntimeError, match="no call"):
        calls.resume(1)


def test_other_callers_of_the_layers_do_not_stop(layers, calls):
    calls.start(lambda: through(layers))
    calls.resume(1)
    assert through(layers) == 5
    assert calls.resume(None)
    assert calls.result() == 5


def test_calls_run_without_gradients(layers, calls):
    calls.start(torch.is_inference_mode_enabled)
    assert calls.resume(None)
    assert calls.result() is True


def test_closing_ends_the_thread_and_lets_go_of_the_layers(layers):
    calls = PausedCalls(layers, CPU)
    before = threading.active_count()
    calls.start(lambda: through(layers))
    calls.resume(1)
    assert threading.active_count() == before + 1
    calls.close()
    assert threading.active_count() == before
    assert not any(layer._forward_pre_hooks for layer in layers)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_calls_have_their_own_number_of_threads(layers, threads):
    before = torch.get_num_threads()
    calls = PausedCalls(layers, CPU, threads)
    calls.start(torch.get_num_threads)
    assert calls.resume(None)
    assert calls.result() == threads
    assert torch.get_num_threads() == before
    calls.close()
