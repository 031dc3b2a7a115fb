"""Processes of several stages and shards: what they send on, and what they agree on."""

from __future__ import annotations

import time

import pytest
import torch

from tests.tools.thread_stages import on_stages
from tgi_cli.device.distributed import Shard

CPU = torch.device("cpu")


def test_processes_are_numbered_from_the_last_stage_on() -> None:
    shares = [Shard.of_process(number, 2, 3, CPU) for number in range(6)]
    assert [(each.stage, each.rank) for each in shares] == [
        (2, 0),
        (2, 1),
        (1, 0),
        (1, 1),
        (0, 0),
        (0, 1),
    ]
    assert [each.process for each in shares] == list(range(6))
    assert [each.leads for each in shares] == [True] + [False] * 5
    assert Shard().is_first
    assert Shard().is_last
    assert Shard().leads


def test_stages_send_on_in_order_and_do_not_wait_for_each_other() -> None:
    """Each sends two steps before the next one receives the first."""

    def work(shard: Shard) -> tuple[list[float], int, int, float]:
        received = []
        if not shard.is_first:
            time.sleep(0.2)
        for step in range(4):
            x = torch.full((3 + step, 5), float(step))
            if not shard.is_first:
                x = shard.receive(3 + step, 5, torch.float32) + 10
            received.append(x.mean().item())
            if not shard.is_last:
                shard.send(x)
        summed = shard.all_reduce(torch.tensor([float(shard.process)])).item()
        return received, shard.smallest(shard.process - 1), shard.total(shard.process), summed

    for number, (received, smallest, total, summed) in enumerate(on_stages(2, 2, work)):
        last = number < 2
        assert received == [step + (10 if last else 0) for step in range(4)]
        assert (smallest, total) == (-1, 6)
        assert summed == (1 if last else 5), "among the shards of a stage"


def test_a_stage_that_sends_nothing_is_not_waited_for_longer_than_the_limit() -> None:
    def work(shard: Shard) -> None:
        shard.set_timeout(30.0, 0.5)
        if shard.is_last:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                shard.receive(1, 4, torch.float32)
        shard.smallest(0)

    on_stages(2, 1, work)
