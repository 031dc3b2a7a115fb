"""The ``tgi serve`` of one model, on a port of the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time

import httpx

from tgi_cli.errors import ShardError
from tgi_cli.launcher.child_process import ChildProcess
from tgi_cli.logging import MODEL_VARIABLE
from tgi_cli.multi_model.config import ModelSpec
from tgi_cli.process import bind
from tgi_cli.process.proportional_memory import tree_memory
from tgi_cli.process.spawn import module_command

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
GRACE_SECONDS = 5
"""Grace period of requests in the model's own server, after that of the switch."""
_STOP_SECONDS = 30.0
"""Time for its processes to end."""
_POLL_SECONDS = 0.05
_PROBE_SECONDS = 5.0


class ModelProcess:
    """A model that is being loaded, or serves.

    Its processes end with this one, however this one ends: they inherit a pipe that only this
    process holds open. They have the keys of this server, too, so that its port is no way around
    them.

    Args:
        spec: The model.
        parent_fd: The pipe; see :mod:`tgi_cli.process.parent_death`.
        api_key: Keys that clients must send.
    """

    def __init__(self, spec: ModelSpec, parent_fd: int, api_key: str | None) -> None:
        self.spec = spec
        listener = bind.bind(_HOST, 0)
        try:
            self.url = bind.url(*bind.local_address(listener))
            command = [
                *("serve", spec.model_id, *spec.arguments),
                f"--hostname={_HOST}",
                f"--graceful-termination-timeout={GRACE_SECONDS}",
                f"--served-model-name={','.join(spec.names)}",
                f"--parent-fd={parent_fd}",
                f"--socket-fd={listener.fileno()}",
            ]
            self._child = ChildProcess(
                f"server of {spec.name}",
                ShardError,
                module_command("tgi_cli", *command),
                (parent_fd, listener.fileno()),
                {MODEL_VARIABLE: spec.name} | ({} if api_key is None else {"API_KEY": api_key}),
            )
        finally:
            listener.close()
        self._began = time.monotonic()
        self._ended = _ended(self._child)
        headers = {}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key.split(',')[0]}"
        self.client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=_PROBE_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )
        """For the requests of clients, which have their own keys."""
        self.own_headers = headers
        """For requests of this server."""

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def ready(self) -> float:
        """Wait until the model is served; return the seconds since the start.

        Raises:
            ShardError: Its processes have ended.
        """
        while not self._ended.done():
            try:
                answer = await self.client.get("/health", timeout=_PROBE_SECONDS)
                if answer.status_code == httpx.codes.OK:
                    return time.monotonic() - self._began
            except httpx.TransportError:
                pass  # the port does not listen before the model is loaded
            await asyncio.wait([self._ended], timeout=_POLL_SECONDS)
        raise self.failure()

    async def wait(self) -> None:
        """Wait for the end of its processes."""
        await asyncio.shield(self._ended)

    def failure(self) -> ShardError:
        """Why its processes have ended."""
        cause = self._child.end().cause
        return ShardError(f"{cause}; its log has the reason")

    async def memory(self) -> int:
        """Measure the bytes of its processes."""
        return await asyncio.to_thread(tree_memory, self._child.pid)

    async def stop(self) -> None:
        """End its processes: those of its requests that run have a few seconds."""
        if not self._ended.done():
            self._child.send(signal.SIGTERM)
            await asyncio.wait([self._ended], timeout=_STOP_SECONDS)
        if not self._ended.done():
            log.warning("the server of %s does not end; killing it", self.spec.name)
            self._child.kill()  # its children end with it
        await asyncio.wait([self._ended])
        await self.client.aclose()


def _ended(child: ChildProcess) -> asyncio.Future[None]:
    """A future that is done when the process and everything that it started have ended.

    In a thread of its own: those of the event loop's executor are few, and this one waits.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not ended.done():
            ended.set_result(None)

    def wait() -> None:
        child.wait()
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(finish)

    threading.Thread(target=wait, name=f"wait for {child.name}", daemon=True).start()
    return ended
