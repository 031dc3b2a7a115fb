"""Blocks that go to the host's memory and come back, with a CPU in the GPU's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.unit.worker.fakes import GREEDY
from tgi_cli.config import ServeConfig
from tgi_cli.device.distributed import ALONE
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.errors import ConfigError, OutOfMemoryError
from tgi_cli.worker import host_cache
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.host_cache import open_host_cache

FIRST, SECOND = tuple(range(3, 103)), tuple(range(110, 210))


def test_answers_are_the_same_when_their_prefix_comes_back(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama", seed=1)
    serve = ServeConfig(model_id="tiny", dtype="float32", attention="torch", max_batch_size=2)
    worker, config = load_worker(serve, path)
    worker.warmup()
    block = worker.attention.block_bytes
    config = replace(config, kv_offloading_size=20 * block, max_total_tokens=120)
    host = worker.runner.host_cache = open_host_cache(config, worker.attention, ALONE)
    assert host is not None
    assert host.num_slots == 20
    with pytest.raises(ConfigError, match="holds no block"):
        open_host_cache(replace(config, kv_offloading_size=block - 1), worker.attention, ALONE)

    scheduler = Scheduler(SchedulerConfig.of(config, 8, num_host_blocks=host.num_slots))

    def answer(request_id: int, prompt: tuple[int, ...]) -> tuple[list[int], int]:
        """The tokens of an answer, and how many of the prompt were computed for it."""
        request = GenerationRequest(
            request_id=request_id, prompt_ids=prompt, sampling=GREEDY, max_new_tokens=10
        )
        assert scheduler.add(request) is None
        tokens, computed = [], 0
        while (step := scheduler.schedule()) is not None:
            computed += step.num_prefill_tokens
            tokens += scheduler.update(worker.sample(worker.launch(step)).wait()).token_ids
        return tokens, computed

    first, second = answer(1, FIRST), answer(2, SECOND)
    assert first[1] == second[1] == len(FIRST)
    assert answer(3, FIRST) == (first[0], len(FIRST) - 6 * 16)
    assert answer(4, SECOND) == (second[0], len(SECOND) - 6 * 16)
    worker.close()


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "the device has no memory", "lower --cuda"),
        (RuntimeError("cudaHostRegister failed"), "the host does not give 100.0 MiB", "give less"),
    ],
)
def test_missing_memory_is_named_as_the_hosts_or_the_devices(
    error: RuntimeError, cause: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_given: object) -> None:
        raise error

    monkeypatch.setattr(host_cache, "HostCache", refuse)
    config: Any = SimpleNamespace(kv_offloading_size=100 << 20, block_size=16)
    attention: Any = SimpleNamespace(block_bytes=1 << 20)
    with pytest.raises(OutOfMemoryError, match=f"--kv-offloading-size: {cause}") as caught:
        open_host_cache(config, attention, ALONE)
    assert caught.value.remedy.startswith(remedy)
