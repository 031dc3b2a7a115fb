"""Sampling defaults of requests, from generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tgi_cli.router.generation.sampling_defaults import SamplingDefaults


def write(path: Path, content: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_missing_file_means_openais_defaults(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults(1.0, 0, 1.0, 0.0, 1.0, 1.0)
    assert SamplingDefaults.read(write(tmp_path, {"eos_token_id": 2})) == SamplingDefaults()


def test_generation_config_sets_the_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None}
    with caplog.at_level(logging.INFO, "tgi_cli"):
        defaults = SamplingDefaults.read(write(tmp_path, stated))
    assert defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert "temperature 0.6, top_k 20, top_p 0.95" in caplog.text


@pytest.mark.parametrize(
    "stated",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": True},
        {"repetition_penalty": 0},
        {"top_k": [1]},
    ],
    ids=str,
)
def test_invalid_values_are_ignored_with_a_warning(
    tmp_path: Path, stated: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert SamplingDefaults.read(write(tmp_path, stated)) == SamplingDefaults()
    assert next(iter(stated)) in caplog.text


def test_invalid_json_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()
    assert "generation_config.json is ignored" in caplog.text


class TestRoutes:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        stated = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.2}
        return {"model_path": write(tmp_path, stated)}

    @pytest.mark.parametrize(
        ("route", "body"),
        [
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ],
    )
    async def test_v1_uses_the_defaults_for_absent_parameters(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict[str, Any]
    ) -> None:
        assert (await client.post(route, json={"model": "tgi", **body})).status_code == 200
        own = {"model": "tgi", "temperature": 0, "top_k": 5, **body}
        assert (await client.post(route, json=own)).status_code == 200
        silent, outspoken = (request.sampling for request in engine.requests)
        assert (silent.temperature, silent.top_k, silent.repetition_penalty) == (0.6, 20, 1.2)
        assert (outspoken.temperature, outspoken.top_k) == (0, 5)
        assert outspoken.repetition_penalty == 1.2

    async def test_tgi_routes_ignore_the_defaults(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await client.post("/generate", json={"inputs": "a", "parameters": {}})
        await client.post("/generate", json={"inputs": "a", "parameters": {"do_sample": True}})
        assert [request.sampling.temperature for request in engine.requests] == [0, 1]
        assert engine.requests[1].sampling.repetition_penalty == 1


class TestSwitchedOff:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        return {"model_path": write(tmp_path, {"temperature": 0.6}), "generation_config": "none"}

    async def test_openais_defaults_apply_with_none(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await client.post("/v1/completions", json={"model": "tgi", "prompt": "a"})
        assert engine.requests[0].sampling.temperature == 1
