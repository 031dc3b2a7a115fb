"""Leave a router in the middle of a pipeline: ``python -m tests.router.leave_pipeline MODEL``.

Prints ``left``, and the status of a request that comes later.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

from tests.router.fakes import FakeEngine
from tests.router.wire import BODY, POST
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.http.protocol import BoundedProtocol
from tgi_cli.text.bundle import TextBundle


async def main(model_path: Path) -> None:
    """See the module."""
    logging.basicConfig(level=logging.INFO)
    text = TextBundle.load(model_path)
    engine = FakeEngine(text.tokenizer)
    engine.pause = 0.05
    config = RouterConfig(model_path=model_path, model_id="a", engine_url="unix:///none")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, text, config),
            http=BoundedProtocol,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.ensure_future(server._serve([listener]))
    request = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    for pause in (0.0, 0.01, 0.05, 0.1):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request * 40)
        await asyncio.sleep(pause)
        writer.transport.abort()
    await asyncio.sleep(1.0)
    print("left")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    print((await reader.read()).split()[1].decode())
    writer.close()
    server.should_exit = True
    await serving


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
