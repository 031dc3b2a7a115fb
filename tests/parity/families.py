"""Every built-in family against transformers' own implementation of it, in float32.

A case is a miniature configuration. transformers makes a model of it with random weights, which
is written as a checkpoint; what transformers then computes from that checkpoint is compared with

- the logits of our model, fed in chunks that divide blocks and windows oddly, then token by
  token, and mixed with other sequences in one batch: in one piece on one of the CPU's attention
  backends, and shared out to two shards on the other;
- the tokens of the whole engine under greedy sampling (:mod:`tests.parity.engine_run`), on one
  shard and on two.

``python -m tests.parity.families`` prints the table of docs/models.md; names of cases may follow.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from tests.parity.cases import CASES, Case
from tests.parity.checkpoints import make_checkpoint, model_class
from tests.parity.engine_run import (
    NEW,
    NEW_IN_TURN,
    NEW_ON_SHARDS,
    ON_SHARDS,
    SAMPLED,
    SERVED,
    EngineRun,
    run_engine,
)
from tests.parity.generic_cases import ENGINE_CASES
from tests.tools.paged_run import PagedRun
from tests.tools.thread_shards import on_shards
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import load_model, read_config

TOLERANCE = 1e-4
"""Of logits."""

_ALONE, _SHARDED = "cpu", "torch"
"""Attention backends; on both where there are no shards."""

_NOT_SHARED = "no plan of tensor parallelism|cannot be shared out|inputs for a layer that has"
"""Within errors of models that transformers has no plan for, or none that fits."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a case came to."""

    max_logit_difference: float
    """Over every token of every sequence."""
    sharded_logit_difference: float | None
    """As above, on either of two shards; None where transformers has no plan to share it out."""
    logit_std: float
    """What the difference is to be seen beside."""
    compared: int
    """Greedy tokens, those of a second turn included."""
    identical: int
    samples: int
    """Tokens of further samples of a prompt."""
    identical_samples: int
    """Those that the first sample has, too."""
    sharded_run: bool | None
    """Whether two shards generate all the same."""
    preemptions: int
    reused: int
    """Tokens of a second turn that were not computed again."""
    distinct: int
    """Of the greedy tokens: a model that repeats itself would show little."""


# transformers 5.24's Llama 4 reads it from its decoder's output.
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None


class Oracle:
    """transformers' model of a checkpoint."""

    def __init__(self, path: Path, case: Case) -> None:
        self.model = (
            model_class(case)
            .from_pretrained(path, dtype=torch.float32, attn_implementation=case.attention)
            .eval()
        )

    def logits(self, ids: list[int], **inputs: Any) -> Tensor:
        """[n, vocab] of a text; the gated delta rule in its recurrent form."""
        with torch.inference_mode(), _recurrent(self.model):
            logits: Tensor = self.model(torch.tensor([ids]), **inputs).logits[0]
            return logits

    def greedy(self, prompt: list[int], continuation: list[int]) -> list[int]:
        """The likeliest token at each place of a continuation of a prompt, from one pass over both.

        It equals ``continuation`` exactly if that is what greedy sampling generates: the first
        token that is not the likeliest one differs.
        """
        logits = self.logits(prompt + continuation)
        chosen: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        return chosen


@contextmanager
def _recurrent(model: torch.nn.Module) -> Iterator[None]:
    """Let transformers compute the gated delta rule token by token.

    Its other form adds up the logarithms of the decays of 64 tokens in float32. Of the miniatures'
    decays that makes sums of 1,000, and differences between logits of up to 4e-4.
    """
    modules = {sys.modules[type(each).__module__] for each in model.modules()}
    chunked, recurrent = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, chunked):
                rule = inspect.unwrap(getattr(module, recurrent))
                stack.enter_context(mock.patch.object(module, chunked, rule))
        yield


def check(case: Case, path: Path) -> Result:
    """Compare our model of the checkpoint that ``make_checkpoint`` wrote with transformers'."""
    oracle = Oracle(path, case)
    lengths = enumerate((1, 16, 150, 97, 33))
    sequences = [random_ids(max(length, case.shortest), seed) for seed, length in lengths]
    logits = torch.cat([oracle.logits(ids) for ids in sequences])
    prompts = prompts_of(case)
    run = run_engine(path, prompts)
    asked, got = [*prompts, run.turn], [*run.answers, run.turn_answer]
    wanted = [oracle.greedy(*pair) for pair in zip(asked, got, strict=True)]
    firsts = [run.answers[i] for i in SAMPLED for _ in range(2)]
    sharded, sharded_run = _on_two_shards(path, sequences, [prompts[i] for i in ON_SHARDS])
    backends = (_ALONE,) if sharded else (_ALONE, _SHARDED)
    alone = [_mixed(path, sequences, backend) for backend in backends]
    return Result(
        max_logit_difference=max((each - logits).abs().max().item() for each in alone),
        sharded_logit_difference=max(
            ((each - logits).abs().max().item() for each in sharded), default=None
        ),
        logit_std=logits.std().item(),
        compared=NEW * len(prompts) + NEW_IN_TURN,
        identical=_equal(got, wanted),
        samples=NEW * len(firsts),
        identical_samples=_equal(run.samples, firsts),
        sharded_run=None if sharded_run is None else _agrees(sharded_run, run, oracle),
        preemptions=run.preemptions,
        reused=run.reused,
        distinct=len(set(chain(*got))),
    )


