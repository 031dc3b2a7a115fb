"""A shard of generate.v3 that computes nothing, in a thread, on a socket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tgi_cli.rpc import services
from tgi_cli.tgi_grpc import generate_v3_pb2 as messages


class FakeShard:
    """Decodes until every request has all its tokens.

    Args:
        prefill, decode: seconds that a call takes.
        fail: names of calls that fail, each so often.
    """

    def __init__(
        self, prefill: float = 0.0, decode: float = 0.0, fail: dict[str, int] | None = None
    ) -> None:
        self._seconds = {"Prefill": prefill, "Decode": decode}
        self._fail = fail or {}
        self.calls: list[tuple[str, Any]] = []
        self.left = 0
        self.urls: list[str] = []

    def _called(self, name: str, request: Any, context: Any) -> None:
        self.calls.append((name, request))
        if self._fail.get(name, 0) > 0:
            self._fail[name] -= 1
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no blocks left")
        time.sleep(self._seconds.get(name, 0.0))

    def ServiceDiscovery(self, request: Any, context: Any) -> Any:
        return messages.ServiceDiscoveryResponse(urls=self.urls)

    def Info(self, request: Any, context: Any) -> Any:
        return messages.InfoResponse(dtype="torch.float16", device_type="cuda", block_size=16)

    def ClearCache(self, request: Any, context: Any) -> Any:
        self._called("ClearCache", request, context)
        return messages.ClearCacheResponse()

    def Prefill(self, request: Any, context: Any) -> Any:
        self._called("Prefill", request, context)
        asked = [r.stopping_parameters.max_new_tokens for r in request.batch.requests]
        self.left = max(asked) - 1
        return messages.PrefillResponse(batch=self._batch())

    def Decode(self, request: Any, context: Any) -> Any:
        self._called("Decode", request, context)
        self.left -= 1
        return messages.DecodeResponse(batch=self._batch())

    def _not_used(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "the benchmark does not call this")

    Warmup = FilterBatch = Health = _not_used

    def _batch(self) -> Any:
        return messages.CachedBatch(id=0, request_ids=[0], size=1) if self.left > 0 else None

    def named(self, name: str) -> list[Any]:
        """The requests of all calls of that name."""
        return [request for called, request in self.calls if called == name]

    @contextlib.contextmanager
    def serving(self, path: Path) -> Iterator[FakeShard]:
        server = grpc.server(ThreadPoolExecutor(4))
        services.add_to_server(messages, self, server)
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield self
        finally:
            server.stop(0).wait()
