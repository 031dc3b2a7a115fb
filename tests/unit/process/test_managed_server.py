"""A server that a run starts for itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tgi_cli.bench.settings import RequestSettings
from tgi_cli.bench.targets import resolve_target
from tgi_cli.errors import ConfigError, ModelError
from tgi_cli.process.managed_server import start_server


@pytest.mark.system
async def test_it_serves_and_is_gone_behind_the_block() -> None:
    said: list[str] = []
    async with asyncio.timeout(240):
        async with start_server(
            "", ["--max-batch-size=4"], shard=True, log_line=said.append
        ) as server:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                info = (await client.get(f"{server.url}/info")).json()
            assert info["model_id"] == "tgi-demo"
            assert server.socket is not None
            shard = await resolve_target(str(server.socket), RequestSettings())
            assert (shard.target.kind, shard.target.model) == ("shard-v3", "tgi-demo")
            assert shard.tokenizer.exact
            assert server.log.exists()
            assert server.command[:2] == ["tgi", "serve"]
            assert any(line.startswith("ready: ") for line in said)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
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


BENCH = """
import asyncio, sys
from tgi_cli.process.managed_server import start_server
async def main():
    async with start_server("", log_line=lambda line: print(line, flush=True)) as server:
        print(server.url, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.system
def test_it_ends_with_a_run_that_is_killed() -> None:
    run = subprocess.Popen([sys.executable, "-c", BENCH], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run, run.stdout as lines:
        url = next(line.strip() for line in lines if line.startswith("http"))
        run.kill()
    end = time.monotonic() + 60
    with httpx.Client(trust_env=False, timeout=60) as client:
        while time.monotonic() < end:
            try:
                client.get(f"{url}/health")
            except httpx.HTTPError:
                break
            time.sleep(0.1)
        else:
            raise AssertionError("the server outlived the run")
