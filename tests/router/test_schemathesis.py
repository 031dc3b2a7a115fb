"""No request that the API's document allows, or forbids, makes the server fail.

schemathesis (https://schemathesis.readthedocs.io) draws requests from the document: what it
allows, and what it does not. Every answer must be one that the document tells. The engine is a
script, but each request for it is encoded as on its way to a real one.

``TGI_FUZZ_CASES`` draws more of them, and other ones each time.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.router.contracts import own
from tests.router.fakes import FakeEngine, FakeStream
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.router.api.openapi import endpoints_of
from tgi_cli.router.app import ROUTES, create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.rpc import codec
from tgi_cli.text.bundle import TextBundle

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("TGI_FUZZ_CASES", "1300"))
ALLOWED, FORBIDDEN = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
DRAWN = [
    (method, path, mode)
    for (method, path), endpoint in endpoints_of(ROUTES).items()
    if endpoint.operation.body or "{" in path
    for mode in ([ALLOWED, FORBIDDEN] if endpoint.operation.body else [ALLOWED])
]
"""What there is more than one request to; test_contract calls the others. No path is forbidden."""

CHECKS: list[Any] = [status_code_conformance, content_type_conformance, response_schema_conformance]


KEY = {"authorization": "Bearer key"}


class WireEngine(FakeEngine):
    """Takes only what can be sent to a real engine."""

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> FakeStream:
        sent = codec.encode_submit(request, adapter).SerializeToString()
        assert sent
        return super().submit(request, adapter)


class Server:
    """The router in process, and its own document."""

    def __init__(self, model_path: Path, text: TextBundle) -> None:
        self.engine = WireEngine(text.tokenizer)
        self.engine.load_names("fox")
        config = RouterConfig(
            model_path=model_path, model_id="acme/tiny", engine_url="unix:///x", api_key="key"
        )
        self.app = create_app(self.engine, text, config)
        self.runner = asyncio.Runner()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router", headers=KEY)
        self.document = self.run(self.client.get("/api-doc/openapi.json")).json()
        self.schema = schemathesis.openapi.from_dict(self.document)
        self.contract = own(self.document)
        self.statuses: Counter[int] = Counter()

    def run(self, call: object) -> httpx.Response:
        answer: httpx.Response = self.runner.run(call)  # type: ignore[arg-type]
        return answer

    def send(self, case: schemathesis.Case) -> httpx.Response:
        """The answer to what schemathesis drew; every other id of a response is of a stored one."""
        if "response_id" in case.path_parameters and self.statuses.total() % 2:
            fields = {"input": "hi", "background": True}
            stored = self.run(self.client.post("/v1/responses", json=fields)).json()
            case.path_parameters["response_id"] = stored["id"]
        asked = case.as_transport_kwargs(base_url="http://router")
        asked.pop("cookies", None)
        # Header values are bytes; those of the forbidden need not be ASCII (RFC 9110, 5.5).
        asked["headers"] = httpx.Headers(
            [(name.encode(), value.encode("latin-1")) for name, value in asked["headers"].items()]
        )
        asked["headers"].pop("x-api-key", None)  # one drawn beside ours is a 401 at once
        asked["headers"].update(KEY)
        if "data" in asked:
            data = asked.pop("data")
            asked["content"] = data.encode() if isinstance(data, str) else data
        answer = self.run(self.client.request(**asked))
        self.statuses[answer.status_code] += 1
        return answer


@pytest.fixture(scope="module")
def server(model_path: Path, text: TextBundle) -> Iterator[Server]:
    server = Server(model_path, text)
    yield server
    server.run(server.client.aclose())
    server.runner.close()
    server.app.state.router.workers.close()


@pytest.mark.parametrize(("method", "path", "mode"), DRAWN)
def test_every_answer_conforms_to_the_document(
    server: Server, method: str, path: str, mode: GenerationMode
) -> None:
    operation = server.schema[path][method]

    @settings(
        max_examples=math.ceil(CASES / len(DRAWN)),
        derandomize="TGI_FUZZ_CASES" not in os.environ,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        answer = server.send(case)
        assert answer.status_code < 500 or answer.status_code == 504  # a deadline that was drawn
        if answer.headers["content-type"] == "text/event-stream":
            # schemathesis reads OpenAPI 3.2 into it: the schema of the event, not of its data.
            server.contract.check(f"{method} {path}", answer)
        else:
            case.validate_response(answer, checks=CHECKS)

    check()
    assert server.app.state.router.admission.in_flight == 0


def test_requests_were_many_and_varied(server: Server) -> None:
    assert server.statuses.total() >= CASES
    assert server.statuses[200] > CASES / 8
    assert server.statuses[400] + server.statuses[422] > CASES / 4
