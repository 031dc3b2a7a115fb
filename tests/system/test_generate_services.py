"""TGI's own services of a real model server process, on the socket that TGI's router looks for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.system.conftest import START_SECONDS, STOP_SECONDS, poll
from tests.tools.reflected import Reflected
from tests.unit.rpc.generate_fakes import V2, V3, Heard
from tgi_cli import demo
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.rpc.client import GrpcEngineClient
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.text.tokenizer import Tokenizer

PROGRAM = """
import sys
from functools import partial
from pathlib import Path
from tgi_cli.config import ServeConfig
from tgi_cli.rpc.generate_front import GenerateOptions
from tgi_cli.rpc.model_server import run_model_server
from tgi_cli.text.generate_texts import load_texts

model, folder = Path(sys.argv[1]), Path(sys.argv[2])
options = GenerateOptions(partial(load_texts, model, False), folder / "text-generation-server")
serve = ServeConfig(model_id="demo", max_batch_total_tokens=2048, max_batch_size=8)
run_model_server(serve, model, folder / "engine.sock", options)
"""
PROMPT = "def read_json(path):"

pytestmark = pytest.mark.system


async def by_session(target: str, prompt_ids: list[int], new: int) -> list[int]:
    client = await GrpcEngineClient.connect(target, timeout=30)
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


def test_a_shard_answers_tgis_router_and_ours_alike() -> None:
    model = demo.model_path()
    tokenizer = Tokenizer.load(model)
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as name:
        folder = Path(name)
        socket = folder / "text-generation-server-0"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(model), name], start_new_session=True
        )
        try:
            poll(
                lambda: socket.exists() or process.poll() is not None, START_SECONDS, "it is there"
            )
            assert process.poll() is None
            expected = asyncio.run(
                by_session(f"unix:{folder}/engine.sock", tokenizer.encode(PROMPT), 24)
            )
            for service in (V2, V3):
                heard = Heard()
                with Reflected(f"unix:{socket}", service) as client:
                    assert client.ServiceDiscovery().urls == [f"unix://{socket}"]
                    request = client.message(
                        "Request",
                        id=7,
                        inputs=PROMPT,
                        stopping_parameters={"max_new_tokens": 24, "ignore_eos_token": True},
                    )
                    if service == V3:
                        request.add_special_tokens = True
                    batch = {"id": 1, "requests": [request], "size": 1}
                    heard.run_out(client, heard(client.Prefill(batch=batch)).batch)
                assert heard.ids[7] == expected
                words = [i for i in expected if i not in tokenizer.special_ids]
                assert heard.ends[7].text == tokenizer.decode(words)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_SECONDS) == 0
            assert list(folder.iterdir()) == []
        finally:
            process.kill()
            process.wait()