def _on_two_shards(
    path: Path, sequences: list[list[int]], prompts: list[list[int]]
) -> tuple[list[Tensor], EngineRun | None]:
    """Logits of each shard, and their engine; nothing where transformers cannot share it out."""
    try:
        sharded = on_shards(2, lambda shard: _mixed(path, sequences, _SHARDED, shard))
    except UnsupportedModelError as error:
        if not re.search(_NOT_SHARED, str(error)):
            raise
        return [], None
    return sharded, run_engine(path, prompts, (0, 2), num_shard=2)


def _agrees(sharded: EngineRun, run: EngineRun, oracle: Oracle) -> bool:
    """Whether shards, given some of the prompts, generate what one process does."""
    firsts = [run.answers[i][:NEW_ON_SHARDS] for i in ON_SHARDS]
    return (
        sharded.answers == firsts
        and sharded.samples == [firsts[i] for i in (0, 2) for _ in range(2)]
        and sharded.turn_answer == oracle.greedy(sharded.turn, sharded.turn_answer)
    )


def _equal(some: list[list[int]], others: list[list[int]]) -> int:
    """How many tokens of answers are the same."""
    return sum(a == b for a, b in zip(chain(*some), chain(*others), strict=True))


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids of the cases' vocabulary, none of them special."""
    return random.Random(seed).choices(range(5, 250), k=count)


def _mixed(path: Path, sequences: list[list[int]], backend: str, shard: Shard = ALONE) -> Tensor:
    """Our logits of texts that are fed together, in pieces; the last of each token by token."""
    model = load_model(
        read_config(path),
        torch.float32,
        torch.device("cpu"),
        shard=shard,
        max_positions=SERVED,
    )
    run = PagedRun(model, torch.float32, backend)
    choose = random.Random(5)
    done = [0] * len(sequences)
    got: list[list[Tensor]] = [[] for _ in sequences]
    while any(n < len(ids) for n, ids in zip(done, sequences, strict=True)):
        step = {}
        for i, ids in enumerate(sequences):
            if done[i] < len(ids) and choose.random() < 0.8:
                ending = len(ids) - done[i] <= 6
                size = 1 if ending else choose.choice((1, 1, 7, 30, 61))
                step[str(i)] = ids[done[i] : done[i] + size]
                done[i] += len(step[str(i)])
        for name, logits in run.step(step).items() if step else ():
            got[int(name)].append(logits)
    return torch.cat([logits for pieces in got for logits in pieces])


def prompts_of(case: Case) -> list[list[int]]:
    """Some share beginnings: shorter and longer than a block, a chunk and a window."""
    shared = random_ids(70, seed=9)
    return [
        shared[: max(length, case.shortest)] + random_ids(tail, seed=length + tail)
        for length, tail in ((0, 5), (16, 1), (20, 17), (70, 3), (70, 30), (33, 60))
    ]


def table(names: Iterable[str]) -> Iterator[str]:
    """The rows of the parity table, in Markdown."""
    yield (
        "| Model | Maximum difference of logits | On two shards | Greedy tokens compared "
        "| Identical | Further samples (n=3), identical | Engine on two shards |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        case = (CASES | ENGINE_CASES)[name]
        with tempfile.TemporaryDirectory() as folder:
            result = check(case, make_checkpoint(case, Path(folder)))
        sharded = result.sharded_logit_difference
        yield (
            f"| {name} | {result.max_logit_difference:.1e} "
            f"| {'refused' if sharded is None else format(sharded, '.1e')} "
            f"| {result.compared} | {result.identical} "
            f"| {result.identical_samples} of {result.samples} "
            f"| {_SAID[result.sharded_run]} |"
        )


_SAID = {None: "refused", True: "identical", False: "different"}


def main() -> None:
    for row in table(sys.argv[1:] or (*CASES, *ENGINE_CASES)):
        print(row, flush=True)


if __name__ == "__main__":
    main()
