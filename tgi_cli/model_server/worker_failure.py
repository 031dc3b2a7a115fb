"""What happens when a process that computes the model is lost while requests run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import Fail
from tgi_cli.errors import ExitCode, TgiError
from tgi_cli.model_server.grpc_server import EngineServer

log = logging.getLogger(__name__)

HANGING_SECONDS = 5.0
"""That the loop may take to end, once it is told to; by then every operation that waits for the
lost process has failed, but for those that a driver holds."""


class Watched(Protocol):
    """A worker that knows of its own loss."""

    def watch(self, on_lost: Callable[[TgiError], None]) -> None:
        """Have ``on_lost`` called, once and from any thread."""
        ...


@contextmanager
def stop_on_worker_failure(
    worker: Watched, engine: EngineCore, server: EngineServer
) -> Iterator[None]:
    """Around the engine's loop: end it when the worker is lost, whatever it waits for.

    A loop that cannot be ended ends with the process, after clients were told why.
    """
    ended = threading.Event()

    def end(error: TgiError) -> None:
        engine.inbox.put(Fail(error.cause, error.remedy))
        if not ended.wait(HANGING_SECONDS):
            server.stop(error.cause)
            log.error("%s; a step hangs on the device, ending the process", error.cause)
            os._exit(ExitCode.SHARD_FAILED)

    def on_lost(error: TgiError) -> None:
        threading.Thread(target=end, args=(error,), name="loss", daemon=True).start()

    worker.watch(on_lost)
    try:
        yield
    finally:
        ended.set()
