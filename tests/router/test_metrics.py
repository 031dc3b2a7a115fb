"""The exposition: TGI's names, types, labels and buckets; each request counted once."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import FakeEngine

COUNTERS = {"tgi_request_count", "tgi_request_success", "tgi_request_failure"}
HISTOGRAMS = {
    "tgi_request_duration",
    "tgi_request_validation_duration",
    "tgi_request_queue_duration",
    "tgi_request_inference_duration",
    "tgi_request_mean_time_per_token_duration",
    "tgi_request_input_length",
    "tgi_request_generated_tokens",
    "tgi_request_max_new_tokens",
    "tgi_request_time_to_first_token_duration",
    "tgi_request_inter_token_duration",
}
GAUGES = {
    "tgi_queue_size": 3,
    "tgi_batch_current_size": 2,
    "tgi_batch_current_max_tokens": 80,
    "tgi_batch_max_total_tokens": 1024,
    "tgi_kv_cache_usage": 80 / 1024,
    "tgi_request_in_flight": 0,
    "tgi_prefix_cache_blocks": 7,
}


ENGINE_COUNTERS = {
    "tgi_preemption_count": 1,
    "tgi_engine_step_count": 11,
    "tgi_engine_prompt_tokens": 60,
    "tgi_prefix_cache_query_tokens": 100,
    "tgi_prefix_cache_hit_tokens": 40,
}


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample by its name and labels; a foreign parser vouches for the format."""
    text = (await client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser writes counters OpenMetrics' way.
            name = sample.name.removesuffix("_total") if family.type == "counter" else sample.name
            labels = "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items()))
            found[name + labels] = sample.value
    return found


async def test_names_and_types(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    types = dict(
        line.split(" ")[2:4] for line in answer.text.splitlines() if line.startswith("# TYPE ")
    )
    for names, kind in (
        (COUNTERS, "counter"),
        (ENGINE_COUNTERS, "counter"),
        (HISTOGRAMS, "histogram"),
        (GAUGES, "gauge"),
    ):
        for name in names:
            assert types[name] == kind, name
    assert "process_resident_memory_bytes" in types
    assert not any("_total" in name for name in types if name.startswith("tgi_request"))


async def test_engine_gauges(client: httpx.AsyncClient) -> None:
    found = await samples(client)
    assert {name: found[name] for name in GAUGES} == GAUGES
    assert {name: found[name] for name in ENGINE_COUNTERS} == ENGINE_COUNTERS


async def test_buckets(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = (await client.get("/metrics")).text

    def bounds(name: str) -> list[str]:
        lines = [line for line in text.splitlines() if line.startswith(name + "_bucket")]
        return [line.split('"')[1] for line in lines]

    seconds = bounds("tgi_request_duration")
    assert len(seconds) == 36
    assert float(seconds[0]) == pytest.approx(0.00015)
    assert float(seconds[-2]) == pytest.approx(145.6, rel=1e-3)
    assert seconds[-1] == "+Inf"
    assert len(bounds("tgi_request_input_length")) == 101
    assert float(bounds("tgi_request_input_length")[-2]) == engine.info.max_input_tokens
    assert float(bounds("tgi_request_generated_tokens")[-2]) == engine.info.max_total_tokens


ANSWERED = [
    ("/generate", {"inputs": "hi"}),
    ("/generate_stream", {"inputs": "hi"}),
    ("/", {"inputs": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
]


@pytest.mark.parametrize(("route", "body"), ANSWERED)
async def test_a_request_is_counted_once(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict
) -> None:
    await client.post(route, json=body)
    found = await samples(client)
    tokens = len(engine.replies[0])
    assert found["tgi_request_count"] == 1
    assert found["tgi_request_success"] == 1
    for name in HISTOGRAMS - {"tgi_request_inter_token_duration"}:
        assert found[f"{name}_count"] == 1, name
        assert found[f"{name}_bucket{{le=+Inf}}"] == 1, name
    assert found["tgi_request_inter_token_duration_count"] == tokens - 1
    assert found["tgi_request_generated_tokens_sum"] == tokens
    assert found["tgi_request_input_length_sum"] == len(engine.requests[0].prompt_ids)
    assert found["tgi_request_queue_duration_sum"] == pytest.approx(0.002)
    assert found["tgi_request_cached_tokens"] == 4
    assert sum(v for name, v in found.items() if name.startswith("tgi_request_failure")) == 0


async def test_samples_share_what_is_of_their_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post("/v1/completions", json={"prompt": "the fox", "n": 3})
    found = await samples(client)
    assert (found["tgi_request_count"], found["tgi_request_success"]) == (3, 3)
    assert found["tgi_request_generated_tokens_count"] == 3
    assert found["tgi_request_max_new_tokens_count"] == 3
    assert found["tgi_request_input_length_count"] == 1
    assert found["tgi_request_input_length_sum"] == len(engine.requests[0].prompt_ids)
    assert found["tgi_request_cached_tokens"] == 4


async def test_prompts_of_one_request_are_counted_each(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    found = await samples(client)
    assert (found["tgi_request_count"], found["tgi_request_success"]) == (3, 3)


@pytest.mark.parametrize(
    ("route", "body", "label"),
    [
        ("/generate", {"inputs": "x", "parameters": {"top_k": 0}}, "validation"),
        ("/generate", {"inputs": "x" * 80}, "validation"),
        ("/generate_stream", {"inputs": "x", "parameters": {"top_k": 0}}, "validation"),
        ("/v1/completions", {"prompt": "x", "n": 129}, "validation"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "generation"),
    ],
)
async def test_a_failure_is_counted_once(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict, label: str
) -> None:
    engine.failure = "broken"
    await client.post(route, json=body)
    found = await samples(client)
    failures = {
        name: value for name, value in found.items() if name.startswith("tgi_request_failure")
    }
    count = body.get("n", 1)
    assert failures.pop(f"tgi_request_failure{{err={label}}}") == count
    assert set(failures.values()) == {0}
    assert (found["tgi_request_count"], found["tgi_request_success"]) == (count, 0)
