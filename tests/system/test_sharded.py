"""``tgi serve --num-shard 2``: the same answers, and a clear end when a shard is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.system.conftest import StartServer
from tests.system.test_serve import assert_nothing_is_left, errors_in, events
from tests.tools.checkpoints import make_llama
from tests.tools.process_tree import is_gone, shard_process_of
from tests.tools.server_process import ServerProcess, kill, poll
from tgi_cli import demo
from tgi_cli.errors import ExitCode

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = 240.0
"""For whatever is waited for."""
LENGTH = 4096
LONG = {"inputs": "def read_json(path):", "parameters": {"max_new_tokens": 400}}
ENDLESS = {
    "inputs": "def read_json(path):",
    "parameters": {"max_new_tokens": LENGTH - 96, "do_sample": True, "temperature": 1.5},
}
"""It has not ended when the test does something to the server: it is sampled, so that no text is
repeated, which drafts would end within a moment."""
FLAGS = ("--dtype", "float32", "--max-batch-size", "8", "--max-restarts", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    # No token ends a text: streams last for as long as the tests want.
    return make_llama(
        path,
        dtype=torch.float32,
        vocab_size=4096,
        max_position_embeddings=LENGTH,
        eos_token_id=[],
        tokenizer=demo.model_path(),
    )


class Sharded:
    """A server, the process of its second shard, and where temporary files go."""

    def __init__(self, server: ServerProcess, temporary: Path) -> None:
        self.server = server
        self.temporary = temporary
        self.model_server = server.child("model-server")
        self.other_shard = shard_process_of(self.model_server)

    @property
    def processes(self) -> list[int]:
        return [*self.server.children(), self.other_shard]

    def assert_nothing_is_left(self, processes: list[int]) -> None:
        assert_nothing_is_left(self.server, processes)
        assert list(self.temporary.iterdir()) == []


@pytest.fixture(scope="module")
def start_sharded(
    start_server: StartServer, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Sharded]]:
    """A sharded server that runs: the one that a test before has left, or another."""
    started: list[Sharded] = []

    def start() -> Sharded:
        if not started or started[-1].server.process.poll() is not None:
            folder = tmp_path_factory.mktemp("temporary")
            server = start_server(str(model), "--num-shard", "2", *FLAGS, TMPDIR=str(folder))
            server.wait_ready()
            started.append(Sharded(server, folder))
        return started[-1]

    yield start
    for shards in started:
        shards.server.kill()
        kill(shards.other_shard)


@pytest.fixture
def sharded(start_sharded: Callable[[], Sharded]) -> Sharded:
    return start_sharded()


def generate(server: ServerProcess, prompt: str, **parameters: Any) -> dict[str, Any]:
    wanted = {"max_new_tokens": 40, "details": True, **parameters}
    body = {"inputs": prompt, "parameters": wanted}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    done: dict[str, Any] = answer.json()
    return done


def test_two_shards_answer_what_one_answers(
    start_server: StartServer, model: Path, sharded: Sharded
) -> None:
    alone = start_server(str(model), "--num-shard", "1", *FLAGS)
    assert "2 shards on cpu" in sharded.server.log
    prefix = "The quick brown fox jumps over the lazy dog, again and again and again. "
    asked: list[tuple[str, dict[str, Any]]] = [
        ("def read_json(path):", {}),
        (prefix + "Then it sleeps.", {"decoder_input_details": True}),
        (prefix + "Then it eats.", {"top_n_tokens": 3}),
        ("Sampled", {"do_sample": True, "seed": 7, "temperature": 0.9, "top_p": 0.9}),
        ("Once", {"repetition_penalty": 1.3, "max_new_tokens": 200}),
    ] * 2
    alone.wait_ready()

    def ask(server: ServerProcess) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = [threads.submit(generate, server, p, **kw) for p, kw in asked]
            return [answer.result() for answer in answers]

    for ours, theirs in zip(ask(sharded.server), ask(alone), strict=True):
        assert ours["generated_text"] == theirs["generated_text"]
        for part in ("tokens", "prefill"):
            logprobs = [
                [token["logprob"] or 0.0 for token in answer["details"][part]]
                for answer in (ours, theirs)
            ]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    alone.kill()


@pytest.mark.tgi_pain(11)
def test_a_shard_stopped_in_a_stream_ends_it_with_the_cause(sharded: Sharded) -> None:
    """One that is killed: see test_faults.py."""
    server, processes = sharded.server, sharded.processes
    url = f"{server.url}/generate_stream"
    with httpx.stream("POST", url, json=ENDLESS, timeout=SECONDS) as response:
        stream = events(response)
        next(stream)
        os.kill(sharded.other_shard, signal.SIGSTOP)
        last = list(stream)[-1]
    cause = "shard 1 has not answered for 5 s"
    assert cause in last["error"]
    assert server.wait() == ExitCode.SHARD_FAILED
    assert errors_in(server.log) == [f"error: {cause}"]
    assert "Traceback" not in server.log
    sharded.assert_nothing_is_left(processes)


def test_a_killed_model_server_leaves_no_shard(sharded: Sharded) -> None:
    processes = sharded.processes
    with httpx.stream(
        "POST", f"{sharded.server.url}/generate_stream", json=ENDLESS, timeout=SECONDS
    ) as response:
        stream = events(response)
        next(stream)
        os.kill(sharded.model_server, signal.SIGKILL)
        assert "error" in list(stream)[-1], "it does not end as if it were complete"
        assert sharded.server.wait() == ExitCode.SHARD_FAILED
    poll(lambda: all(is_gone(pid) for pid in processes), SECONDS, "the shards end")
    assert errors_in(sharded.server.log) == ["error: the model server was killed by SIGKILL"]
    sharded.assert_nothing_is_left(processes)


def test_sigterm_to_every_process_lets_a_stream_finish(sharded: Sharded) -> None:
    """As service managers send it: the shards leave it to the first."""
    processes = sharded.processes
    url = f"{sharded.server.url}/generate_stream"
    with httpx.stream("POST", url, json=LONG, timeout=SECONDS) as response:
        stream = events(response)
        next(stream)
        for pid in [sharded.other_shard, sharded.server.process.pid]:
            os.kill(pid, signal.SIGTERM)
        rest = list(stream)
    assert rest[-1]["generated_text"]
    assert not any("error" in event for event in rest)
    assert sharded.server.wait() == ExitCode.OK
    assert errors_in(sharded.server.log) == []
    sharded.assert_nothing_is_left(processes)


def test_what_cannot_be_shared_out_is_refused_once(
    start_server: StartServer, tmp_path: Path
) -> None:
    make_llama(
        tmp_path / "model",
        vocab_size=4096,
        num_attention_heads=9,
        num_key_value_heads=3,
        tokenizer=demo.model_path(),
    )
    (tmp_path / "tmp").mkdir()
    server = start_server(str(tmp_path / "model"), "--num-shard", "2", TMPDIR=str(tmp_path / "tmp"))
    assert server.wait() == ExitCode.MODEL_UNUSABLE
    (line,) = errors_in(server.log)
    assert "cannot be split evenly among 2 shards" in line
    assert "Traceback" not in server.log
    assert list((tmp_path / "tmp").iterdir()) == []
