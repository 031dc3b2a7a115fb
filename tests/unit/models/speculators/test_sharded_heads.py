"""Heads of a target on two shards propose what they propose for the whole target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tools.checkpoints import make_llama
from tests.tools.draft_heads import make_eagle3, make_medusa
from tests.tools.paged_run import CPU, random_ids
from tests.tools.thread_shards import on_shards
from tests.unit.models.speculators.steps import Entry, Steps
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.models import load_model, read_config
from tgi_cli.models.speculators.detect import detect
from tgi_cli.models.speculators.load import ProposerOptions, load_proposer

HEADS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "a token table of the target's": (lambda path: make_eagle3(path, "vllm"), 192),
    "a token table of its own": (lambda path: make_eagle3(path, "vllm", own_embedding=True), 192),
    "an output head of the target's": (lambda path: make_medusa(path, "tgi2"), 64),
}
"""A head, and the width of the states that it reads."""


@pytest.mark.parametrize("name", HEADS)
def test_all_shards_propose_the_same(name: str, tmp_path: Path) -> None:
    target = make_llama(tmp_path / "target", num_hidden_layers=6)
    make, width = HEADS[name]
    head = make(tmp_path / "head")

    def work(shard: Shard) -> list[object]:
        model = load_model(read_config(target), torch.float32, CPU, shard=shard)
        options = ProposerOptions(torch.float32, CPU, 3, 128, 4, 6, 64, 256, sharded=shard.size > 1)
        steps = Steps(load_proposer(detect(head), model, options), width, 4)
        steps.add(0, random_ids(60, 1))
        steps.add(1, random_ids(60, 2))
        found: list[object] = []
        for entries in ((Entry(0, 9), Entry(1, 3)), (Entry(1, 4, 2), Entry(0)), (Entry(0),)):
            proposed = steps.step(*entries)
            found.append({row: ids for row, (ids, _) in proposed.items()})
        return found

    expected = work(ALONE)
    for found in on_shards(2, work):
        assert found == expected
