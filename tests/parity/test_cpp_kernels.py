"""The CPU's kernels against torch's operations, in bfloat16, for every built-in family.

The oracle is our own model in float32, which other tests hold against transformers. Kernels round
where torch's operations round, but add up in another order; with random weights that is as far
from the oracle as torch's operations are, and no further.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.cases import CASES
from tests.parity.families import make_checkpoint, random_ids
from tests.tools.paged_run import PagedRun
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.kernels import cpp_library, without_cpp_kernels
from tgi_cli.models import CausalLM, load_model, read_config

LENGTHS = (150, 97, 33, 1)
PIECES = (61, 1, 16, 30, 1, 1, 7, 40)

LONG = 256
"""So many tokens that a program does the work of a row for whole tiles of the KV cache."""

ALONE = 2
"""Which of the texts is fed by itself, too."""


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if cpp_library() is None:
        pytest.skip("the kernels are not compiled: there is no C++ compiler here")


@pytest.fixture(scope="module", params=sorted(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(CASES[request.param], tmp_path_factory.mktemp(request.param))


def load(path: Path, dtype: torch.dtype, positions: int = 192) -> CausalLM:
    return load_model(read_config(path), dtype, torch.device("cpu"), max_positions=positions)


def logits_of(run: PagedRun, only: int | None = None) -> list[Tensor]:
    """Of a few texts, fed together in uneven pieces, or of one of them."""
    texts = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    texts = texts if only is None else [texts[only]]
    got: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    turn = 0
    while any(n < len(ids) for n, ids in zip(done, texts, strict=True)):
        step = {}
        for i, ids in enumerate(texts):
            size = PIECES[turn % len(PIECES)]
            turn += 1
            if done[i] < len(ids):
                step[str(i)] = ids[done[i] : done[i] + size]
                done[i] += len(step[str(i)])
        for name, logits in run.step(step).items():
            got[int(name)].append(logits)
    return [torch.cat(pieces) for pieces in got]


def test_kernels_are_as_near_to_float32_as_torch_and_a_program_computes_what_modules_do(
    checkpoint: Path,
) -> None:
    exact = PagedRun(load(checkpoint, torch.float32), torch.float32, "cpu")
    wanted = torch.cat(logits_of(exact))
    with without_cpp_kernels():
        model = load(checkpoint, torch.bfloat16)
        theirs = torch.cat(logits_of(PagedRun(model, torch.bfloat16, "cpu")))
    model = load(checkpoint, torch.bfloat16)
    backend = "native" if CppAttention.supports(model.kv_specs, 16, torch.bfloat16) else "cpu"
    run = PagedRun(model, torch.bfloat16, backend)
    texts = logits_of(run)
    ours = torch.cat(texts)
    spread = wanted.std()
    off = (ours - wanted).pow(2).mean().sqrt() / spread
    off_theirs = (theirs - wanted).pow(2).mean().sqrt() / spread
    print(checkpoint.name, backend, run.program is not None, float(off), float(off_theirs))
    assert off < 1.25 * off_theirs + 0.002
    assert (run.program is not None) == (backend == "native")
    if run.program is not None:
        eager = PagedRun(model, torch.bfloat16, backend, eager=True)
        assert torch.equal(ours, torch.cat(logits_of(eager)))
        alone = PagedRun(model, torch.bfloat16, backend)
        assert torch.equal(texts[ALONE], logits_of(alone, ALONE)[0])


@pytest.mark.parametrize("family", ["Llama 3", "Qwen 3, upper windows", "DeepSeek V3"])
def test_a_program_takes_many_tokens_at_once(family: str, tmp_path: Path) -> None:
    model = load(make_checkpoint(CASES[family], tmp_path), torch.bfloat16, LONG)
    ids = random_ids(LONG, 5)

    def of_steps(*ends: int, eager: bool = False) -> Tensor:
        """The long text's logits, in pieces with these ends, beside a text of few tokens."""
        run = PagedRun(model, torch.bfloat16, "native", eager=eager)
        assert (run.program is None) == eager
        pieces = [run.step({"short": ids[:3]} | {"long": ids[: ends[0]]})["long"]]
        for begin, end in itertools.pairwise(ends):
            pieces.append(
                run.step({"short": ids[begin : begin + 2], "long": ids[begin:end]})["long"]
            )
        return torch.cat(pieces)

    whole = of_steps(LONG)
    assert torch.equal(whole, of_steps(LONG, eager=True))
    assert torch.equal(whole, of_steps(5, LONG))
    assert torch.equal(whole, of_steps(131, 200, LONG))
