"""What hurt users of Text Generation Inference most, and the tests that show it does not hurt here.

Those that show over HTTP are in this file. ``ELSEWHERE`` names the tests of the others, worst
pain first; numbers in brackets are those of TGI's issues.

1.  New models come late or never (3199, 3309).
2.  Out of memory after a warm-up that succeeded (2744, 1374).
3.  Hard to install without a container (1788, 1145).
4.  Garbage by prefix caching under load (2871, 3043).
5.  What OpenAI's clients send is refused (2864, 2228, 2869).
6.  Tools: "auto" acts like "required", one call at most (2549).
7.  Grammars hold up everybody while they are compiled (2902).
8.  Tiny contexts without configuration (3181, 3014).
9.  Hardware that is not in a table (3190).
10. Images to text models are silently taken for text (2565).
11. One shard is dead and the server looks alive (1838, 2593).
12. Quantized checkpoints (3158, 3005, 1322) are read whatever wrote them; formats that are not are
    refused by name before anything is loaded.
13. Offline use (3088, 2147).
14. Log-probabilities of the prompt are gone (2973), and others distorted by the filters (1629).
15. Operations: a second port that is taken (3062), no time to first token (2887), slow health
    checks (2348), errors within streams of status 200 (2749), adapters fixed at the start and
    unknown ones ignored (2177, 2505).
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.router.config import RouterConfig

TESTS = Path(__file__).parent.parent

ELSEWHERE: dict[int, tuple[str, ...]] = {
    1: (
        "parity/test_families.py::test_parity_with_transformers",
        "parity/test_fallback.py::test_parity_with_transformers",
        "unit/models/test_refusals.py::test_refused_with_the_reason",
        "unit/text/test_chat.py::test_renders_as_transformers",
    ),
    2: (
        "unit/worker/test_worker.py::test_the_cache_is_sized_after_the_steps_activations",
        "unit/worker/test_warmup.py::test_every_budget_is_spent",
        "unit/engine/test_scheduler.py::test_preemption_is_invisible_in_the_output",
        "unit/engine/test_core.py::test_a_failing_step_fails_only_its_requests",
    ),
    3: (
        "cli/test_main.py::test_no_model_is_the_bundled_one",
        "system/test_serve.py::test_the_bundled_model_is_served_and_said_so",
    ),
    4: (
        "unit/engine/test_core.py::test_random_arrivals_and_cancellations_change_nobodys_tokens",
        "unit/engine/test_scheduler.py::test_sequences_of_different_salts_share_nothing",
        "parity/test_engine_greedy.py::test_random_arrivals_and_cancellations",
    ),
    5: (
        "router/test_chat.py::test_what_clients_send",
        "router/test_completions.py::test_null_for_everything_optional",
    ),
    6: (
        "router/test_tools.py::test_calls",
        "router/test_structured.py::test_auto",
        "system/test_structured.py::test_tools_are_called_for_certain",
    ),
    7: (
        "router/test_structured.py::test_a_bomb_is_refused_while_others_go_on",
        "unit/engine/test_grammar.py::test_others_pass_while_a_grammar_is_compiled",
        "system/test_structured.py::test_sixteen_schemas_at_once_among_free_text",
    ),
    8: (
        "unit/worker/test_capacity.py::test_limits_that_were_left_open_are_lowered_to_what_fits",
        "unit/worker/test_worker.py::test_a_context_that_memory_cannot_hold_is_lowered",
    ),
    9: (
        "unit/worker/test_worker.py::test_the_cache_is_sized_after_the_steps_activations",
        "unit/attention/test_backends.py::test_the_default_backend_is_the_device_s",
    ),
    11: (
        "unit/worker/test_shards.py::test_a_shard_that_hangs_is_noticed_while_nothing_runs",
        "system/test_sharded.py::test_a_shard_lost_in_a_stream_ends_it_with_the_cause",
    ),
    12: (
        "unit/models/test_config.py::test_what_cannot_be_run_is_refused_by_name",
        "unit/quantization/test_mxfp4.py::test_every_byte_and_exponent",
        "unit/quantization/test_owners.py::test_what_is_read_is_what_the_library_reads",
        "parity/test_quantized.py::test_formats",
    ),
    13: (
        "unit/hub/test_download.py::test_offline_uses_what_is_complete",
        "unit/hub/test_local.py::test_a_folder_is_taken_as_it_is",
    ),
    14: (
        "unit/worker/test_extras.py::test_a_prompt_is_scored_chunk_by_chunk_as_by_transformers",
        "unit/worker/test_extras.py::test_the_head_sees_parts_of_a_prompt_and_no_more_than_asked",
        "unit/sampling/test_sampler.py::test_logprobs_are_the_models_own",
    ),
    15: (
        "router/test_metrics.py::test_names_and_types",
        "unit/rpc/test_session.py::test_an_engine_that_stands_still_ends_its_streams_and_is_found_when_it_moves",
        "router/test_adapters.py::test_load_use_unload",
        "router/test_adapters.py::test_an_unknown_adapter_id_is_a_422_that_names_those_there_are",
    ),
}

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
IMAGE: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is this?"},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            ],
        }
    ]
}


@pytest.mark.parametrize(
    "pointer", sorted({name for names in ELSEWHERE.values() for name in names})
)
def test_the_test_is_there(pointer: str) -> None:
    file, _, name = pointer.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    found = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in found


class TestOpenAI:
    """5: what TGI refused, its clients send by default."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"top_p": 1.0},
            {"stop": "x"},
            {"logit_bias": {}},
            {"logit_bias": {"5": -100}},
            {"stream_options": None},
            {"temperature": 0},
            {"response_format": {"type": "text"}},
            {"tools": []},
            {"n": 2},
            {"frequency_penalty": None, "presence_penalty": 0.5, "seed": None, "stop": None},
        ],
    )
    async def test_is_taken(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        answer = await client.post("/v1/chat/completions", json=CHAT | fields)
        assert answer.status_code == 200, answer.text

    async def test_a_stop_string_says_stop_and_ids_are_ids(self, client: httpx.AsyncClient) -> None:
        answer = (await client.post("/v1/chat/completions", json=CHAT | {"stop": ["wor"]})).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"] == "hello "
        again = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["id"] != again["id"]
        assert answer["id"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", IMAGE),
        ("/invocations", IMAGE),
        ("/vertex", {"instances": [IMAGE]}),
        ("/chat_tokenize", IMAGE),
    ],
)
async def test_10_an_image_is_refused_by_a_model_that_sees_none(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict[str, Any]
) -> None:
    answer = await client.post(route, json=body)
    assert answer.status_code == (400 if route.startswith("/v1/") else 422)
    assert "`image_url` is not supported by this model" in answer.text
    assert engine.requests == []


