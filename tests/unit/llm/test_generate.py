"""Lists of prompts in, completions out: what callers of ``LLM.generate`` rely on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.llm.conftest import Statistics
from tgi_cli import LLM, Completion, EngineDeadError, GenerationError, SamplingParams
from tgi_cli.errors import ConfigError, ModelNotFoundError
from tgi_cli.llm.options import GenerationKeywords, GenerationOptions

PROMPTS = ["def read_json(path):", "The function returns", "Grüße aus Köln: 🤗", "import os"]


def test_prompts_of_any_form_are_answered_in_order(llm: LLM) -> None:
    together = llm.generate(PROMPTS, max_new_tokens=8)
    assert [c.prompt for c in together] == PROMPTS
    assert [c.prompt_index for c in together] == [0, 1, 2, 3]
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [c.prompt_ids for c in together] == ids
    as_ids = llm.generate(ids, max_new_tokens=8)
    assert [c.prompt for c in as_ids] == [None] * 4
    anything: list[Any] = [PROMPTS[0], ids[1], np.array(ids[2]), tuple(ids[3])]
    mixed = llm.generate(anything, max_new_tokens=8)
    alone = [llm.generate(prompt, max_new_tokens=8)[0] for prompt in (*anything[:2], *ids[2:])]
    for other in (as_ids, mixed, alone):
        assert [c.token_ids for c in other] == [c.token_ids for c in together]
        assert [c.text for c in other] == [c.text for c in together]
    for completion in together:
        assert len(completion.token_ids) == len(completion.logprobs) == 8
        assert completion.finish_reason == "length"
        whole = llm.tokenizer.decode(completion.prompt_ids + completion.token_ids)
        assert whole == llm.tokenizer.decode(completion.prompt_ids) + completion.text
        assert 0 <= completion.queue_seconds <= completion.total_seconds
        assert completion.first_token_seconds is not None
        assert 0 < completion.first_token_seconds <= completion.total_seconds
    assert llm.generate([]) == []


def test_sampling_parameters_one_for_all_or_one_each(llm: LLM) -> None:
    seeds = [SamplingParams(seed=seed) for seed in range(len(PROMPTS))]
    each = llm.generate(PROMPTS, seeds, max_new_tokens=8)
    for prompt, params, completion in zip(PROMPTS, seeds, each, strict=True):
        assert llm.generate(prompt, params, max_new_tokens=8)[0].token_ids == completion.token_ids
    same = llm.generate(PROMPTS, seeds[0], max_new_tokens=8)
    assert same[0].token_ids == each[0].token_ids
    assert same[1].token_ids != each[1].token_ids


def test_a_seed_gives_the_same_text_alone_and_among_32_others(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=500, seed=1234)
    prompt = "def write_rows(table, path):"
    alone = llm.generate(prompt, params, max_new_tokens=24)[0]
    others = [f"number {i}: " + "word " * i for i in range(32)]
    crowd = llm.generate(
        [*others[:16], prompt, *others[16:]],
        [SamplingParams(seed=i) for i in range(16)] + [params] + [SamplingParams()] * 16,
        max_new_tokens=24,
    )
    assert crowd[16].text == alone.text
    assert crowd[16].token_ids == alone.token_ids


def test_samples_of_a_prompt(llm: LLM, stats: Statistics) -> None:
    params = SamplingParams(seed=7)
    prompt = "Some text that is longer than a block of sixteen tokens, so that there is a prefix. "
    size = len(llm.tokenizer.encode(prompt))
    assert size > 20
    before = len(stats)
    samples = llm.generate([prompt, "Other"], params, n=4, max_new_tokens=30)
    computed = sum(step["Total Context Tokens"] for step in stats[before:])
    others = len(llm.tokenizer.encode("Other"))
    assert computed <= size + others + 2 * 3, "a prompt is computed once for all its samples"
    assert [(c.prompt_index, c.index) for c in samples] == [
        (p, i) for p in (0, 1) for i in range(4)
    ]
    assert len({tuple(c.token_ids) for c in samples[:4]}) == 4
    assert len({c.request_id for c in samples}) == 8
    first = llm.generate(prompt, params, max_new_tokens=30)[0]
    assert first.token_ids == samples[0].token_ids, "the first has the seed that was given"


def test_best_of_ranks_by_mean_logprob(llm: LLM) -> None:
    params = SamplingParams(seed=3)
    every = llm.generate(PROMPTS[:2], params, n=5, max_new_tokens=6)
    best = llm.generate(PROMPTS[:2], params, n=2, best_of=5, max_new_tokens=6)
    for prompt in (0, 1):
        ranked = sorted(every[5 * prompt : 5 * prompt + 5], key=lambda c: -c.mean_logprob)
        given = best[2 * prompt : 2 * prompt + 2]
        assert [c.token_ids for c in given] == [c.token_ids for c in ranked[:2]]
        assert [c.index for c in given] == [0, 1]
    one = best[0]
    assert one.mean_logprob == pytest.approx(sum(one.logprobs) / len(one.logprobs))


def test_stop_strings_and_stop_ids_end_a_text(llm: LLM, stats: Statistics) -> None:
    (whole,) = llm.generate(PROMPTS[0], max_new_tokens=32)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 4]
    before = len(stats)
    (cut,) = llm.generate(PROMPTS[0], max_new_tokens=100, stop=["never seen", stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop_sequence", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(stats) - before < 100, "the request is cancelled in the engine"
    (as_text,) = llm.generate(PROMPTS[0], max_new_tokens=32, stop=stop)
    assert as_text.text == cut.text
    end = whole.token_ids[10]
    (ended,) = llm.generate(PROMPTS[0], max_new_tokens=32, stop_token_ids=[end])
    assert ended.finish_reason == "eos_token"
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]


def test_ignore_eos_keeps_the_callers_stop_ids(llm: LLM) -> None:
    eos = llm.info.eos_token_ids[0]
    sure = SamplingParams(temperature=0.0, logit_bias=((eos, 100.0),))
    assert llm.generate("x", sure, max_new_tokens=5)[0].token_ids == [eos]
    through = llm.generate("x", sure, max_new_tokens=5, ignore_eos=True)[0]
    assert through.token_ids == [eos] * 5
    assert through.text == "", "special tokens add nothing"
    own = llm.generate("x", sure, max_new_tokens=5, ignore_eos=True, stop_token_ids=[eos])[0]
    assert own.token_ids == [eos]


def test_as_many_tokens_as_fit(llm: LLM) -> None:
    (completion,) = llm.generate([[5] * 100], max_new_tokens=None, ignore_eos=True)
    assert len(completion.token_ids) == llm.info.max_total_tokens - 100


def test_top_logprobs_and_prompt_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, top_logprobs=3)
    samples = llm.generate([5, 6, 7] * 30, params, n=2, max_new_tokens=4, prompt_logprobs=2)
    for completion in samples:
        assert len(completion.prompt_ids) == 90
        for token, logprob, top in zip(
            completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True
        ):
            assert len(top) == 3
            assert next(iter(top)) == token
            assert top[token] == pytest.approx(logprob)
        assert completion.prompt_logprobs is not None
        assert len(completion.prompt_logprobs) == len(completion.prompt_top_logprobs) == 89
        assert all(len(top) == 2 for top in completion.prompt_top_logprobs)
    assert samples[0].prompt_logprobs == samples[1].prompt_logprobs
    plain = llm.generate("x")[0]
    assert plain.prompt_logprobs is None
    assert plain.prompt_top_logprobs == plain.top_logprobs == []


def test_logits_agree_with_logprobs(llm: LLM) -> None:
    prompt = [9, 8, 7] * 25
    (completion,) = llm.generate(
        prompt,
        max_new_tokens=5,
        prompt_logprobs=0,
        return_context_logits=True,
        return_generation_logits=True,
    )
    context, generation = completion.context_logits, completion.generation_logits
    assert context is not None
    assert generation is not None
    assert context.shape == (75, llm.info.vocab_size)
    assert generation.shape == (5, llm.info.vocab_size)
    assert context.dtype == generation.dtype == np.float32
    assert np.array_equal(context[-1], generation[0])
    scores = torch.log_softmax(torch.from_numpy(context[:-1]), -1)[range(74), prompt[1:]]
    assert completion.prompt_logprobs == pytest.approx(scores.tolist(), abs=1e-4)
    chosen = torch.log_softmax(torch.from_numpy(generation), -1)[range(5), completion.token_ids]
    assert completion.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
    assert llm.generate("x")[0].context_logits is None


def test_logits_processors_see_the_tokens_and_decide(llm: LLM) -> None:
    seen: list[tuple[int, int | None, list[int]]] = []

    def only_42(
        request_id: int, logits: torch.Tensor, token_ids: Sequence[int], client_id: int | None
    ) -> torch.Tensor:
        seen.append((request_id, client_id, list(token_ids)))
        forced = torch.full_like(logits, -math.inf)
        forced[42] = 0.0
        return forced

    (completion,) = llm.generate([5, 6], max_new_tokens=3, logits_processors=[only_42], client_id=9)
    assert completion.token_ids == [42, 42, 42]
    (raw,) = llm.generate(
        [5, 6], max_new_tokens=3, logits_processors=[only_42], return_generation_logits=True
    )
    assert raw.generation_logits is not None
    assert np.isfinite(raw.generation_logits).all(), "what the model said, before they ran"
    del seen[3:]
    one = completion.request_id
    assert seen == [(one, 9, [5, 6]), (one, 9, [5, 6, 42]), (one, 9, [5, 6, 42, 42])]


def test_a_failing_request_does_not_affect_others(llm: LLM) -> None:
    def fails_on_7(
        request_id: int, logits: torch.Tensor, token_ids: Sequence[int], client_id: int | None
    ) -> torch.Tensor:
        if token_ids[0] == 7:
            raise ValueError("no sevens")
        return logits

    with pytest.raises(GenerationError, match=r"1 of 3 requests failed.*no sevens") as failed:
        llm.generate([[5], [7], [6]], max_new_tokens=4, logits_processors=[fails_on_7])
    completions = failed.value.completions
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert "no sevens" in completions[1].error
    assert [len(c.token_ids) for c in completions] == [4, 0, 4]
    assert llm.generate([[7]], max_new_tokens=4)[0].finish_reason == "length"


def test_biases_bad_words_and_minimum_lengths_reach_the_sampler(llm: LLM) -> None:
    (plain,) = llm.generate([[11, 12, 13]], max_new_tokens=6)
    first, second = plain.token_ids[:2]

    def greedy(**wishes: Any) -> list[int]:
        params = SamplingParams(temperature=0.0, **wishes)
        return llm.generate([[11, 12, 13]], params, max_new_tokens=6)[0].token_ids

    assert greedy(logit_bias=((77, 100.0),)) == [77] * 6
    assert first not in greedy(bad_words=((first,),))
    avoided = greedy(bad_words=((first, second),))
    assert avoided[0] == first
    assert avoided[1] != second
    assert set(greedy(allowed_token_ids=(21, 77))) <= {21, 77}
    params = SamplingParams(temperature=0.0, min_new_tokens=4)
    held = llm.generate([[11, 12, 13]], params, max_new_tokens=6, stop_token_ids=[first])[0]
    assert first not in held.token_ids[:4]
    assert greedy(watermark=True, watermark_delta=50.0) != plain.token_ids


def test_a_timeout_returns_the_text_so_far(llm: LLM) -> None:
    (completion,) = llm.generate("x", max_new_tokens=100, ignore_eos=True, timeout_seconds=1e-6)
    assert completion.finish_reason == "timeout"
    assert len(completion.token_ids) < 100


def test_several_threads_share_the_engine(llm: LLM) -> None:
    expected = [llm.generate(prompt, max_new_tokens=12)[0].text for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: llm.generate(p, max_new_tokens=12)[0].text, PROMPTS * 6))
    assert found == expected * 6


def test_statistics_of_every_step(llm: LLM, stats: Statistics) -> None:
    before = len(stats)
    llm.generate([[1001] * 40, [1002] * 10], max_new_tokens=30, ignore_eos=True)
    steps = stats[before:]
    assert sum(s["Total Context Tokens"] for s in steps) == 50
    assert steps[0]["Context Requests"] in (1, 2), "the second may come a step later"
    assert steps[0]["Generation Requests"] == 0
    first = steps[0]["Iteration Counter"]
    assert [s["Iteration Counter"] for s in steps] == list(range(first, first + len(steps)))
    steps = [s for s in steps if s["Active Request Count"] == 2 and not s["Context Requests"]]
    one = steps[-1]
    assert one["Active Request Count"] == one["Scheduled Requests"] == 2
    assert one["Max Request Count"] == llm.info.max_batch_size
    assert one["Max KV cache blocks"] * 16 == llm.info.max_batch_total_tokens
    assert one["Free KV cache blocks"] + one["Used KV cache blocks"] == one["Max KV cache blocks"]
    assert one["Tokens per KV cache block"] == 16
    assert one["Generation Requests"] == 2
    assert isinstance(one["Timestamp"], str)


def test_a_callback_that_raises_is_not_called_again(
    make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(text: str) -> None:
        calls.append(text)
        raise RuntimeError("my fault")

    with make_llm(on_stats=broken) as llm:
        assert llm.generate("x", max_new_tokens=4)[0].finish_reason == "length"
    assert len(calls) == 1
    assert "my fault" in caplog.text


@pytest.mark.parametrize(
    ("batching", "policy"),
    [("inflight", "max_utilization"), ("static", "guaranteed_no_evict")],
)
def test_scheduling_policies_do_not_change_tokens(
    llm: LLM, make_llm: Callable[..., LLM], batching: str, policy: str
) -> None:
    expected = [c.token_ids for c in llm.generate(PROMPTS, max_new_tokens=6)]
    rules: dict[str, Any] = {"batching": batching, "capacity_policy": policy}
    with make_llm(max_total_tokens=64, prefix_caching=False, **rules) as other:
        found = other.generate(PROMPTS * 2, max_new_tokens=6)
    assert [c.token_ids for c in found] == expected * 2
    assert not any(c.cached_tokens for c in found)


def test_a_prefix_is_computed_once(llm: LLM) -> None:
    prompt = list(range(100, 150))
    assert llm.generate(prompt, max_new_tokens=1)[0].cached_tokens == 0
    assert llm.generate(prompt, max_new_tokens=1)[0].cached_tokens == 48


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("", {}, "prompt 0: the prompt has no tokens"),
        (["ok", []], {}, "prompt 1: the prompt has no tokens"),
        ([[5], [4096]], {}, r"prompt 1: the model has no token 4096 \(0 to 4095\)"),
        ([[-1]], {}, "no token -1"),
        ([[5] * 128], {}, "128 prompt tokens .* more than max_total_tokens"),
        ([[5] * 120], {}, "more than max_total_tokens"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens"),
        ("x", {"n": 0}, "n must be"),
        ("x", {"n": 3, "best_of": 2}, "best_of"),
        ("x", {"timeout_seconds": 0}, "timeout_seconds"),
        ("x", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("x", {"sampling_params": [SamplingParams()] * 2}, "2 sampling parameters for 1 prompts"),
        ("x", {"sampling_params": SamplingParams(logit_bias=((9999, 1.0),))}, "no token 9999"),
        ("x", {"sampling_params": SamplingParams(bad_words=((9999,),))}, "no token 9999"),
        ("x", {"sampling_params": SamplingParams(allowed_token_ids=(3, 9999))}, "no token 9999"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_runs(
    llm: LLM, stats: Statistics, prompts: Any, options: dict[str, Any], message: str
) -> None:
    before = len(stats)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, **options)
    assert len(stats) == before


def test_wrong_types_and_names_raise_errors(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(TypeError, match="prompt 1 must be a text or a list of token ids"):
        llm.generate(["x", [1.5]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stops"):
        llm.generate("x", stops=["a"])  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="--batching: 'dynamic'"):
        make_llm(batching="dynamic")
    with pytest.raises(ModelNotFoundError):
        LLM("./no/such/folder")


def test_keywords_and_options_are_the_same() -> None:
    fields = set(GenerationOptions.__dataclass_fields__)
    assert fields == set(GenerationKeywords.__annotations__)


def test_a_closed_llm_ends_its_callers(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    running, ends = threading.Event(), []

    def wait(
        request_id: int, logits: torch.Tensor, token_ids: Sequence[int], client_id: int | None
    ) -> torch.Tensor:
        running.set()
        time.sleep(0.002)  # 30 requests of 120 tokens: time to close before they end
        return logits

    def call() -> None:
        try:
            llm.generate([[5]] * 30, max_new_tokens=120, ignore_eos=True, logits_processors=[wait])
        except EngineDeadError as error:
            ends.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert running.wait(60)
    llm.close()
    llm.close()
    thread.join(60)
    assert [e.cause for e in ends] == ["the LLM was closed"]
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")


def test_completions_can_be_compared_and_replaced(llm: LLM) -> None:
    completion = llm.generate("x", max_new_tokens=2)[0]
    assert isinstance(completion, Completion)
    assert replace(completion, logprobs=[]).mean_logprob == -math.inf
    assert completion.cumulative_logprob == pytest.approx(sum(completion.logprobs))
