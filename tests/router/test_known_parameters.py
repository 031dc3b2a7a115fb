"""Parameters of other servers by their names, as docs/api.md lists them: none is ignored.

Names are written out here, and not taken from the schemas, so that one that a schema loses is
missed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fakes import END_ID, FakeEngine
from tests.unit.text import tiny
from tgi_cli.router.state import RouterState

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "the fox"}]},
    COMPLETIONS: {"prompt": "the fox"},
    RESPONSES: {"input": "the fox"},
}
DOCS = Path(__file__).parents[2] / "docs" / "api.md"

TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": ({"voice": "alloy", "format": "wav"},),
    "modalities": (["audio"], ["text", "audio"]),
    "web_search_options": ({}, {"search_context_size": "low"}),
    "functions": ([{"name": "f"}],),
    "function_call": ({"name": "f"},),
    "context_management": ([{"type": "compaction"}],),
    # vLLM
    "use_beam_search": (True,),
    "length_penalty": (0.5,),
    "early_stopping": (True,),
    "logprob_token_ids": ([5],),
    "logits_processors": (["module.Class"],),
    "prompt_logprobs": (1,),
    "prompt_embeds": ("AAAA",),
    "kv_transfer_params": ({"do_remote_decode": True},),
    "ec_transfer_params": ({"a": 1},),
    "vllm_xargs": ({"a": 1},),
    "mm_processor_kwargs": ({"num_crops": 4},),
    "media_io_kwargs": ({"image": {}},),
    "repetition_detection": ({"max_pattern_size": 4},),
    # TGI
    "details": (True,),
    "decoder_input_details": (True,),
    "full_text": (True,),
    "stop_sequences": (["a"],),
    # transformers
    "num_beams": (2,),
    "num_return_sequences": (2,),
    "no_repeat_ngram_size": (3,),
    "penalty_alpha": (0.6,),
    "guidance_scale": (2.0, 0),
    "epsilon_cutoff": (0.1,),
    "eta_cutoff": (0.1,),
    "stop_strings": (["a"],),
    # llama.cpp
    "mirostat": (2,),
    "samplers": (["top_k"],),
    "dry_multiplier": (0.8,),
    "xtc_probability": (0.1,),
    "dynatemp_range": (0.5,),
    "top_n_sigma": (1.0,),
    "adaptive_target": (0.5, 0),
    "repeat_last_n": (64, 0),
    "n_probs": (2,),
    "post_sampling_probs": (True,),
    "id_slot": (1,),
    "lora": ([{"id": 0, "scale": 0.5}],),
    "reasoning_format": ("none",),
    "return_progress": (True,),
    "response_fields": (["content"],),
    # SGLang
    "stop_regex": ("a+",),
    "no_stop_trim": (True,),
    "lora_path": ("a",),
    "custom_logit_processor": ("a",),
    "custom_params": ({"a": 1},),
    "session_params": ({"id": "a"},),
    "return_hidden_states": (True,),
    "separate_reasoning": (False,),
    # hosted models
    "thinking": ({"type": "enabled"},),
    "enable_thinking": (True, False),
    "thinking_budget": (100, 0),
}
"""Refused on all three routes, by values that request something."""
ELSEWHERE: dict[str, dict[str, Any]] = {
    CHAT: {"best_of": 2, "suffix": "a", "return_full_text": True, "max_output_tokens": 2},
    COMPLETIONS: {
        **{"tools": [TOOL], "top_logprobs": 2, "max_output_tokens": 2, "documents": ["a"]},
        **{"reasoning": {"effort": "low"}, "thinking_token_budget": 0},
        **{"thinking_budget_tokens": 5, "chat_template": "a"},
    },
    RESPONSES: {
        **{"n": 2, "best_of": 2, "max_tokens": 2, "max_completion_tokens": 2},
        **{"max_new_tokens": 0, "n_predict": 2, "response_format": {"type": "json_object"}},
        **{"logprobs": True, "top_n_tokens": 2, "return_token_ids": True, "echo": True},
        **{"suffix": "a", "return_full_text": True, "documents": ["a"], "chat_template": "a"},
        **{"thinking_token_budget": 0},
    },
}
"""Parameters of other routes of OpenAI's API, and names that only some of the three have."""

