"""The router's real process over a scripted engine: ``python -m tests.router.serve_fake``.

Arguments: the model's folder, the file descriptor to serve on (or a port with ``-p``), seconds
between tokens, seconds of grace.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.router.fakes import FakeEngine
from tgi_cli.errors import TgiError
from tgi_cli.router import running_app, server
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.tokenizer import Tokenizer


def serve(engine: FakeEngine, config: RouterConfig) -> int:
    """Run a router over ``engine`` until it is stopped; the exit status, as a command's."""

    class Client:
        @classmethod
        async def connect(cls, target: str, timeout: float | None, **_: Any) -> Any:  # noqa: ASYNC109
            assert target == config.engine_url
            return engine

    running_app.GrpcEngineClient = Client  # type: ignore[assignment,misc]
    try:
        server.run_router(config)
    except TgiError as error:
        print(f"error: {error.cause}", file=sys.stderr)
        return int(error.exit_code)
    return 0


def main() -> int:
    """The exit status, as a command's."""
    model_path, where, pause, grace = sys.argv[1:5]
    engine = FakeEngine(Tokenizer.load(Path(model_path)), "one two three four five six seven")
    engine.pause = float(pause)
    port = int(where.removeprefix("-p")) if where.startswith("-p") else None
    config = RouterConfig(
        model_path=Path(model_path),
        model_id="acme/tiny",
        engine_url="unix:///engine",
        socket_fd=None if port is not None else int(where),
        hostname="127.0.0.1",
        port=port or 0,
        graceful_termination_timeout=int(grace),
    )
    return serve(engine, config)


if __name__ == "__main__":
    sys.exit(main())
