"""Servers with drafters that have weights give the answers of a server without drafts, bit by bit.

Mixed requests (streams, chats, seeds, penalties, grammars, several samples, stop strings,
log-probabilities) go to both, at once and one after the other. Other heads and draft models, in the
engine alone: tests/parity/test_draft_heads.py and test_draft_model.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parity.cases import CASES
from tests.system.conftest import StartServer
from tests.system.test_mixed import FORMS, answer, request
from tests.tools.checkpoints import make_llama
from tests.tools.draft_heads import add_mtp, edit, make_eagle3, make_medusa
from tests.tools.miniatures import make_miniature, write_byte_tokenizer
from tests.tools.server_process import ServerProcess
from tgi_cli.errors import ExitCode
from tgi_cli.kernels import cpp_library

pytestmark = [pytest.mark.system, pytest.mark.slow]

REQUESTS = 2 * FORMS
CONTEXT = 4096
FLAGS = ("--dtype", "bfloat16", "--max-top-n-tokens", "5", "--no-measured-limits")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SAMPLED: dict[str, Any] = {
    "prompt": "def read_json(path):",
    "max_tokens": 120,
    "temperature": 1,
    "seed": 11,
    "ignore_eos": True,
    "timings_per_token": True,
}
"""Text that does not repeat itself: what is right in it was drafted with weights."""


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if cpp_library() is None:
        pytest.skip("torch's products differ by the number of rows, in their last bits")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_llama(
        tmp_path_factory.mktemp("llama"), num_hidden_layers=6, max_position_embeddings=CONTEXT
    )
    write_byte_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES["DeepSeek V3"]
    longer = replace(case, values={**case.values, "max_position_embeddings": CONTEXT})
    path = add_mtp(make_miniature(longer, tmp_path_factory.mktemp("deepseek")))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def config_of(method: str, model: Path | None = None, count: int = 3) -> list[str]:
    """vLLM's object on the command line."""
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": count}
    if model is not None:
        given["model"] = str(model)
    return ["--speculative-config", json.dumps(given)]


def eagle3(path: Path) -> Path:
    made = make_eagle3(path, "sglang", layer_ids=[0, 2, 4])
    return edit(made, lambda config, _: config.update(max_position_embeddings=CONTEXT))


Flags = Callable[[Path, Path], list[str]]
"""From the folder of the target, and one for the drafter."""

OF_LLAMA: dict[str, Flags] = {
    "the target itself": lambda target, _: ["--speculative-model", str(target)],
    "eagle3": lambda _, path: config_of("eagle3", eagle3(path)),
}


async def counted(client: httpx.AsyncClient, name: str) -> float:
    """A counter without labels, or of one model."""
    text = (await client.get("/metrics")).text
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def drafts_of(client: httpx.AsyncClient) -> tuple[float, float]:
    """Draft tokens verified and accepted so far, under our names and vLLM's."""
    drafted = await counted(client, "tgi_draft_tokens_total")
    accepted = await counted(client, "tgi_draft_accepted_tokens_total")
    names = ("draft_tokens_total", "accepted_tokens_total")
    theirs = [await counted(client, f"vllm:spec_decode_num_{name}") for name in names]
    assert theirs == [drafted, accepted]
    return drafted, accepted


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=240, limits=limits)


async def asked(server: ServerProcess, numbers: range) -> tuple[list[Any], dict[str, Any]]:
    """What a server answers to mixed requests at once, and to a sampled one."""
    server.wait_ready()
    async with client_of(server.url) as client:
        answers = await asyncio.gather(*(answer(client, number) for number in numbers))
        sampled = (await client.post("/v1/completions", json=SAMPLED)).raise_for_status().json()
    return answers, sampled


@pytest.fixture(scope="module")
def plain(start_server: StartServer) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
    """What a server without drafts answers, asked once."""
    known: dict[Path, tuple[list[Any], dict[str, Any]]] = {}

    def ask(target: Path, numbers: range) -> tuple[list[Any], dict[str, Any]]:
        if target not in known:
            server = start_server(str(target), "--speculate", "0", *FLAGS)
            known[target] = asyncio.run(asked(server, numbers))
            server.kill()
        return known[target]

    return ask


def check(
    server: ServerProcess, numbers: range, expected: tuple[list[Any], dict[str, Any]]
) -> tuple[float, float]:
    """Compare all answers; returns how many tokens were drafted and accepted.

    One request of each form is repeated alone.
    """

    async def compare() -> tuple[float, float]:
        together, sampled = await asked(server, numbers)
        async with client_of(server.url) as client:
            alone = [await answer(client, number) for number in numbers[:FORMS]]
            drafted = await drafts_of(client)
        for given in (together, alone):
            wrong = [n for n in range(len(given)) if given[n] != expected[0][n]]
            assert not wrong, {n: (request(n), given[n], expected[0][n]) for n in wrong[:2]}
        assert sampled["choices"] == expected[1]["choices"]
        told = sampled["timings"]
        assert 0 <= told.get("draft_n_accepted", 0) <= told.get("draft_n", 0) <= drafted[0]
        return drafted

    return asyncio.run(compare())


@pytest.mark.parametrize("name", OF_LLAMA)
def test_answers_with_weights_that_draft_are_those_without(
    start_server: StartServer, llama: Path, tmp_path: Path, plain: Any, name: str
) -> None:
    expected = plain(llama, range(REQUESTS))
    flags = OF_LLAMA[name](llama, tmp_path)
    server = start_server(str(llama), *flags, *FLAGS, "--vllm-metrics")
    drafted, accepted = check(server, range(REQUESTS), expected)
    server.kill()
    assert drafted > 20
    if name == "the target itself":
        assert accepted > 0.7 * drafted


def test_answers_with_mtp_layers_are_those_without(
    start_server: StartServer, deepseek: Path, plain: Any
) -> None:
    expected = plain(deepseek, range(REQUESTS))
    server = start_server(str(deepseek), *config_of("mtp"), *FLAGS, "--vllm-metrics")
    drafted, _ = check(server, range(REQUESTS), expected)
    server.kill()
    assert drafted > 20


def test_heads_that_stand_for_their_model(
    start_server: StartServer, llama: Path, tmp_path: Path, plain: Any
) -> None:
    """As TGI is started with them."""
    heads = make_medusa(tmp_path, "tgi")
    edit(heads, lambda config, _: config.update(base_model_name_or_path=str(llama)))
    server = start_server(str(heads), *FLAGS, "--vllm-metrics")
    expected = plain(llama, range(REQUESTS))
    drafted, _ = check(server, range(REQUESTS), expected)
    assert f"drafts come from the medusa weights in {heads}" in server.log
    server.kill()
    assert drafted > 20


def test_weights_of_another_method_end_the_start(
    start_server: StartServer, llama: Path, tmp_path: Path
) -> None:
    server = start_server(str(llama), *config_of("eagle3", make_medusa(tmp_path, "tgi")), *FLAGS)
    assert server.wait() == ExitCode.USAGE
    assert "method eagle3, and" in server.log
    assert "Traceback" not in server.log
