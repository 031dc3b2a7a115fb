"""A server that a run starts for itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tgi_cli.bench.managed_server import start_server
from tgi_cli.bench.settings import RequestSettings
from tgi_cli.bench.targets import resolve_target
from tgi_cli.errors import ConfigError, ModelError


@pytest.mark.system
async def test_it_serves_and_is_gone_behind_the_block() -> None:
    said: list[str] = []
    async with asyncio.timeout(90):
        async with start_server("", ["--max-batch-size=4"], shard=True, say=said.append) as server:
            async with httpx.AsyncClient(trust_env=False) as client:
                info = (await client.get(f"{server.url}/info")).json()
            assert info["model_id"] == "tgi-demo"
            assert server.socket is not None
            shard = await resolve_target(str(server.socket), RequestSettings())
            assert (shard.target.kind, shard.target.model) == ("shard-v3", "tgi-demo")
            assert shard.tokenizer.exact
            assert server.log.exists()
            assert server.command[:2] == ["tgi", "serve"]
            assert any(line.startswith("ready: ") for line in said)
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(server.url)
    assert not server.log.parent.exists()


async def test_a_model_that_cannot_be_served_is_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="tgi serve: ") as raised:
        async with start_server(str(tmp_path)):
            pass
    assert raised.value.remedy


async def test_flags_that_cannot_be_are_its_errors() -> None:
    with pytest.raises(ConfigError, match="no-such-flag"):
        async with start_server("", ["--no-such-flag"]):
            pass


def test_a_kept_command_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    program = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tgi_cli.process.parent_death", sys.executable, "-c", program],
        stdin=subprocess.PIPE,
    )
    try:
        end = time.monotonic() + 20
        while not (marker.exists() and marker.read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        pid = int(marker.read_text())
        assert keeper.stdin is not None
        keeper.stdin.close()  # as if this process had gone
        assert keeper.wait(20) == 128 + 15
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        keeper.kill()
