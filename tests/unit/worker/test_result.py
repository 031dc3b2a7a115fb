"""When a step's result is awaited, and what its copies wait for. With stand-ins for streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker import result as result_module
from tgi_cli.worker.result import DeviceResult

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done on the device, in order."""
    done: list[str] = []
    streams = [Stream("main", done)]

    class Event:
        def record(self, stream: Stream) -> None:
            done.append(f"recorded on {stream.name}")

        def synchronize(self) -> None:
            done.append("awaited")

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        done.append(f"copied on {streams[-1].name}")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(result_module, "to_host", to_host)
    return done


def test_a_step_that_samples_nothing_is_awaited(log: list[str]) -> None:
    """Else the chunks of a long prompt would all be queued, ahead of who comes next."""
    result = DeviceResult()
    side: Any = Stream("side", log)
    result.send(CUDA, side)
    assert log == ["recorded on main"]
    assert result.wait().token_ids == []
    assert log == ["recorded on main", "awaited"]


def test_copies_run_beside_the_next_step(log: list[str]) -> None:
    result = DeviceResult()
    result.sampled = [Sampled(torch.tensor([4, 5]), torch.tensor([-1.0, -2.0]), None)]
    side: Any = Stream("side", log)
    result.send(CUDA, side)
    assert log == ["side waits for main", *["copied on side"] * 2, "recorded on side"]
    found = result.wait()
    assert (found.token_ids, found.logprobs) == ([4, 5], [-1.0, -2.0])
    assert log[-1] == "awaited"


def test_tokens_and_logprobs_of_a_graph_are_one_copy(log: list[str]) -> None:
    result = DeviceResult()
    logprobs = torch.tensor([-0.5, float("nan"), -3.0])
    result.packed = torch.stack((torch.tensor([7, 8, 9]).int(), logprobs.view(torch.int32)), 1)
    side: Any = Stream("side", log)
    result.send(CUDA, side)
    assert log.count("copied on side") == 1
    found = result.wait()
    assert found.token_ids == [7, 8, 9]
    assert found.logprobs == [-0.5, 0.0, -3.0]
    assert list(found.errors) == [1]


def test_without_a_stream_of_their_own_copies_follow_the_step(log: list[str]) -> None:
    result = DeviceResult()
    result.sampled = [Sampled(torch.tensor([4]), torch.tensor([-1.0]), None)]
    result.send(CUDA)
    assert log == [*["copied on main"] * 2, "recorded on main"]
