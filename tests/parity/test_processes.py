"""Five families in processes that communicate over gloo: shards, stages, and stages of shards.

See test_pipeline.py and test_sharded_forward.py for more in threads, which start faster.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import CASES
from tests.parity.engine_run import ON_SHARDS, run_engine
from tests.parity.families import make_checkpoint, prompts_of

pytestmark = pytest.mark.slow

SAMPLED = (0, 2)


@pytest.mark.parametrize("name", ["Llama 3", "Qwen 3", "Gemma 2", "Mixtral", "GPT-2"])
def test_processes_generate_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = make_checkpoint(case, tmp_path)
    prompts = [prompts_of(case)[i] for i in ON_SHARDS]
    alone = run_engine(path, prompts, SAMPLED)
    for stages, num_shard in ((1, 2), (2, 1), (2, 2)):
        run = run_engine(path, prompts, SAMPLED, num_shard, stages, processes=True)
        firsts = [answer[: len(run.answers[0])] for answer in alone.answers]
        assert run.answers == firsts, (stages, num_shard)
        assert run.samples == [firsts[i] for i in SAMPLED for _ in range(2)]
        assert run.preemptions or stages == 1
        assert run.reused
