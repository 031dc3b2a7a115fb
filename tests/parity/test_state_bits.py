"""Models with recurrent states: cuts, company and snapshots change no bit of what they compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint, random_ids
from tests.tools.paged_run import PagedRun, kernels_add_up_rows_alike
from tgi_cli.attention import attention_name
from tgi_cli.models import CausalLM, load_model, read_config

NAMES = (
    "Kimi Linear",
    "OLMo Hybrid",
    "Qwen3-Next",
    "Qwen 3.5",
    "Qwen 3.5 MoE",
    "LFM 2",
    "Granite 4",
    "Nemotron 3",
)


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CASES[request.param], tmp_path_factory.mktemp("model"))


Model = tuple[CausalLM, torch.dtype]


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def model(request: pytest.FixtureRequest, checkpoint: Path) -> Model:
    dtype = request.param
    if not kernels_add_up_rows_alike(dtype):
        pytest.skip("the products of this processor depend on the number of rows")
    model = load_model(read_config(checkpoint), dtype, torch.device("cpu"), max_positions=512)
    assert model.state_specs
    return model, dtype


def make_run(model: Model) -> PagedRun:
    run = PagedRun(*model, None)
    assert attention_name(run.attention) in ("cpu", "native")
    return run


def test_neither_cuts_nor_other_sequences_change_a_bit(model: Model) -> None:
    ids = random_ids(150, seed=7)
    alone = make_run(model).step({"a": ids})["a"]
    run = make_run(model)
    run.step({f"other {n}": random_ids(1 + 9 * n, seed=n) for n in range(6)})
    pieces, start = [], 0
    for size in (1, 2, 30, 1, 1, 65, 3, *[1] * 47):
        neighbours = {f"other {n}": random_ids(1, seed=start) for n in range(start % 6)}
        new = {f"new {start}": random_ids(11, seed=start)} if start % 3 else {}
        pieces.append(run.step({"a": ids[start : start + size], **neighbours, **new})["a"])
        start += size
    assert start == len(ids)
    assert torch.equal(torch.cat(pieces), alone)


def test_a_snapshot_and_the_rest_are_the_whole(model: Model) -> None:
    ids = random_ids(100, seed=3)
    whole = make_run(model).step({"a": ids})["a"]
    run = make_run(model)
    run.step({"a": ids[:20], "b": random_ids(9, seed=1)})
    # The snapshot is due in the middle of a step; what follows it is another text's first.
    run.step({"a": ids[20:60] + random_ids(5, seed=2), "b": [7]}, {"a": 48 - 20})
    run.step({"a": random_ids(30, seed=4)})
    run.resume("c", "a")
    rest = [run.step({"b": [9], "c": ids[48:51]})["c"], run.step({"c": ids[51:]})["c"]]
    assert torch.equal(torch.cat(rest), whole[48:])
