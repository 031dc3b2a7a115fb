"""Every built-in family against transformers' own implementation of it, in float32.

A case is a miniature configuration. transformers makes a model of it with random weights, which
is written as a checkpoint; what transformers then computes from that checkpoint is compared with

- the logits of our model, fed in chunks that divide blocks and windows oddly, then token by
  token, and mixed with other sequences in one batch, on both of the CPU's attention backends
  and shared out to two shards;
- the tokens of the whole engine under greedy sampling, with a budget smaller than the prompts,
  with prefix reuse, and with a pool so small that it preempts.

``python -m tests.parity.families`` prints the table of docs/models.md; names of cases may follow.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from tests.parity.cases import CASES, Case
from tests.tools.paged_run import PagedRun
from tests.tools.thread_shards import on_shards
from tests.unit.engine.test_core import Client
from tgi_cli.config import BLOCK_SIZE, ServeConfig
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown
from tgi_cli.models import load_model, read_config
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker

TOLERANCE = 1e-4
"""Of logits."""

SERVED = 192
"""Tokens that a sequence may have in all."""

CHUNK = 24
"""Tokens of a prefill step of the engine; windows are longer, prompts longer still."""

NUM_BLOCKS = 9
"""Of the engine's pool: its requests together want three times as many."""

NEW = 32
"""Tokens asked for per request."""

_BACKENDS = ("torch", "cpu")

_SHARPER = ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn", "W_pack")
"""Within the names of what makes queries and keys."""

_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Ends of names of buffers that correct the choice of experts."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a case came to."""

    max_logit_difference: float
    """Over every token of every sequence, both backends."""
    sharded_logit_difference: float
    """As above, on either of two shards."""
    logit_std: float
    """What the difference is to be seen beside."""
    compared: int
    """Greedy tokens."""
    identical: int
    preemptions: int
    distinct: int
    """Of the greedy tokens: a model that repeats itself would show little."""


def make_checkpoint(case: Case, path: Path, seed: int = 0) -> Path:
    """Write the random model of ``case`` into ``path`` as transformers does, and return it."""
    config = getattr(transformers, case.config)(**case.values)
    torch.manual_seed(seed)
    kind = _model_class(case)
    model = (kind if case.model else kind.from_config)(config).float()
    _randomize(model, case, seed)
    model.save_pretrained(path)
    file = path / "config.json"
    stored = json.loads(file.read_text()) | {"dtype": "float32"} | dict(case.stored)
    file.write_text(json.dumps({k: v for k, v in stored.items() if v is not ...}))
    return path


def _model_class(case: Case) -> Any:
    return getattr(transformers, case.model or "AutoModelForCausalLM")


