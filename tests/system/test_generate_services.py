"""TGI's own services of a real server, on the socket that TGI's router and benchmark look for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.grpc_reflection import ReflectionClient
from tests.tools.server_process import START_SECONDS, STOP_SECONDS, ServerProcess, free_ports, poll
from tests.unit.tgi_grpc.fakes import V2, V3, Heard
from tgi_cli import demo
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.errors import ExitCode
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.tokenizer import Tokenizer

ONE, TWO, THREE = "def read_json(path):", "import os\n", "class Reader:\n" * 20
LIMITS = ("--max-batch-total-tokens", "2048", "--max-batch-size", "8")

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def shard(start_server: StartServer) -> Iterator[tuple[ServerProcess, Path]]:
    """A server started by flags, and the socket of its first shard."""
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        prefix = Path(folder) / "text-generation-server"
        server = start_server("--shard-uds-path", str(prefix), *LIMITS)
        server.wait_ready()
        yield server, Path(f"{prefix}-0")
        server.kill()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(demo.model_path())


async def by_session(target: str, prompt_ids: list[int], new: int) -> list[int]:
    """What our own router would hear."""
    client = await GrpcEngineClient.connect(target, timeout=60)
    try:
        request = GenerationRequest(
            request_id=1,
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=new,
            ignore_eos=True,
        )
        said: list[int] = []
        async with asyncio.timeout(60):
            async for batch in client.submit(request):
                said += batch.token_ids
        return said
    finally:
        await client.close()


def a_request(client: ReflectionClient, request_id: int, text: str, new: int) -> Any:
    """Greedy, without end tokens."""
    stopping = {"max_new_tokens": new, "ignore_eos_token": True}
    request = client.message("Request", id=request_id, inputs=text, stopping_parameters=stopping)
    if client.descriptor.full_name == V3:
        request.add_special_tokens = True
    return request


def prefill(client: ReflectionClient, batch_id: int, request: Any) -> Any:
    return client.Prefill(batch={"id": batch_id, "requests": [request], "size": 1})


@pytest.mark.parametrize("service", [V2, V3])
def test_three_clients_of_which_one_leaves_and_one_never_receives(
    shard: tuple[ServerProcess, Path], tokenizer: Tokenizer, service: str
) -> None:
    """The call flow of TGI's architecture document, while our own router has work as well."""
    server, path = shard
    expected = {
        text: asyncio.run(by_session(f"unix:{path}", tokenizer.encode(text), 24))
        for text in (ONE, TWO, THREE)
    }
    body = {"inputs": ONE, "parameters": {"max_new_tokens": 60, "details": True}}
    heard = Heard()
    with ThreadPoolExecutor() as others, ReflectionClient(f"unix:{path}", service) as client:
        ours = [
            others.submit(httpx.post, f"{server.url}/generate", json=body, timeout=60)
            for _ in range(2)
        ]
        assert client.ServiceDiscovery().urls == [f"unix://{path}"]
        client.Info()
        client.Health()
        client.ClearCache()
        assert client.Warmup(max_prefill_tokens=64).max_supported_total_tokens == 2048

        batch1 = heard(prefill(client, 1, a_request(client, 1, ONE, 50))).batch
        for _ in range(2):
            batch1 = heard(client.Decode(batches=[batch1])).batch
        batch2 = heard(prefill(client, 2, a_request(client, 2, TWO, 24))).batch
        response = heard(client.Decode(batches=[batch1, batch2]))
        assert (response.batch.id, list(response.batch.request_ids)) == (1, [1, 2])
        left = client.FilterBatch(batch_id=1, request_ids=[2]).batch  # client 1 leaves
        assert (left.id, list(left.request_ids)) == (1, [2])
        response = heard(client.Decode(batches=[left]))
        # Client 3 leaves without having received anything.
        heard(prefill(client, 3, a_request(client, 3, THREE, 5)))
        client.ClearCache(id=3)
        with pytest.raises(grpc.RpcError) as caught:
            client.Decode(batches=[{"id": 3}])
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        heard.run_out(client, response.batch)
        answers = [each.result() for each in ours]
    assert heard.ids[1] == expected[ONE][:4]
    assert heard.ids[2] == expected[TWO]
    assert heard.ids[3] == expected[THREE][:1]
    words = [i for i in expected[TWO] if i not in tokenizer.special_ids]
    assert heard.ends[2].text == tokenizer.decode(words)
    for answer in answers:
        details = answer.raise_for_status().json()["details"]
        ids = [token["id"] for token in details["tokens"]][:24]
        assert ids == expected[ONE][: len(ids)]


def test_the_socket_goes_with_the_server(shard: tuple[ServerProcess, Path]) -> None:
    server, path = shard
    assert path.is_socket()
    assert path.stat().st_mode & 0o777 == 0o600
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == ExitCode.OK
    assert list(path.parent.iterdir()) == []


def test_tgis_own_programs_find_each_other() -> None:
    """As TGI's launcher starts them: a shard under a prefix, a router that is told its socket."""
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as name, contextlib.ExitStack() as ends:
        folder, model = Path(name), str(demo.model_path())
        [port] = free_ports(1)

        def start(program: str, *words: str) -> subprocess.Popen[bytes]:
            code = (
                f"import sys; from tgi_cli.cli.tgi_aliases import {program}; sys.exit({program}())"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", code, *words],
                env={**os.environ, "XDG_RUNTIME_DIR": name},
                start_new_session=True,
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        shard = start("server", "serve", model, "--uds-path", f"{folder}/tgi")
        router = start(
            *("router", "--tokenizer-name", model, "--master-shard-uds-path", f"{folder}/tgi-0"),
            *("--hostname", "127.0.0.1", "--port", str(port)),
        )

        def healthy() -> bool:
            assert shard.poll() is None
            assert router.poll() is None
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
            return False

        poll(healthy, START_SECONDS, "the router is healthy")
        body = {"inputs": ONE, "parameters": {"max_new_tokens": 5}}
        answer = httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60)
        assert answer.raise_for_status().json()["generated_text"]
        for process in (router, shard):
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_SECONDS) == ExitCode.OK
        assert list(folder.iterdir()) == [], "neither sockets nor folders are left"
