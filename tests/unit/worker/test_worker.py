"""A real, tiny Llama on the CPU, from its folder to tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tools.checkpoints import make_llama
from tests.unit.worker.fakes import GREEDY, new_row, run, step_of
from tgi_cli import demo
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import BlockAppend
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.sizing import kv_cache
from tgi_cli.worker.worker import ModelWorker

SAID: dict[str, Any] = {"dtype": "float32", "max_batch_prefill_tokens": 64, "max_batch_size": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("worker") / "llama", seed=1)


def load(checkpoint: Path, **said: Any) -> ModelWorker:
    return load_worker(ServeConfig(model_id="tiny", **{**SAID, **said}), checkpoint)[0]


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> ModelWorker:
    worker = load(checkpoint)
    worker.warmup()
    return worker


@pytest.mark.parametrize("off", [False, True])
def test_info_reports_whether_requests_may_have_grammars(tmp_path, worker, off):
    """They may where the tokenizer is there and nobody has said no."""
    assert not worker.info().grammar
    path = make_llama(tmp_path / "llama", vocab_size=4096, tokenizer=demo.model_path())
    said = load(path, disable_grammar_support=off)
    said.warmup()
    assert said.info().grammar is not off
    assert (said.grammars is None) is off
    said.close()


def test_info_reports_the_model_and_its_limits(checkpoint):
    seen: list[tuple[int, int]] = []
    serve = ServeConfig(model_id="tiny", revision="r1", **SAID)
    worker, config = load_worker(serve, checkpoint, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(RuntimeError, match="warm-up"):
        worker.info()
    capacity = worker.warmup()
    info = worker.info()
    assert capacity.config == config
    assert capacity.num_blocks == int(4 * 32 * 1.25)
    assert info.max_batch_total_tokens == capacity.max_batch_total_tokens == 160 * 16
    assert capacity.cache_bytes == 160 * 16 * 2 * 3 * 2 * 16 * 4
    assert capacity.weight_bytes > 0
    assert capacity.activation_bytes >= 0
    assert (info.model_id, info.revision, info.model_type) == ("tiny", "r1", "llama")
    assert (info.dtype, info.device, info.vocab_size) == ("float32", "cpu", 256)
    assert (info.max_input_tokens, info.max_total_tokens) == (511, 512)
    assert (info.max_batch_size, info.block_size, info.eos_token_ids) == (4, 16, (2,))


def test_chunked_prefill_and_decode_give_the_tokens_of_transformers(worker, checkpoint):
    """Two sequences in scattered blocks; one is computed in chunks while the other decodes."""
    generator = torch.Generator().manual_seed(0)
    long, short = (
        torch.randint(3, 256, (length,), generator=generator).tolist() for length in (75, 16)
    )
    expected_long = transformers_greedy(checkpoint, long, 12)
    expected_short = transformers_greedy(checkpoint, short, 20)
    blocks = [40, 7, 33, 2, 19, 58]
    new = [new_row(1, short, [11]), new_row(3, long, blocks[:5])]
    got_long: list[int] = []
    got_short = run(worker, step_of((1, 0, 16, True), (3, 0, 31, False), new=new)).token_ids
    result = run(
        worker,
        step_of((1, 16, 1, True), (3, 31, 33, False), appended=[BlockAppend(1, 1, [9])]),
    )
    got_short += result.token_ids
    at_short, at_long = 17, 64
    while len(got_short) < 20 or len(got_long) < 12:
        entries, appended = [], []
        if len(got_short) < 20:
            entries.append((1, at_short, 1, True))
            if at_short == 32:
                appended.append(BlockAppend(1, 2, [50]))
            at_short += 1
        if len(got_long) < 12:
            count = 11 if at_long == 64 else 1
            if at_long == 80:
                appended.append(BlockAppend(3, 5, blocks[5:]))
            entries.append((3, at_long, count, True))
            at_long += count
        result = run(worker, step_of(*entries, appended=appended))
        answers = dict(zip((row for row, *_ in entries), result.token_ids, strict=True))
        got_short += [answers[1]] if 1 in answers else []
        got_long += [answers[3]] if 3 in answers else []
    assert got_short == expected_short
    assert got_long == expected_long


def test_logprobs_are_those_of_transformers(worker, checkpoint):
    prompt = [5, 9, 200, 31]
    wanted = SamplingParams(temperature=0.0, repetition_penalty=1.3, top_logprobs=4)
    result = run(worker, step_of((0, 0, 4, True), new=[new_row(0, prompt, [3], wanted)]))
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    top = expected.topk(4)
    assert result.top_ids == [top.indices.tolist()]
    torch.testing.assert_close(torch.tensor(result.top_logprobs[0]), top.values)
    chosen = expected[result.token_ids[0]]
    torch.testing.assert_close(torch.tensor(result.logprobs[0]), chosen)


def transformers_greedy(checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.tgi_pain(8)
def test_a_context_that_memory_cannot_hold_is_lowered(checkpoint, monkeypatch):
    worker = load(checkpoint)
    block_bytes = worker.attention.block_bytes
    monkeypatch.setattr(kv_cache, "cache_budget", lambda *_: 10 * block_bytes)
    capacity = worker.warmup()
    assert capacity.num_blocks == 10
    info = worker.info()
    assert (info.max_total_tokens, info.max_input_tokens) == (160, 159)
    assert info.max_batch_total_tokens == 160
    tokens = list(range(100, 120))
    result = run(worker, step_of((0, 0, 20, True), new=[new_row(0, tokens, [8, 9], GREEDY)]))
    assert result.token_ids == transformers_greedy(checkpoint, tokens, 1)


@pytest.mark.parametrize("promise", ["max_total_tokens", "max_batch_total_tokens"])
def test_an_explicit_limit_that_does_not_fit_is_an_error(checkpoint, monkeypatch, promise):
    worker = load(checkpoint, **{promise: 512})
    block_bytes = worker.attention.block_bytes
    monkeypatch.setattr(kv_cache, "cache_budget", lambda *_: 10 * block_bytes)
    with pytest.raises(OutOfMemoryError, match="KV cache") as caught:
        worker.warmup()
    assert "160 tokens" in caught.value.remedy


@pytest.mark.tgi_pain(2, 9)
def test_the_cache_is_sized_after_the_steps_activations(checkpoint, monkeypatch):
    """What a step takes is not given to the cache, and what the small cache held is."""
    worker = load(checkpoint)
    asked: list[tuple[int, int, int]] = []

    def budget(config: Any, available: int, activations: int, total: int) -> int:
        asked.append((available, activations, total))
        return 1 << 30

    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 1000)
    monkeypatch.setattr(kv_cache, "cache_budget", budget)
    monkeypatch.setattr(kv_cache.PeakMeter, "read", lambda self: 77)
    assert worker.warmup().activation_bytes == 4 * 77, "a CPU runs a quarter"
    [(available, activations, total)] = asked
    assert available == 1000 + 64 * worker.attention.block_bytes
    assert activations == 4 * 77
    assert total > 1 << 28
