"""A whole engine in stages does what it does in one process, for several families.

The stages are threads that communicate over gloo; see test_processes.py for processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.engine_run import NEW_ON_STAGES, ON_SHARDS, run_engine
from tests.parity.families import make_checkpoint, prompts_of
from tests.tools.paged_run import PagedRun, load
from tests.tools.thread_stages import on_stages
from tgi_cli.device.distributed import Shard
from tgi_cli.models import load_model, read_config

FAMILIES = {
    "Llama 3": ((2, 1), (2, 2)),
    "Qwen 3": ((3, 1),),
    "Gemma 2": ((2, 2),),
    "Mixtral": ((2, 1),),
    "GPT-2": ((2, 2),),
}
"""Stages and shards of each."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_tokens_in_chunks_after_preemption_and_by_reuse(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = make_checkpoint(case, tmp_path)
    prompts = [prompts_of(case)[i] for i in ON_SHARDS]
    alone = run_engine(path, prompts, (0, 2))
    firsts = [answer[:NEW_ON_STAGES] for answer in alone.answers]
    model = load(path)
    for stages, size in FAMILIES[name]:
        run = run_engine(path, prompts, (0, 2), size, stages)
        assert run.answers == firsts
        assert run.samples == [firsts[i] for i in (0, 2) for _ in range(2)]
        assert run.preemptions
        assert run.reused
        whole = PagedRun(model, torch.float32, "torch").step({"a": run.turn + run.turn_answer})
        chosen = whole["a"][len(run.turn) - 1 : -1].argmax(-1)
        assert run.turn_answer == chosen.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_layers_are_divided_changes_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """In bfloat16, stages run programs of their own layers."""
    path = make_checkpoint(CASES["Qwen 3"], tmp_path)
    ids = [(7 * i) % 250 for i in range(50)]
    pieces = [ids[:30], ids[30:49], ids[49:]]

    def work(shard: Shard) -> torch.Tensor:
        model = load_model(read_config(path), dtype, torch.device("cpu"), shard=shard)
        if not shard.is_last:
            model.logits = torch.Tensor.float  # type: ignore[method-assign, assignment]
        run = PagedRun(model, dtype, "torch" if dtype == torch.float32 else None)
        return torch.cat([run.step({"a": piece})["a"] for piece in pieces])

    divided, whole = on_stages(3, 1, work)[0], on_stages(1, 1, work)[0]
    assert torch.equal(divided, whole)
