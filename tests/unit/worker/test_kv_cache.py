from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tools.thread_stages import on_stages
from tests.unit.config.test_resolve import resolved
from tgi_cli.config import EngineConfig
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.errors import ExitCode, OutOfMemoryError
from tgi_cli.worker.sizing import kv_cache, saved_profile
from tgi_cli.worker.sizing.image_cost import ImageCost
from tgi_cli.worker.sizing.kv_cache import (
    Capacity,
    KVCacheSizing,
    cache_budget,
    size_cache,
    size_states,
)
from tgi_cli.worker.sizing.profile_steps import WARMUP_BLOCKS

BLOCK_BYTES = 1 << 20
CONFIG = replace(
    resolved(dtype="float32"),
    max_input_tokens=999,
    max_total_tokens=1000,
    max_batch_prefill_tokens=256,
    max_batch_size=4,
)
PER_SEQUENCE = 63  # blocks of 16 tokens for 1000


def size(affordable: int, config: EngineConfig = CONFIG, **said: Any) -> tuple[int, EngineConfig]:
    explicit = tuple(name for name in said if name in ("max_input_tokens", "max_total_tokens"))
    config = replace(config, **said, explicit_limits=explicit) if said else config
    return size_cache(config, affordable * BLOCK_BYTES + 5, BLOCK_BYTES)


def test_a_cpu_takes_what_all_rows_can_use_and_room_for_prefixes():
    blocks, config = size(10_000)
    assert blocks == int(4 * PER_SEQUENCE * 1.25)
    assert config is CONFIG


def test_a_gpu_takes_all_there_is():
    assert size(10_000, replace(CONFIG, device="cuda"))[0] == 10_000


@pytest.mark.parametrize("affordable", [PER_SEQUENCE, 100])
def test_less_than_useful_is_enough_if_one_request_fits(affordable):
    assert size(affordable) == (affordable, CONFIG)


@pytest.mark.tgi_pain(8)
def test_limits_that_were_left_open_are_lowered_to_what_fits():
    blocks, config = size(10)
    assert blocks == 10
    assert (config.max_total_tokens, config.max_input_tokens) == (160, 159)
    assert config == replace(CONFIG, max_total_tokens=160, max_input_tokens=159)
    said = replace(CONFIG, max_input_tokens=100)
    _, config = size(10, said, max_input_tokens=100)
    assert (config.max_total_tokens, config.max_input_tokens) == (160, 100)


def test_limits_that_the_user_set_are_not_lowered():
    with pytest.raises(OutOfMemoryError, match=r"1000 tokens takes 63\.0 MiB, and 10\.0 MiB"):
        size(10, max_total_tokens=1000)
    with pytest.raises(OutOfMemoryError, match="201 tokens takes") as caught:
        size(10, replace(CONFIG, max_input_tokens=200), max_input_tokens=200)
    assert "--max-input-tokens" in caught.value.remedy
    assert "160 tokens" in caught.value.remedy
    assert caught.value.exit_code == ExitCode.OUT_OF_MEMORY


def test_memory_for_less_than_one_block_is_an_error():
    with pytest.raises(OutOfMemoryError, match=r"takes 1\.0 MiB, and 5 B are free") as caught:
        size(0)
    assert caught.value.remedy.startswith("free memory")


def test_a_cache_that_the_user_sized_is_that_size():
    asked = replace(CONFIG, max_batch_total_tokens=1001)
    blocks, config = size(100, asked)
    assert blocks == 63, "rounded up: 1001 tokens were promised"
    assert config is asked


def test_a_cache_that_the_user_sized_must_fit():
    asked = replace(CONFIG, max_batch_total_tokens=4096)
    with pytest.raises(OutOfMemoryError, match="--max-batch-total-tokens 4096") as caught:
        size(100, asked, max_batch_total_tokens=4096)
    assert "1600 tokens" in caught.value.remedy


def test_the_budget_leaves_room():
    gib = 1 << 30
    open_size, asked = CONFIG, replace(CONFIG, max_batch_total_tokens=10_000)
    assert cache_budget(open_size, 9 * gib, gib, 16 * gib) == 4 * gib
    assert cache_budget(asked, 11 * gib, gib, 16 * gib) == 9 * gib
    cuda = replace(CONFIG, device="cuda")
    assert cache_budget(cuda, 60 * gib, gib, 80 * gib) == 55 * gib
    assert cache_budget(cuda, gib, 2 * gib, 80 * gib) == 0


