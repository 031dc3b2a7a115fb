"""What is left of a model server's start once its loop runs: adapters, then the socket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tgi_cli.model_server.adapters import EngineEndedError
from tgi_cli.model_server.grpc_server import EngineServer


class Startup:
    """Loads the adapters that were named, then serves, in a thread beside the engine's loop.

    Args:
        server: not started yet.
        adapters: each ``name=path``.
        path: of the socket.
        opened: called when the socket is open.
        failed: called when it will not be.

    Attributes:
        error: why not.
    """

    def __init__(
        self,
        server: EngineServer,
        adapters: Sequence[str],
        path: Path,
        opened: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self.error: BaseException | None = None
        self._server = server
        self._adapters = adapters
        self._path = path
        self._opened = opened
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name="opening", daemon=True)
        server.listen_to_engine()
        self._thread.start()

    def join(self) -> None:
        """Wait for it; once the engine's loop has ended it does not take long."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._adapters:
                name, _, path = item.partition("=")
                self._server.adapters.load(name, partial(Path, path))
            self._server.start(self._path)
        except EngineEndedError:
            return  # a signal came first, or the loop knows why
        except BaseException as error:  # whatever it is, the main thread raises it
            self.error = error
            self._failed()
        else:
            self._opened()
