"""Streaming of one continuation."""

from __future__ import annotations

from tgi_cli.llm.collector import Collector
from tgi_cli.llm.engine import RequestGroup
from tgi_cli.llm.outputs import Completion, GenerationError, Piece


class Stream:
    """An iterator over :class:`Piece` objects, for one thread.

    Closing it early (``break``, ``close()``, the end of its ``with`` block) cancels the request at
    the next step. Iterating raises GenerationError if the request failed, and EngineDeadError if
    the engine's loop has ended.

    Attributes:
        request_id: Id for :meth:`tgi_cli.llm.llm.LLM.cancel`, from any thread; the stream then
            ends with the finish reason ``cancelled``.
    """

    def __init__(self, group: RequestGroup, collector: Collector, owner: object) -> None:
        self._group = group
        self._owner = owner  # an LLM without references closes its engine
        self._collector = collector
        self.request_id = collector.request.request_id
        group.submit(collector.request)

    @property
    def completion(self) -> Completion:
        """The output so far, with the finish reason ``cancelled`` until it has ended."""
        return self._collector.completion()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        collector = self._collector
        while self._group.live:
            for update in self._group.receive():
                piece = collector.take(update)
                if collector.finish_reason == "error":
                    raise GenerationError.of([collector.completion()])
                if collector.finish_reason is not None:
                    self.close()
                if piece.token_ids or piece.text or piece.finish_reason is not None:
                    return piece
        raise StopIteration

    def close(self) -> None:
        """Cancel the request if it is live. May be called twice."""
        self._group.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
