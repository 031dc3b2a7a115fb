"""TLS on the HTTP port."""

from __future__ import annotations

import asyncio
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from tests.tools.certificate_authority import CertificateFiles
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.server import uvicorn_config


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def port(app: Starlette, config: RouterConfig, files: CertificateFiles) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    with_tls = replace(config, ssl_certfile=files.cert, ssl_keyfile=files.key)
    server = uvicorn.Server(uvicorn_config(app, with_tls))
    serving = asyncio.ensure_future(server._serve([listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def test_requests_and_streams_work_over_tls(port: int, files: CertificateFiles) -> None:
    trust = ssl.create_default_context(cafile=str(files.authority))
    async with httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=60
    ) as client:
        assert (await client.get("/health")).status_code == 200
        answer = await client.post("/generate_stream", json={"inputs": "hi"})
        assert answer.text.startswith("data: {")


async def test_old_tls_and_plain_text_are_refused(port: int, files: CertificateFiles) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://127.0.0.1:{port}/health")
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = ssl.create_default_context(cafile=str(files.authority))
        context.minimum_version = context.maximum_version = version
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.close()
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are old is the point
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", port, ssl=old)
