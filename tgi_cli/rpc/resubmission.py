"""Passes requests that a draining engine refuses on to another engine.

An engine that drains refuses what arrives from then on, and has computed nothing of it. Its client
keeps the requests that have not started, so that the owner of another engine can submit them there,
with the stream that their reader waits for.
"""

from __future__ import annotations

from collections.abc import Callable

from tgi_cli.engine.messages import FinishReason, GenerationRequest, StepOutputs
from tgi_cli.rpc.streams import RequestStream, RequestStreams

TakeOver = Callable[[RequestStream, GenerationRequest, str], bool]
"""Submits a request for an adapter to another engine; returns whether it could."""


class Resubmission:
    """The requests of one engine that it may still refuse.

    Args:
        streams: Streams of the engine's client.

    Attributes:
        take_over: Submits them elsewhere. Default: they end with an error.
        refused: Whether the engine has refused any since the last :meth:`clear`.
    """

    def __init__(self, streams: RequestStreams) -> None:
        self.take_over: TakeOver | None = None
        self.refused = False
        self._streams = streams
        self._unstarted: dict[int, tuple[GenerationRequest, str]] = {}

    def sent(self, request: GenerationRequest, adapter: str) -> None:
        """A request has been sent."""
        if self.take_over is not None:
            self._unstarted[request.request_id] = (request, adapter)

    def forget(self, request_id: int) -> None:
        """A request has been cancelled."""
        self._unstarted.pop(request_id, None)

    def clear(self) -> None:
        """Begin another session with the engine."""
        self.refused = False
        self._unstarted.clear()

    def check(self, outputs: StepOutputs) -> None:
        """Pass on what these outputs refuse, before they are delivered."""
        for started in outputs.started:
            self._unstarted.pop(started.request_id, None)
        for finished in outputs.finished:
            request_id = finished.request_id
            unstarted = self._unstarted.pop(request_id, None)
            if finished.reason is not FinishReason.DRAINING:
                continue
            self.refused = True
            if unstarted is not None:
                self._pass_on(*unstarted)

    def pass_on_all(self) -> None:
        """The engine has ended the session in good order: it will not start what is left."""
        unstarted, self._unstarted = self._unstarted, {}
        for request, adapter in unstarted.values():
            self._pass_on(request, adapter)

    def _pass_on(self, request: GenerationRequest, adapter: str) -> None:
        stream = self._streams.take(request.request_id)
        if stream is None:
            return
        if self.take_over is None or not self.take_over(stream, request, adapter):
            self._streams.adopt(request.request_id, stream)
