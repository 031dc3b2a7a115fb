"""The exposition: TGI's names, types, labels and buckets; each request counted once."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import FakeEngine
from tgi_cli.engine.block_store import StoreEvent
from tgi_cli.engine.messages import StepOutputs, VerifiedDrafts
from tgi_cli.engine.step import NewRow, Step
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.state import RouterState
from tgi_cli.sampling.params import SamplingParams

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
    "tgi_request_time_to_first_token_seconds",
    "tgi_request_inter_token_seconds",
}
GAUGES = {
    "tgi_queue_size": 3,
    "tgi_batch_current_size": 2,
    "tgi_batch_current_max_tokens": 80,
    "tgi_batch_max_total_tokens": 1024,
    "tgi_kv_cache_usage_ratio": 80 / 1024,
    "tgi_request_in_flight": 0,
    "tgi_prefix_cache_blocks": 7,
    "tgi_state_slots_used": 5,
    "tgi_prefix_cache_states": 6,
    "tgi_lora_adapters": 0,
    "tgi_cache_config_info{block_size=16}{num_blocks=64}": 1,
}
METHODS = ("prefill", "decode")
DASHBOARD = {
    "tgi_batch_concat": "reason",
    "tgi_batch_concat_duration_bucket": "method",
    "tgi_batch_current_max_tokens": None,
    "tgi_batch_current_size": None,
    "tgi_batch_decode_duration_bucket": "method",
    "tgi_batch_filter_duration_bucket": "method",
    "tgi_batch_forward_duration_bucket": "method",
    "tgi_batch_inference_duration_bucket": "method",
    "tgi_queue_size": None,
    "tgi_request_count": None,
    "tgi_request_duration_bucket": None,
    "tgi_request_failure": "err",
    "tgi_request_generated_tokens_bucket": None,
    "tgi_request_generated_tokens_count": None,
    "tgi_request_generated_tokens_sum": None,
    "tgi_request_input_length_bucket": None,
    "tgi_request_mean_time_per_token_duration_bucket": None,
    "tgi_request_queue_duration_bucket": None,
    "tgi_request_skipped_tokens_bucket": None,
    "tgi_request_success": None,
}
"""What the queries of TGI's Grafana dashboard (assets/tgi_grafana.json) read, and the label that
they select or group by. ``skipped_tokens_bucket`` TGI itself has never had: there it is a summary.
"""
LABELS = {
    "tgi_batch_inference_count": METHODS,
    "tgi_batch_inference_success": METHODS,
    "tgi_batch_inference_failure": METHODS,
    "tgi_batch_inference_duration": METHODS,
    "tgi_batch_forward_duration": METHODS,
    "tgi_batch_decode_duration": METHODS,
    "tgi_batch_filter_duration": METHODS,
    "tgi_batch_concat_duration": ("decode",),
    "tgi_batch_concat": ("backpressure", "wait_exceeded", "chunking"),
    "tgi_request_failure": (
        "validation", "overloaded", "generation", "timeout", "incomplete", "dropped", "template",
    ),
}  # fmt: skip
"""TGI's, and ``timeout`` for deadlines, which it did not have."""