def test_a_share_of_a_gpus_memory_is_left_to_others():
    gpu = replace(CONFIG, device="cuda")
    budget = cache_budget(gpu, 900, 100, 1000)
    assert budget == 900 - 100 - 50
    assert cache_budget(replace(gpu, cuda_memory_fraction=0.99), 900, 100, 1000) == budget
    assert cache_budget(replace(gpu, cuda_memory_fraction=0.6), 900, 100, 1000) == 400
    assert cache_budget(replace(gpu, cuda_memory_fraction=0.1), 900, 100, 1000) == 0


STATE_BYTES = 3 << 20


def test_a_model_without_states_has_no_slots():
    assert size_states(CONFIG, 10 << 30, 0) == (0, CONFIG)


def test_every_row_has_a_slot_and_prefixes_some_more():
    slots, config = size_states(CONFIG, 1 << 30, STATE_BYTES)
    assert (slots, config) == (4 + 4 * 4, CONFIG)
    slots, config = size_states(CONFIG, 40 * STATE_BYTES, STATE_BYTES)
    assert (slots, config) == (4 + (40 - 4) // 4, CONFIG), "a quarter of what rows leave"


def test_without_prefix_caching_snapshots_are_for_samples_of_one_prompt_alone():
    config = replace(CONFIG, prefix_caching=False)
    assert size_states(config, 1 << 30, STATE_BYTES) == (4 + 4, config)


def test_states_of_rows_take_half_of_the_memory_at_most():
    slots, config = size_states(CONFIG, 6 * STATE_BYTES, STATE_BYTES)
    assert config == replace(CONFIG, max_batch_size=3)
    assert slots == 3
    with pytest.raises(OutOfMemoryError, match=r"state of one request takes 3\.0 MiB") as caught:
        size_states(CONFIG, 2 * STATE_BYTES - 1, STATE_BYTES)
    assert caught.value.exit_code == ExitCode.OUT_OF_MEMORY


def test_a_model_without_kv_has_blocks_that_cost_nothing():
    assert size_cache(CONFIG, 0, 0) == (int(4 * PER_SEQUENCE * 1.25), CONFIG)
    cuda = replace(CONFIG, device="cuda")
    assert size_cache(cuda, 0, 0) == (int(4 * PER_SEQUENCE * 1.25), cuda)
    asked = replace(CONFIG, max_batch_total_tokens=1 << 20)
    assert size_cache(asked, 0, 0) == ((1 << 20) // 16, asked)


def test_stages_of_different_sizes_have_as_many_blocks(monkeypatch):
    """As many as the stage with the largest blocks has memory for."""
    profile = saved_profile.SavedProfile(
        activation_bytes=0, graphs=False, step_seconds=0.0, max_total_tokens=1
    )
    monkeypatch.setattr(saved_profile, "load", lambda key: profile)
    monkeypatch.setattr(saved_profile, "key_of", lambda config: {})
    free = 600 * BLOCK_BYTES
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 3 * free)

    def size_stage(shard: Shard) -> int:
        attention: Any = SimpleNamespace(
            block_bytes=(1 + shard.stage) * BLOCK_BYTES,
            device=torch.device("cpu"),
            states=None,
            specs=(),
            allocate=lambda num_blocks: None,
        )
        sizing = KVCacheSizing(CONFIG, attention, shard, 0, lambda step: None, lambda: None)
        return sizing.size().num_blocks

    # Half of each stage's part of the memory, in which its small cache is counted as free.
    fewest = (free // 2 + WARMUP_BLOCKS * 3 * BLOCK_BYTES // 2) // (3 * BLOCK_BYTES)
    assert on_stages(3, 1, size_stage) == [fewest] * 3


def test_the_scheduler_gets_all_that_warm_up_has_found():
    cost = ImageCost(3, 2.0, 50, 1 << 10, 1 << 20, 0.001, 0.01, interrupts=True)
    capacity = Capacity(
        config=CONFIG,
        num_blocks=70,
        cache_bytes=70 << 20,
        weight_bytes=0,
        activation_bytes=0,
        load_seconds=0.0,
        warmup_seconds=0.0,
        kv_window=128,
        num_host_blocks=9,
        num_state_slots=6,
        step_seconds=0.5,
        images=cost,
        whole_prompts=True,
    )
    found = SchedulerConfig.after_warmup(capacity)
    assert (found.max_total_tokens, found.max_batch_size) == (1000, 4)
    assert (found.num_blocks, found.window, found.num_host_blocks) == (70, 128, 9)
    assert (found.num_state_slots, found.encoder, found.whole_prompts) == (6, cost.limits, True)
    assert found.token_seconds == 0.5 / 256
