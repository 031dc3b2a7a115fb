"""Requests with images over a real socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.unit.model_server.fakes import INFO, ScriptedEngine, request
from tgi_cli.engine.messages import GenerationRequest, ImageInput
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.rpc.client import GrpcEngineClient

PIXELS = np.arange(1 << 20, dtype=np.float32).reshape(64, -1)


def image(number: int, start: int) -> ImageInput:
    return ImageInput(
        digest=bytes([number]) * 32,
        spans=((start, 1),),
        tensors={"pixel_values": PIXELS * number},
        grid=(1, 1),
    )


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def path(engine: ScriptedEngine) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        found = Path(folder) / "engine.sock"
        server = EngineServer(engine, replace(INFO, vision=True, max_image_rows=16))
        server.start(found)
        yield found
        engine.outbox.put(None)
        server.stop()


@pytest_asyncio.fixture
async def client(path: Path) -> AsyncIterator[GrpcEngineClient]:
    client = await GrpcEngineClient.connect(f"unix:{path}", timeout=60)
    yield client
    await client.close()


async def taken(engine: ScriptedEngine) -> GenerationRequest:
    found: Any = await engine.taken()
    assert isinstance(found, GenerationRequest)
    return found


async def test_the_client_knows_that_the_model_sees(client: GrpcEngineClient) -> None:
    assert client.info.vision
    assert client.info.max_image_rows == 16


async def test_images_arrive_with_their_requests(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    first = request(1, images=(image(1, 0), image(2, 2)))
    client.submit(first)
    client.submit(first.fork(2, 1))
    client.submit(request(3))
    client.submit(request(4, images=(image(3, 1),)))
    lead, fork, plain, other = [await taken(engine) for _ in range(4)]
    for each in (lead, fork):
        assert [found.spans for found in each.images] == [((0, 1),), ((2, 1),)]
        for number, found in enumerate(each.images, 1):
            assert found.digest == bytes([number]) * 32
            assert found.grid == (1, 1)
            assert np.array_equal(found.tensors["pixel_values"], PIXELS * number)
    assert fork.fork_of == lead.request_id
    assert plain.images == ()
    assert np.array_equal(other.images[0].tensors["pixel_values"], PIXELS * 3)


async def test_a_request_may_be_cancelled_before_its_images_are_sent(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    stream = client.submit(request(1, images=(image(1, 0),)))
    stream.cancel()
    found = await taken(engine)
    assert found.images
    cancel: Any = await engine.taken()
    assert cancel.request_id == found.request_id