BEGUN = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "well, "}]
LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": 1},
    COMPLETIONS: {"logprobs": 1},
    RESPONSES: {"include": ["message.output_text.logprobs"]},
}
HONOURED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": -100},
    "stop": "wor",
    "top_k": 3,
    "min_p": 0.1,
    "typical_p": 0.5,
    "repetition_penalty": 1.25,
    "repeat_penalty": 1.25,
    "do_sample": False,
    "ignore_eos": True,
    "min_tokens": 2,
    "min_new_tokens": 2,
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "allowed_token_ids": [7, 5],
    "bad_words": ["fox"],
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 2,
    "truncate": 2,
    "watermark": True,
    "adapter_id": "two",
    "priority": 3,
    "cache_salt": "a",
    "grammar": {"type": "regex", "value": "ab"},
    "json_schema": {"type": "null"},
    "regex": "ab",
    "ebnf": 'root ::= "ab"',
    "guided_json": {"type": "null"},
    "guided_regex": "ab",
    "guided_choice": ["ab"],
    "guided_grammar": 'root ::= "ab"',
    "structured_outputs": {"regex": "ab"},
    "return_tokens_as_token_ids": True,
}
"""Honoured on all three routes."""
HONOURED_BY: dict[str, dict[str, Any]] = {
    CHAT: {
        **{"add_special_tokens": True, "logprobs": True, "echo": True, "n": 2},
        **{"response_format": {"type": "json_object"}, "top_n_tokens": 2},
        **{"return_token_ids": True, "timings_per_token": True, "max_tokens": 2},
        **{"max_completion_tokens": 2, "max_new_tokens": 2, "n_predict": 2},
        **{"add_generation_prompt": False, "continue_final_message": False},
    },
    COMPLETIONS: {
        **{"add_special_tokens": False, "logprobs": 0, "echo": True, "n": 2, "best_of": 2},
        **{"response_format": {"type": "json_object"}, "top_n_tokens": 2},
        **{"return_token_ids": True, "timings_per_token": True, "max_tokens": 2},
        **{"max_completion_tokens": 2, "max_new_tokens": 2, "n_predict": 2},
        **{"return_full_text": True},
    },
    RESPONSES: {
        **{"add_special_tokens": True, "max_output_tokens": 2, "instructions": "a"},
        **{"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        **{"text": {"format": {"type": "json_object"}}},
    },
}
BASES: dict[str, Any] = {
    "include_stop_str_in_output": {route: {"stop": "wor"} for route in ROUTES},
    "return_tokens_as_token_ids": LOGPROBS,
    "echo": {CHAT: {"messages": BEGUN}},
    "continue_final_message": {CHAT: {"messages": BEGUN}},
}
"""What else a parameter needs to have an effect, by route."""


def cases(common: dict[str, Any], own: dict[str, dict[str, Any]]) -> list[tuple[str, str, Any]]:
    """Routes, names and values."""
    return [
        (route, name, value) for route in ROUTES for name, value in (common | own[route]).items()
    ]


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        *((route, name, v) for route in ROUTES for name, vs in REFUSED.items() for v in vs),
        *cases({}, ELSEWHERE),
    ],
)
async def test_parameters_that_are_not_supported_are_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, name: str, value: Any
) -> None:
    answer = await client.post(route, json=ROUTES[route] | {name: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", name)
    assert error["code"] in ("unsupported_parameter", "unsupported_value")
    assert f"`{name}`" in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("name", REFUSED)
async def test_platforms_refuse_them_in_tgis_form(
    client: httpx.AsyncClient, engine: FakeEngine, name: str
) -> None:
    fields = {name: REFUSED[name][0]}
    for route, body in (
        ("/invocations", ROUTES[CHAT] | fields),
        ("/invocations", ROUTES[COMPLETIONS] | fields),
        ("/vertex", {"instances": [ROUTES[CHAT] | fields]}),
    ):
        answer = await client.post(route, json=body)
        assert answer.status_code == 422, answer.text
        assert f"`{name}`" in answer.json()["error"]
    assert engine.requests == []


def outcome(engine: FakeEngine, answer: dict[str, Any]) -> tuple[Any, ...]:
    """What was asked of the engine, and what was answered, without ids, seeds and times."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            left_out = ("id", "seed", "timings")
            return {k: k if k in left_out else plain(v) for k, v in value.items()}
        return [plain(each) for each in value] if isinstance(value, list) else value

    requests = [
        replace(each, request_id=0, fork_of=None, sampling=replace(each.sampling, seed=0))
        for each in engine.requests
    ]
    # Responses repeat the request's parameters, which is no effect.
    kept = ("choices", "output", "usage", "timings", "prompt_token_ids")
    shown = {name: plain(value) for name, value in answer.items() if name in kept}
    return requests, list(engine.used), shown


@pytest.mark.parametrize(("route", "name", "value"), cases(HONOURED, HONOURED_BY))
async def test_parameters_that_are_supported_have_an_effect(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    state: RouterState,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    name: str,
    value: Any,
) -> None:
    async def compiled(grammar: Any) -> str:
        return str(grammar.form)

    assert state.generator.grammars is not None
    monkeypatch.setattr(state.generator.grammars, "compile", compiled)
    engine.load_names("two")
    special = engine.tokenizer.encode(tiny.BOS, False)[0]
    word = engine.tokenizer.encode("hello world", False)
    engine.play([special, *word, END_ID])
    base = ROUTES[route] | BASES.get(name, {}).get(route, {})
    found = []
    for fields in ({}, {name: value}):
        engine.requests.clear()
        engine.used.clear()
        answer = await client.post(route, json=base | fields)
        assert answer.status_code == 200, answer.text
        found.append(outcome(engine, answer.json()))
    assert found[0] != found[1]


async def test_a_seed_is_honoured(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for route, body in ROUTES.items():
        await client.post(route, json=body | {"seed": 7})
    assert [request.sampling.seed for request in engine.requests] == [7, 7, 7]


async def test_options_of_streams_need_one(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for route, body in ROUTES.items():
        answer = await client.post(route, json=body | {"stream_options": {"include_usage": True}})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "stream_options"
    assert engine.requests == []


def test_the_documentation_lists_them() -> None:
    text = DOCS.read_text()
    table = text[text.index("| server | parameters |") :].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)[^`]*`", table))
    elsewhere = {name for names in ELSEWHERE.values() for name in names}
    assert set(REFUSED) <= named
    extensions = text[text.index("## OpenAI's routes") : text.index("### Chats")]
    known = set(re.findall(r"`(?:stream_options\.)?(\w+)[^`]*`", extensions)) | {
        name for name in HONOURED if name.startswith("guided_")
    }
    honoured = set(HONOURED) | {name for names in HONOURED_BY.values() for name in names}
    own = {"include", "text", "instructions", "max_output_tokens"}  # of responses
    own |= {"add_generation_prompt", "continue_final_message"}  # of chats
    own |= {"response_format"}  # listed as a structured output
    assert honoured - own <= known
    assert named - set(REFUSED) - elsewhere - honoured <= {"chat_template_kwargs", "use"}