def _randomize(model: torch.nn.Module, case: Case, seed: int) -> None:
    """Weights such that activations keep their size and attention is not uniform.

    The rows of the embedding are short beside what the layers add, so that a tied head does not
    simply repeat the last token; queries and keys are longer than a trained model would start
    with, so that some positions matter more than others. Norms are off what they start at, be
    it one or zero, and biases off zero.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.empty(parameter.shape).normal_(generator=generator)
        if id(parameter) in tables:
            value = noise * case.embedding_std
        elif parameter.ndim == 1:
            sharper = name.endswith(("q_norm.weight", "k_norm.weight"))
            value = parameter + (case.qk_norm - 1.0 if sharper else 0.0) + 0.2 * noise
            if name.endswith("router.scale"):  # else all experts were about as probable
                value *= len(value) ** 0.5
        else:
            transposed = type(model.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"
            gain = 2.0 if any(part in name for part in _SHARPER) else 1.0
            value = noise * gain / parameter.shape[0 if transposed else -1] ** 0.5
        with torch.no_grad():
            parameter.copy_(value)
    for name, buffer in model.named_buffers():
        if name.endswith(_CORRECTIONS):
            buffer.normal_(std=0.1, generator=generator)
        if name.endswith("layer_scalar"):
            buffer.add_(0.1 * torch.empty(buffer.shape).normal_(generator=generator))


class Oracle:
    """transformers' model of a checkpoint."""

    def __init__(self, path: Path, case: Case) -> None:
        self.model = (
            _model_class(case)
            .from_pretrained(path, dtype=torch.float32, attn_implementation=case.attention)
            .eval()
        )

    def logits(self, ids: list[int]) -> Tensor:
        """[n, vocab] of a text; the gated delta rule in its recurrent form."""
        with torch.inference_mode(), _recurrent(self.model):
            logits: Tensor = self.model(torch.tensor([ids])).logits[0]
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
    alone = [_mixed(path, sequences, backend) for backend in _BACKENDS]
    sharded = on_shards(2, lambda shard: _mixed(path, sequences, _BACKENDS[0], shard))
    prompts = _prompts(case)
    got, preemptions = _generate(path, prompts)
    wanted = [oracle.greedy(*pair) for pair in zip(prompts, got, strict=True)]
    pairs = list(zip(chain(*got), chain(*wanted), strict=True))
    return Result(
        max_logit_difference=max((got - logits).abs().max().item() for got in alone),
        sharded_logit_difference=max((got - logits).abs().max().item() for got in sharded),
        logit_std=logits.std().item(),
        compared=NEW * len(prompts),
        identical=sum(a == b for a, b in pairs),
        preemptions=preemptions,
        distinct=len(set(chain(*got))),
    )


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


def _prompts(case: Case) -> list[list[int]]:
    """Some share beginnings: shorter and longer than a block, a chunk and a window."""
    shared = random_ids(70, seed=9)
    return [
        shared[: max(length, case.shortest)] + random_ids(tail, seed=length + tail)
        for length, tail in ((0, 5), (16, 1), (20, 17), (70, 3), (70, 30), (33, 60))
    ]


def _generate(path: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The engine's continuations, and how often it preempted."""
    serve = ServeConfig(
        model_id="miniature",
        dtype="float32",
        max_total_tokens=SERVED,
        max_batch_prefill_tokens=CHUNK,
        max_batch_total_tokens=1024,
        max_batch_size=8,
    )
    worker, _ = load_worker(serve, path)
    capacity = worker.warmup()
    limits = SchedulerConfig(
        max_total_tokens=SERVED,
        max_batch_prefill_tokens=CHUNK,
        max_batch_size=8,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        window=capacity.kv_window,
        num_state_slots=capacity.num_state_slots,
    )
    with _running(EngineCore(worker, limits)) as client:
        for i, prompt in enumerate(prompts):
            client.core.inbox.put(
                GenerationRequest(
                    request_id=i,
                    prompt_ids=tuple(prompt),
                    sampling=SamplingParams(temperature=0.0),
                    max_new_tokens=NEW,
                )
            )
        client.read_until_finished(*range(len(prompts)))
        preemptions = client.core.metrics.load.preemptions
    return [client.tokens[i] for i in range(len(prompts))], preemptions


@contextmanager
def _running(core: EngineCore) -> Iterator[Client]:
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = Client(core)
    try:
        yield client
    finally:
        core.inbox.put(Shutdown())
        while client.read() is not None:
            pass
        thread.join(timeout=60)


def table(names: Iterable[str]) -> Iterator[str]:
    """The rows of the parity table, in Markdown."""
    yield (
        "| Model | Maximum difference of logits | On two shards "
        "| Greedy tokens compared | Identical |"
    )
    yield "|---|---|---|---|---|"
    for name in names:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            result = check(case, make_checkpoint(case, Path(folder)))
        yield (
            f"| {name} | {result.max_logit_difference:.1e} "
            f"| {result.sharded_logit_difference:.1e} | {result.compared} | {result.identical} |"
        )


def main() -> None:
    for row in table(sys.argv[1:] or CASES):
        print(row, flush=True)


if __name__ == "__main__":
    main()
