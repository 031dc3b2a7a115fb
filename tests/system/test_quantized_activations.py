"""Servers of weights in integers round activations unless they are started not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.quantized import gptq, write_quantized
from tgi_cli import LLM, SamplingParams, demo
from tgi_cli.kernels.linear import multiplies_bytes

pytestmark = pytest.mark.system

PROMPT = "def read_json(path):"
NEW = 16
LINE = "activations are rounded to 8 bits in products with integers"


@pytest.fixture(scope="module", params=["int8", "gptq"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str | None]:
    """A checkpoint, and how it is quantized as it is loaded."""
    if request.param == "int8":
        return demo.model_path(), "int8"
    path = tmp_path_factory.mktemp("gptq") / "quantized"
    write_quantized(demo.model_path(), path, gptq(4, 64))
    return path, None


def served(
    start_server: StartServer, model: tuple[Path, str | None], **environment: str
) -> tuple[list[tuple[int, float]], str]:
    """Greedy tokens of a server with their log-probabilities, and its log."""
    path, quantize = model
    flags = [str(path), "--dtype", "bfloat16", "--max-total-tokens", "256"]
    server = start_server(*flags, *(["--quantize", quantize] if quantize else []), **environment)
    server.wait_ready()
    parameters = {"max_new_tokens": NEW, "details": True, "temperature": None}
    body = {"inputs": PROMPT, "parameters": parameters | {"do_sample": False}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=120).raise_for_status().json()
    tokens = answer["details"]["tokens"]
    assert len(tokens) == NEW
    log = server.log
    server.kill()
    return [(each["id"], each["logprob"]) for each in tokens], log


def computed(model: tuple[Path, str | None], **settings: Any) -> list[tuple[int, float]]:
    """The same from an engine in this process."""
    path, quantize = model
    with LLM(path, dtype="bfloat16", max_total_tokens=256, quantize=quantize, **settings) as llm:
        (done,) = llm.generate([PROMPT], SamplingParams(temperature=0.0), max_new_tokens=NEW)
    return list(zip(done.token_ids, done.logprobs, strict=True))


def test_activations_of_a_server(start_server: StartServer, model: tuple[Path, str | None]) -> None:
    rounds = multiplies_bytes()
    exact, log = served(start_server, model, QUANTIZE_ACTIVATIONS="false")
    assert (LINE in log, "activations of 8 bits" in log) == (False, False)
    found, log = served(start_server, model)
    assert (LINE in log, "activations of 8 bits" in log) == (rounds, rounds)
    for answer, settings in (
        (exact, {"quantize_activations": False}),
        (found, {"quantize_activations": rounds}),
    ):
        wanted = computed(model, **settings)
        assert [each for each, _ in answer] == [each for each, _ in wanted]
        assert [each for _, each in answer] == pytest.approx([each for _, each in wanted], abs=1e-5)
    if rounds:
        assert [each for _, each in found] != [each for _, each in exact]
