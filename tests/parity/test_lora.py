"""Many adapters in one batch answer as models do that each adapter was merged into.

The oracle is transformers with the adapter's product added to the weights. One engine with two
slots gets requests for the base and three adapters, of different ranks, together.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.parity.cases import DELTA, DELTA_SHARED, LATENT, MAMBA, SMALL, Case
from tests.parity.families import make_checkpoint
from tests.parity.test_engine_greedy import engine, random_prompt
from tests.tools.checkpoints import make_llama
from tests.tools.lora_adapters import make_adapter
from tests.tools.paged_run import PagedRun, random_ids
from tests.tools.thread_shards import on_shards
from tests.unit.engine.test_core import Client
from tgi_cli.config import ServeConfig
from tgi_cli.device.distributed import Shard
from tgi_cli.engine.config import Batching
from tgi_cli.engine.messages import (
    AdapterAnswer,
    Cancel,
    FinishReason,
    GenerationRequest,
    LoadAdapter,
    UnloadAdapter,
)
from tgi_cli.engine.step import Step
from tgi_cli.hub.merge_lora import merge
from tgi_cli.layers.lora import LoraTable
from tgi_cli.models import load_model, read_config
from tgi_cli.models.lora import lora_targets, read_adapter
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker

CPU = torch.device("cpu")
SLOTS, RANK = 2, 8
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 4, "alpha": 8.0},
    {"rank": 8, "alpha": 5.0, "use_rslora": True, "modules": ("q_proj", "v_proj")},
    {"rank": 3, "alpha": 3.0, "rank_pattern": {"down_proj": 7}, "alpha_pattern": {"k_proj": 9}},
]

Oracle = Callable[[int, list[int], int], list[int]]


class Models:
    """A base and its adapters 1, 2, ...: their folders, and what transformers says of each."""

    def __init__(self, base: Path, adapters: list[Path], merged: Path) -> None:
        self.base, self.adapters = base, adapters
        self._models = [self._load(base)]
        for index, adapter in enumerate(adapters):
            target = merged / str(index)
            target.mkdir(parents=True)
            merge(adapter, base, target)
            self._models.append(self._load(target))
        self._answers: dict[tuple[int, tuple[int, ...], int], list[int]] = {}

    @staticmethod
    def _load(path: Path) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()

    def logits(self, adapter_id: int, ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._models[adapter_id](torch.tensor([ids])).logits[0]
            return logits

    def greedy(self, adapter_id: int, prompt: list[int], new: int) -> list[int]:
        key = (adapter_id, tuple(prompt), new)
        if key not in self._answers:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = self._models[adapter_id].generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._answers[key] = out[0, len(prompt) :].tolist()
        return self._answers[key]


def make_worker(base: Path) -> ModelWorker:
    serve = ServeConfig(
        model_id="m",
        dtype="float32",
        max_total_tokens=192,
        max_batch_prefill_tokens=24,
        max_batch_total_tokens=4096,
        max_batch_size=8,
        max_loras=SLOTS,
        max_lora_rank=RANK,
    )
    worker, config = load_worker(serve, base)
    assert (config.max_loras, config.max_lora_rank) == (SLOTS, RANK)
    assert isinstance(worker, ModelWorker)
    worker.warmup()
    return worker


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("lora")
    base = make_llama(root / "base", seed=3, max_position_embeddings=256, num_hidden_layers=2)
    adapters = [
        make_adapter(base, root / f"adapter{seed}", seed=seed, **wishes)
        for seed, wishes in enumerate(ADAPTERS)
    ]
    return Models(base, adapters, root / "merged")


@pytest.fixture(scope="module")
def worker(models: Models) -> ModelWorker:
    return make_worker(models.base)


def with_adapters(
    worker: ModelWorker, models: Models, **changes: Any
) -> AbstractContextManager[Client]:
    return engine(worker, **({"max_loras": SLOTS} | changes))


def load_all(client: Client, models: Models) -> None:
    for index, adapter in enumerate(models.adapters):
        client.core.inbox.put(LoadAdapter(index + 1, adapter.name, str(adapter)))
    answers: list[AdapterAnswer] = []
    while len(answers) < len(models.adapters):
        outputs = client.read()
        assert outputs is not None
        answers += outputs.adapters
    assert not any(answer.error for answer in answers), answers


def greedy(request_id: int, adapter_id: int, prompt: list[int], new: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=new,
        adapter_id=adapter_id,
    )


SWITCHES: list[dict[str, Any]] = [
    {},
    {"prefix_caching": False, "max_batch_prefill_tokens": 7},
    {"num_blocks": 14},
    {"num_blocks": 14, "depth": 1, "max_cpu_loras": 1},
    {"max_loras": 1, "max_cpu_loras": 2},
    {"batching": Batching.INFLIGHT, "max_batch_prefill_tokens": 192},
]


TOGETHER = 8
"""Requests of a first step: four of them, for the base, are more than 14 blocks hold."""


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: ",".join(map(str, s.values())) or "-")
def test_mixed_batches_generate_what_merged_models_do(
    worker: ModelWorker,
    models: Models,
    switches: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random_ = random.Random(7)
    shared = random_prompt(random_, 60)
    requests: dict[int, tuple[int, list[int], int]] = {}
    for i in range(28):
        prompt = shared[: random_.choice([0, 16, 33, 60])]
        prompt = prompt + random_prompt(random.Random(i % 5), random_.choice([1, 15, 40]))
        adapter_id, new = random_.randrange(4), random_.choice([1, 4, 12, 60])
        if i < TOGETHER:
            adapter_id, new = i % 2, 60
        requests[i] = adapter_id, prompt, new
    launch, may_begin = worker.launch, threading.Event()

    def begin(step: Step) -> object:
        assert may_begin.wait(60)
        return launch(step)

    monkeypatch.setattr(worker, "launch", begin)
    with with_adapters(worker, models, **switches) as client:
        load_all(client, models)
        for i in range(TOGETHER):
            client.core.inbox.put(greedy(i, *requests[i]))
        may_begin.set()
        while "num_blocks" in switches and not client.core.metrics.load.preemptions:
            client.read()
        for i in range(TOGETHER, 28):
            client.core.inbox.put(greedy(i, *requests[i]))
            if random_.random() < 0.15:
                client.core.inbox.put(Cancel(random_.randrange(i + 1)))
            for _ in range(random_.choice([0, 0, 1, 3])):
                if client.core.live_requests:
                    client.read()
        client.read_until_finished(*requests)
        assert (client.core.metrics.load.preemptions > 0) == ("num_blocks" in switches)
    differing = 0
    for i, request in requests.items():
        told = client.tokens.get(i, [])
        if client.finished[i][0] is FinishReason.CANCELLED:
            assert told == models.greedy(*request)[: len(told)]
        else:
            assert told == models.greedy(*request)
        differing += bool(request[0]) and told != models.greedy(0, *request[1:])[: len(told)]
    assert differing > 8, "the adapters do change the answers"


def test_the_base_model_generates_the_same_beside_adapters(
    worker: ModelWorker, models: Models
) -> None:
    """To the last bit of the log-probabilities."""
    prompt = random_prompt(random.Random(5), 30)

    def logprobs(*companions: int) -> list[float]:
        found: list[float] = []
        with with_adapters(worker, models, prefix_caching=False) as client:
            load_all(client, models)
            client.core.inbox.put(greedy(0, 0, prompt, 20))
            for i, adapter_id in enumerate(companions):
                client.core.inbox.put(greedy(i + 1, adapter_id, prompt[i:], 20))
            while 0 not in client.finished:
                outputs = client.read()
                assert outputs is not None
                ids = zip(outputs.request_ids, outputs.logprobs, strict=True)
                found += [value for request_id, value in ids if request_id == 0]
        return found

    assert logprobs(1, 2, 1) == logprobs(0, 0, 0)


def test_a_name_that_is_loaded_again_forgets_the_old_weights(
    worker: ModelWorker, models: Models
) -> None:
    prompt = random_prompt(random.Random(1), 50)
    with with_adapters(worker, models) as client:
        core = client.core
        for adapter_id, folder in ((1, models.adapters[0]), (2, models.adapters[1])):
            core.inbox.put(LoadAdapter(adapter_id, "one", str(folder)))
            core.inbox.put(greedy(adapter_id, adapter_id, prompt, 8))
            client.read_until_finished(adapter_id)
            core.inbox.put(UnloadAdapter(adapter_id))
    assert client.tokens[1] == models.greedy(1, prompt, 8)
    assert client.tokens[2] == models.greedy(2, prompt, 8)


GPT2 = {"vocab_size": 256, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}
FAMILIES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "packed, transposed": (Case("GPT2Config", GPT2), ("c_attn", "c_proj", "c_fc")),
    "interleaved heads": (
        Case("GPTNeoXConfig", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "packed in groups": (
        Case("Phi3Config", SMALL),
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "convolutions": (
        Case("Lfm2Config", SMALL | {"full_attn_idxs": [1]}),
        ("q_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    ),
    "a state space model": (
        Case(
            "GraniteMoeHybridConfig",
            SMALL
            | MAMBA
            | {
                "layer_types": ["mamba", "attention", "mamba"],
                "num_local_experts": 0,
                "shared_intermediate_size": 40,
            },
        ),
        ("k_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
    ),
    "linear attention, packed by heads": (
        Case("Qwen3NextConfig", DELTA | DELTA_SHARED),
        ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "o_proj"),
    ),
    "linear attention": (
        Case("Qwen3_5TextConfig", DELTA),
        ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "up_proj"),
    ),
    "latent attention, pairs of neighbours": (
        Case("DeepseekV3Config", LATENT | {"n_routed_experts": 4, "first_k_dense_replace": 3}),
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj"),
    ),
    "through transformers' own code": (
        Case("PhiConfig", SMALL),
        ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_other_families(name: str, tmp_path: Path) -> None:
    case, modules = FAMILIES[name]
    base = make_checkpoint(case, tmp_path / "base")
    adapters = [
        make_adapter(
            base,
            tmp_path / f"adapter{seed}",
            modules=modules,
            seed=seed,
            rank=3 + seed,
            transposed=case.config == "GPT2Config",
        )
        for seed in range(2)
    ]
    models = Models(base, adapters, tmp_path / "merged")
    prompts = [random_prompt(random.Random(i), 10 + 17 * i) for i in range(3)]
    with with_adapters(make_worker(base), models) as client:
        load_all(client, models)
        for adapter_id, prompt in enumerate(prompts):
            client.core.inbox.put(greedy(adapter_id, adapter_id, prompt, 24))
        client.read_until_finished(0, 1, 2)
    for adapter_id, prompt in enumerate(prompts):
        assert client.tokens[adapter_id] == models.greedy(adapter_id, prompt, 24)
        if adapter_id:
            assert client.tokens[adapter_id] != models.greedy(0, prompt, 24)


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 4), (4, 2)])
def test_shards_share_out_an_adapter(size: int, kv_heads: int, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", num_key_value_heads=kv_heads, num_hidden_layers=2)
    models = Models(base, [make_adapter(base, tmp_path / "one")], tmp_path / "merged")
    ids = random_ids(40, seed=1)

    def work(shard: Shard) -> list[Tensor]:
        table = LoraTable(SLOTS, RANK, 64)
        model = load_model(read_config(base), torch.float32, CPU, shard=shard, lora=table)
        table.allocate(torch.float32, CPU)
        table.put(1, read_adapter(models.adapters[0], lora_targets(model), table, pin=False))
        run = PagedRun(model, torch.float32, "torch")
        slots = torch.tensor([-1] * 39 + [1] * 40, dtype=torch.int32)
        table.plan([-1, 1], slots)
        outputs = run.step({"base": ids[1:], "adapted": ids})
        return [outputs["base"], outputs["adapted"]]

    for base_logits, adapted in on_shards(size, work):
        torch.testing.assert_close(base_logits, models.logits(0, ids[1:]), atol=1e-4, rtol=0)
        torch.testing.assert_close(adapted, models.logits(1, ids), atol=1e-4, rtol=0)