ENGINE_COUNTERS = {
    "tgi_preemptions_total": 1,
    "tgi_engine_steps_total": 11,
    "tgi_engine_prompt_tokens_total": 60,
    "tgi_prefix_cache_query_tokens_total": 100,
    "tgi_prefix_cache_hit_tokens_total": 40,
    "tgi_drafts_total": 0,
    "tgi_draft_tokens_total": 12,
    "tgi_draft_accepted_tokens_total": 9,
    "tgi_images_encoded_total": 4,
    "tgi_images_reused_total": 8,
}


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample by its name and labels; a foreign parser vouches for the format."""
    text = (await client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser appends the suffix to counters that lack it.
            name = sample.name
            if family.type == "counter" and f"# TYPE {name} " not in text:
                name = name.removesuffix("_total")
            labels = "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items()))
            found[name + labels] = sample.value
    return found


@pytest.mark.tgi_pain(15)
async def test_names_and_types(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    types = dict(
        line.split(" ")[2:4] for line in answer.text.splitlines() if line.startswith("# TYPE ")
    )
    durations = {name for name in LABELS if name.endswith("duration")}
    for names, kind in (
        (COUNTERS, "counter"),
        (ENGINE_COUNTERS, "counter"),
        (HISTOGRAMS | durations, "histogram"),
        ({"tgi_batch_next_size", "tgi_request_skipped_tokens"}, "histogram"),
        (LABELS.keys() - durations, "counter"),
        ({name.partition("{")[0] for name in GAUGES} | {"tgi_queue_age_seconds"}, "gauge"),
    ):
        for name in names:
            assert types[name] == kind, name
    assert "process_resident_memory_bytes" in types
    assert not any("_total" in name for name in COUNTERS | LABELS.keys() if name in types)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; q=0.5, text/plain; q=0.9", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=1.0.0;q=0", False),
        ("application/openmetrics-text;version=1.0.0;q=x", False),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5", True),
        ("," * 1000 + "application/openmetrics-text", True),
        ("," * 30_000 + "application/openmetrics-text", False),
    ],
)
async def test_the_format_is_negotiated(
    client: httpx.AsyncClient, accept: str, wanted: bool
) -> None:
    answer = await client.get("/metrics", headers={"accept": accept})
    expected = "application/openmetrics-text" if wanted else "text/plain"
    assert answer.headers["content-type"].startswith(expected)
    assert answer.text.endswith("# EOF\n") == wanted


async def test_openmetrics_has_the_same_samples(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.measured.store_counted({StoreEvent.HIT: 3, StoreEvent.MISS: 2})
    engine.load_names('a"b\\c')
    await client.post("/generate", json={"inputs": "hi"})
    found = await samples(client)
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    text = (await client.get("/metrics", headers=accept)).text
    types, others = {}, {}
    for family in openmetrics_parser.text_string_to_metric_families(text):
        types[family.name] = family.type
        for sample in family.samples:
            bound = {"le": f"{float(sample.labels['le']):g}"} if "le" in sample.labels else {}
            labels = sorted((sample.labels | bound).items())
            others[sample.name, *labels] = sample.value
    assert types["tgi_request_count"] == "unknown", "a counter's name would end with _total"
    assert types["tgi_kv_cache_dir_blocks"] == "counter"
    assert others["tgi_kv_cache_dir_blocks_total", ("event", "hit")] == 3
    volatile = ("process_", "python_", "tgi_lora_requests")
    names = {name.partition("{")[0] for name in found if not name.startswith(volatile)}
    assert names == {key[0] for key in others if not key[0].startswith(volatile)}
    assert len(found) == len(others)
    assert others["tgi_request_duration_bucket", ("le", "inf")] == 1
    assert others["tgi_request_count",] == found["tgi_request_count"] == 1


async def test_engine_gauges(client: httpx.AsyncClient) -> None:
    found = await samples(client)
    assert {name: found[name] for name in GAUGES} == GAUGES
    assert {name: found[name] for name in ENGINE_COUNTERS} == ENGINE_COUNTERS


async def test_every_query_of_tgis_dashboard_finds_its_metric(client: httpx.AsyncClient) -> None:
    found = await samples(client)
    for name, label in DASHBOARD.items():
        some = [sample for sample in found if sample.partition("{")[0] == name]
        assert some, name
        if label is not None:
            assert all(f"{{{label}=" in sample for sample in some), name


async def test_labels_are_tgis(client: httpx.AsyncClient) -> None:
    found = await samples(client)
    for name, values in LABELS.items():
        label = {"tgi_batch_concat": "reason", "tgi_request_failure": "err"}.get(name, "method")
        counted = f"{name}_count" if name.endswith("duration") else name
        some = {sample for sample in found if sample.partition("{")[0] == counted}
        assert some == {f"{counted}{{{label}={value}}}" for value in values}, name


NEW_ROW = NewRow(0, 1, [1], 1, [0], SamplingParams())


async def test_steps_of_the_engine_are_exposed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    measured = engine.measured
    prefill = Step(1, new=[NEW_ROW] * 3, rows=[0, 1, 2])
    decode = Step(2, rows=[0, 1, 2], num_decodes=3)
    measured.step_launched(prefill, "chunking", 0)
    for _ in range(2):
        measured.step_launched(decode, "", time.monotonic_ns() - 3_000_000_000)
    for method, seconds in (("prefill", 0.5), ("decode", 0.01)):
        for stage, share in (("total", 1.6), ("forward", 1.0), ("update", 0.2), ("send", 0.1)):
            measured.histograms[stage, method].observe(share * seconds)
    ids = [7, 7, 7, 7, 8]
    verified = [VerifiedDrafts(7, 5, 3, "weights")]
    measured.step_updated(StepOutputs(request_ids=ids, token_ids=ids, drafts=verified))
    measured.histograms["schedule", "join"].observe(0.15)
    measured.counts["failed", "decode"] += 1
    found = await samples(client)
    for name, prefill, decode in (("count", 1, 2), ("success", 1, 1), ("failure", 0, 1)):
        name = f"tgi_batch_inference_{name}"
        assert found[f"{name}{{method=prefill}}"] == prefill
        assert found[f"{name}{{method=decode}}"] == decode
    for name, share in (("inference", 1.6), ("forward", 1.0), ("decode", 0.2), ("filter", 0.1)):
        name = f"tgi_batch_{name}_duration"
        assert found[f"{name}_sum{{method=prefill}}"] == pytest.approx(share * 0.5)
        assert found[f"{name}_count{{method=prefill}}"] == 1
        assert found[f"{name}_sum{{method=decode}}"] == pytest.approx(share * 0.01)
        assert found[f"{name}_bucket{{le=+Inf}}{{method=decode}}"] == 1
    assert found["tgi_batch_concat_duration_sum{method=decode}"] == pytest.approx(0.15)
    assert found["tgi_batch_concat{reason=chunking}"] == 1
    assert (found["tgi_batch_next_size_count"], found["tgi_batch_next_size_sum"]) == (1, 3)
    assert found["tgi_batch_next_size_bucket{le=2}"] == 0
    assert found["tgi_request_skipped_tokens_count"] == 2
    assert found["tgi_request_skipped_tokens_sum"] == 3
    assert found["tgi_drafts_total"] == 1
    assert found["tgi_draft_tokens_by_source_total{source=weights}"] == 5
    assert found["tgi_draft_accepted_tokens_by_source_total{source=weights}"] == 3
    assert found["tgi_draft_tokens_by_source_total{source=prediction}"] == 0
    assert 3 <= found["tgi_queue_age_seconds"] < 60


class TestGateways:
    """What endpoint pickers read: our names always, vLLM's behind a flag."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"vllm_metrics": True}

    async def test_load_is_exposed_under_vllms_names(self, client: httpx.AsyncClient) -> None:
        found = await samples(client)
        model = "{model_name=acme/tiny}"
        assert found[f"vllm:num_requests_waiting{model}"] == found["tgi_queue_size"] == 3
        assert found[f"vllm:num_requests_running{model}"] == found["tgi_batch_current_size"] == 2
        usage = found["tgi_kv_cache_usage_ratio"]
        assert found[f"vllm:kv_cache_usage_perc{model}"] == usage
        assert found[f"vllm:gpu_cache_usage_perc{model}"] == usage
        assert found["vllm:cache_config_info{block_size=16}{num_gpu_blocks=64}"] == 1
        assert not [name for name in found if "lora_requests_info" in name]

    async def test_drafts_are_exposed_under_vllms_names(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        assert not [name for name in await samples(client) if "spec_decode" in name]
        engine.info = replace(engine.info, speculate=3)
        for accepted in (0, 2, 3, 3):
            engine.measured.histograms["accepted_drafts", ""].observe(accepted)
        found = await samples(client)
        model = "{model_name=acme/tiny}"
        name = "vllm:spec_decode_num"
        assert found[f"{name}_drafts_total{model}"] == found["tgi_drafts_total"] == 4
        assert found[f"{name}_draft_tokens_total{model}"] == found["tgi_draft_tokens_total"] == 12
        assert found[f"{name}_accepted_tokens_total{model}"] == 9
        assert [
            found.get(f"{name}_accepted_tokens_per_pos_total{model}{{position={position}}}")
            for position in range(4)
        ] == [3, 3, 2, None]

    async def test_adapters_in_use_are_exposed(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.load_names("law", 'a"b\\c')
        engine.gate = asyncio.Semaphore(0)
        generator = state.generator
        specs = [
            GenerationSpec(prompt="hi", sampling=SamplingParams(), adapter=name)
            for name in ("law", 'a"b\\c', "law")
        ]
        opened = await generator.open(specs, time.perf_counter())
        engine.gate.release()
        await anext(opened[0])
        found = await samples(client)
        expected = '{max_lora=4}{running_lora_adapters=law}{waiting_lora_adapters=a"b\\c,law}'
        for name in ("tgi_lora_requests_info", "vllm:lora_requests_info"):
            assert found[name + expected] == pytest.approx(time.time(), abs=60)
        assert found["tgi_lora_adapters"] == 2
        for generation in opened:
            generation.close()


async def test_buckets_are_tgis(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    text = (await client.get("/metrics")).text

    def bounds(name: str) -> list[str]:
        lines = [line for line in text.splitlines() if line.startswith(name + "_bucket")]
        return [line.split('le="')[1].partition('"')[0] for line in lines]

    seconds = bounds("tgi_request_duration")
    assert len(seconds) == 36
    assert float(seconds[0]) == pytest.approx(0.00015)
    assert float(seconds[-2]) == pytest.approx(145.6, rel=1e-3)
    assert seconds[-1] == "+Inf"
    assert len(bounds("tgi_request_input_length")) == 101
    assert float(bounds("tgi_request_input_length")[-2]) == engine.info.max_input_tokens
    assert float(bounds("tgi_request_generated_tokens")[-2]) == engine.info.max_total_tokens
    assert bounds("tgi_batch_next_size") == [*map(str, range(1, 1025)), "+Inf"]
    for name in (name for name in LABELS if name.endswith("duration")):
        assert bounds(name) == seconds * len(LABELS[name])


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
    for name in HISTOGRAMS - {"tgi_request_inter_token_seconds"}:
        assert found[f"{name}_count"] == 1, name
        assert found[f"{name}_bucket{{le=+Inf}}"] == 1, name
    assert found["tgi_request_inter_token_seconds_count"] == tokens - 1
    assert found["tgi_request_generated_tokens_sum"] == tokens
    assert found["tgi_request_input_length_sum"] == len(engine.requests[0].prompt_ids)
    assert found["tgi_request_queue_duration_sum"] == pytest.approx(0.002)
    assert found["tgi_request_cached_tokens_total"] == 4
    assert sum(v for name, v in found.items() if name.startswith("tgi_request_failure")) == 0


async def test_samples_count_their_prompt_once(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post("/v1/completions", json={"prompt": "the fox", "n": 3})
    found = await samples(client)
    assert (found["tgi_request_count"], found["tgi_request_success"]) == (3, 3)
    assert found["tgi_request_generated_tokens_count"] == 3
    assert found["tgi_request_max_new_tokens_count"] == 3
    assert found["tgi_request_input_length_count"] == 1
    assert found["tgi_request_input_length_sum"] == len(engine.requests[0].prompt_ids)
    assert found["tgi_request_cached_tokens_total"] == 4


async def test_each_prompt_of_a_request_is_counted(client: httpx.AsyncClient) -> None:
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


OWN_HISTOGRAMS = {"tgi_request_time_to_first_token_seconds", "tgi_request_inter_token_seconds"}
TGIS = (
    COUNTERS
    | LABELS.keys()
    | (HISTOGRAMS - OWN_HISTOGRAMS)
    | {name.removesuffix("_bucket") for name in DASHBOARD}
)
"""Names that TGI had, which may not change."""


async def test_names_follow_prometheus_conventions(client: httpx.AsyncClient) -> None:
    """The rules of ``promtool check metrics``, for all names but TGI's."""
    text = (await client.get("/metrics")).text
    heads = re.findall(r"^# HELP (\w+) (.*)\n# TYPE \1 (\w+)$", text, re.MULTILINE)
    own = [head for head in heads if head[0] not in TGIS]
    assert len(own) > 12
    for name, help, kind in own:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert help, name
        assert name.endswith("_total") == (kind == "counter"), name
        if kind != "histogram":
            assert not name.endswith(("_count", "_sum", "_bucket")), name
        words = name.split("_")
        assert kind not in words, name
        assert not {"duration", "milliseconds", "ms", "minutes", "kilobytes", "mb", "percent"} & {
            *words
        }, name
