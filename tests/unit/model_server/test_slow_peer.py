"""A model server that a crowded machine lets wait is slow, not dead: its streams go on.

It is stopped for longer than every timer of gRPC would allow, with all of them made 50 times
shorter: the 15 s that once ended a session are 0.3 s here, and what is never set stays far away.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.model_server.fakes import request
from tgi_cli.rpc import channel_options
from tgi_cli.rpc.client import GrpcEngineClient

SHORTER = 50
TIMERS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
STOPPED_SECONDS = 3.0
LONG = 300
"""Tokens, of 0.1 s each: the server is lost long before the last one."""

SERVER = """
import sys, time
from dataclasses import replace
from pathlib import Path
from tests.unit.model_server.fakes import INFO, ScriptedEngine
from tests.unit.model_server.test_slow_peer import shorten
from tgi_cli.engine.messages import Cancel, Finished, FinishReason
from tgi_cli.model_server.grpc_server import EngineServer

shorten()
engine = ScriptedEngine()
EngineServer(engine, replace(INFO, max_total_tokens=1024)).start(Path(sys.argv[1]))
print("up", flush=True)
while True:
    asked = engine.inbox.get()
    if isinstance(asked, Cancel):
        continue
    ended = [Finished(asked.request_id, FinishReason.LENGTH)]
    last = asked.max_new_tokens - 1
    for token in range(last + 1):
        time.sleep(0.1)
        engine.put_tokens((asked.request_id, token), finished=ended if token == last else [])
"""


def shorten() -> None:
    """Make gRPC's timers short, in this process."""
    for name in ("SERVER", "CLIENT"):
        known = dict(getattr(channel_options, name))
        known |= {timer: max(known[timer] // SHORTER, 1) for timer in TIMERS if timer in known}
        setattr(channel_options, name, list(known.items()))


@pytest.fixture
def server() -> Iterator[tuple[Path, int]]:
    """Its socket and its process's id."""
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        path = Path(folder) / "engine.sock"
        command = [sys.executable, "-c", SERVER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"up\n"
                yield path, process.pid
            finally:
                process.kill()


async def test_a_model_server_that_is_stopped_for_a_while_keeps_its_streams(
    server: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SERVER", "CLIENT"):
        monkeypatch.setattr(
            channel_options, name, getattr(channel_options, name)
        )  # put back at the end
    shorten()
    path, pid = server
    client = await GrpcEngineClient.connect(f"unix:{path}", timeout=60, stall_seconds=60)
    try:
        stream = client.submit(request(client.next_request_id(), max_new_tokens=25))
        tokens: list[int] = []
        stopped = False
        async with asyncio.timeout(40):
            async for batch in stream:
                tokens += batch.token_ids
                if not stopped and len(tokens) >= 3:
                    stopped = True
                    os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(STOPPED_SECONDS)
                    assert client.connected
                    os.kill(pid, signal.SIGCONT)
        assert batch.finished is not None
        assert not batch.finished.error
        assert tokens == list(range(25))
    finally:
        await client.close()


async def test_a_hung_model_server_is_given_up_after_the_watchdog_timeout(
    server: tuple[Path, int],
) -> None:
    path, pid = server
    client = await GrpcEngineClient.connect(f"unix:{path}", timeout=60, stall_seconds=2)
    try:
        stream = client.submit(request(client.next_request_id(), max_new_tokens=LONG))
        async with asyncio.timeout(40):
            async for batch in stream:
                if 0 in batch.token_ids:  # perhaps with more, where this process was late
                    os.kill(pid, signal.SIGSTOP)
        assert batch.finished is not None
        assert "has not moved for 2 s" in batch.finished.error
    finally:
        await client.close()


async def test_a_killed_model_server_is_noticed_at_once(server: tuple[Path, int]) -> None:
    path, pid = server
    client = await GrpcEngineClient.connect(f"unix:{path}", timeout=60, stall_seconds=60)
    try:
        stream = client.submit(request(client.next_request_id(), max_new_tokens=LONG))
        async with asyncio.timeout(40):
            async for batch in stream:
                if 0 in batch.token_ids:  # perhaps with more, where this process was late
                    os.kill(pid, signal.SIGKILL)
        assert batch.finished is not None
        assert batch.finished.error == "the model server is gone"
    finally:
        await client.close()