@pytest.mark.parametrize("route", ["/health", "/ping", "/v2/health/ready"])
@pytest.mark.parametrize("attribute", ["connected", "is_healthy"])
async def test_11_an_engine_that_is_gone_is_not_healthy(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, attribute: str
) -> None:
    assert (await client.get(route)).status_code == 200
    setattr(engine, attribute, False)
    assert (await client.get(route)).status_code == 503


async def test_14_the_prompts_logprobs_need_no_flag(client: httpx.AsyncClient) -> None:
    parameters = {"decoder_input_details": True}
    body = {"inputs": "the fox", "parameters": parameters}
    prefill = (await client.post("/generate", json=body)).json()["details"]["prefill"]
    assert prefill[0]["logprob"] is None
    assert all(token["logprob"] is not None for token in prefill[1:])
    assert len(prefill) > 1


class TestOperations:
    """15."""

    async def test_time_to_first_token_and_between_tokens(self, client: httpx.AsyncClient) -> None:
        await client.post("/generate", json={"inputs": "hi"})
        metrics = (await client.get("/metrics")).text
        assert "tgi_request_time_to_first_token_seconds_count 1" in metrics
        assert "tgi_request_inter_token_seconds_count" in metrics

    async def test_metrics_are_served_where_the_api_is(self) -> None:
        """There is no second port that another server could hold."""
        names = {name for name in RouterConfig.__dataclass_fields__ if "port" in name.split("_")}
        assert names == {"port"}

    async def test_health_answers_while_the_engine_computes(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.gate = asyncio.Semaphore(0)
        busy = asyncio.ensure_future(client.post("/generate", json={"inputs": "hi"}))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 200
        assert not busy.done()
        for _ in range(20):
            engine.gate.release()
        assert (await busy).status_code == 200

    @pytest.mark.parametrize("route", ["/v1/chat/completions", "/invocations"])
    async def test_a_stream_that_cannot_begin_is_an_error_of_its_own(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str
    ) -> None:
        engine.connected = False
        answer = await client.post(route, json=CHAT | {"stream": True})
        assert answer.status_code == 503

    async def test_an_error_in_a_stream_says_what_it_is(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.failure, engine.fail_after = "out of memory", 1
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        *_, error, done = events(answer.text)
        assert done == "[DONE]"
        assert "out of memory" in error["error"]["message"]
        assert error["error"]["type"] == "server_error"

    async def test_an_unknown_adapter_is_not_the_base_model(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names("fox")
        body = {"inputs": "hi", "parameters": {"adapter_id": "wolf"}}
        assert (await client.post("/generate", json=body)).status_code == 422
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "wolf"})
        assert answer.status_code == 404
        assert engine.requests == []
