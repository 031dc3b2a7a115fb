"""The router's process: ports, signals, draining."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.router.sse import events
from tgi_cli.errors import AddressInUseError, ConfigError, ModelError
from tgi_cli.process.bind import bind
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.server import run_router

pytestmark = pytest.mark.system

Start = Callable[..., Awaitable[tuple[asyncio.subprocess.Process, str]]]


@pytest.fixture
async def start(model_path: Path) -> AsyncIterator[Start]:
    running: list[asyncio.subprocess.Process] = []

    async def launch(pause: float = 0.0, grace: int = 10) -> tuple[asyncio.subprocess.Process, str]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.set_inheritable(True)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.router.serve_fake",
                str(model_path), str(listener.fileno()), str(pause), str(grace),
                pass_fds=[listener.fileno()], stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        running.append(process)
        async with httpx.AsyncClient() as client, asyncio.timeout(120):
            while True:
                try:
                    if (await client.get(f"{url}/health")).status_code == 200:
                        return process, url
                except httpx.TransportError:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)

    yield launch
    for process in running:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> str:
    """What it logged, once it has ended well."""
    _, logged = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"Traceback" not in logged, logged.decode()
    return logged.decode()


async def request_in_flight(client: httpx.AsyncClient) -> None:
    """Wait for the router to have one."""
    async with asyncio.timeout(60):
        while True:
            metrics = (await client.get("/metrics")).text
            if re.search(r"^tgi_request_in_flight\S* 1$", metrics, re.MULTILINE):
                return
            await asyncio.sleep(0.02)


async def until_it_drains(client: httpx.AsyncClient) -> None:
    """Wait until the router has handled a signal."""
    async with asyncio.timeout(60):
        while (await client.get("/health")).status_code != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_sigterm_drains(start: Start) -> None:
    """New requests get 503, also on new connections; the stream in flight ends well."""
    process, url = await start(pause=0.3, grace=60)
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/generate_stream", json={"inputs": "x"}) as answer,
    ):
        lines = answer.aiter_lines()
        text = await anext(lines) + "\n"
        process.send_signal(signal.SIGTERM)
        await until_it_drains(client)
        refused = await client.post("/generate", json={"inputs": "x"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        async for line in lines:
            text += line + "\n"
    found = events(text.rstrip("\n") + "\n\n")
    assert found[-1]["generated_text"] == "one two three four five six seven"
    assert "draining 1 requests" in await ended(process)


async def test_grace_period_ends_requests(start: Start) -> None:
    process, url = await start(pause=1.0, grace=1)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        pending = asyncio.ensure_future(client.post("/generate_stream", json={"inputs": "x"}))
        await request_in_flight(client)
        process.send_signal(signal.SIGINT)
        *_, error = events((await pending).text)
    assert error["error_type"] == "generation"
    assert "shutting down" in error["error"]
    assert "1 requests did not end within 1 s" in await ended(process)


async def test_idle_router_ends_at_once(start: Start) -> None:
    process, url = await start()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.get("/info")).json()["model_id"] == "acme/tiny"
        process.send_signal(signal.SIGTERM)  # an idle connection does not delay the end
        await ended(process)


async def test_second_signal_ends_at_once(start: Start) -> None:
    process, url = await start(pause=1.0, grace=60)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        pending = asyncio.ensure_future(client.post("/generate", json={"inputs": "x"}))
        await request_in_flight(client)
        process.send_signal(signal.SIGTERM)
        await until_it_drains(client)
        process.send_signal(signal.SIGTERM)  # the same, which came twice
        await asyncio.sleep(1.2)
        with contextlib.suppress(ProcessLookupError):  # on a slow machine the last one was another
            process.send_signal(signal.SIGTERM)
        answer = await pending
    assert answer.status_code == 424
    assert "shutting down" in answer.json()["error"]
    assert "second signal" in await ended(process)


@pytest.mark.parametrize("bound_before", [False, True])
async def test_taken_port_is_a_one_line_error(model_path: Path, bound_before: bool) -> None:
    with bind("127.0.0.1", 0) as bound, bind(*bound.getsockname()) as other:
        other.listen()
        bound.set_inheritable(True)
        port = bound.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.router.serve_fake",
            str(model_path), str(bound.fileno()) if bound_before else f"-p{port}", "0", "1",
            pass_fds=[bound.fileno()], stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, logged = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == AddressInUseError.exit_code
    cause = f"cannot serve on 127.0.0.1 port {port}: " if bound_before else f"port {port} is in use"
    assert logged.decode().startswith(f"error: {cause}")
    assert len(logged.splitlines()) == 1


def test_an_invalid_hostname_is_an_error(config: RouterConfig) -> None:
    with pytest.raises(ConfigError, match=r"--hostname '999\.1\.1\.1'"):
        run_router(replace(config, hostname="999.1.1.1", port=0))


def test_missing_tokenizer_is_a_model_error(config: RouterConfig, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        run_router(replace(config, model_path=tmp_path, hostname="127.0.0.1", port=0))


def test_a_router_of_plain_chats_imports_nothing_heavy() -> None:
    import subprocess

    script = (
        "import sys, tgi_cli.router.server, tgi_cli.demo as demo\n"
        "from tgi_cli.router import running_app\n"
        "running_app.TextBundle.load(\n"
        "    demo.model_path(), tool_call_parser='auto', reasoning_parser='auto'\n"
        ")\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'huggingface_hub', 'llguidance'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
