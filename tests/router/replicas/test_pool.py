"""Requests over several replicas: which gets them, and what becomes of them when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fakes import engine_info
from tests.router.replicas.conftest import LENGTH, FakeReplica, pool_of
from tgi_cli.engine.messages import (
    Finished,
    FinishReason,
    GenerationRequest,
    Started,
    StepOutputs,
)
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.errors import ShardError
from tgi_cli.router.replicas.prefix_index import BLOCK_TOKENS
from tgi_cli.rpc.interface import Adapter, AdapterError, AdapterFault, Adapters
from tgi_cli.rpc.resubmission import Resubmission
from tgi_cli.rpc.streams import STOPPING, RequestStream, RequestStreams
from tgi_cli.sampling.params import SamplingParams

PROMPT = "import os " * 100
KEY = {"authorization": "Bearer key"}


class StreamingReplica:
    """The client's side of an engine, without one: its streams and what it would have sent."""

    def __init__(self) -> None:
        self.info = engine_info()
        self.adapters = Adapters()
        self.connected = True
        self.sent: list[GenerationRequest] = []
        self.cancelled: list[int] = []
        self.streams = RequestStreams(self.cancelled.append)
        self.resubmission = Resubmission(self.streams)

    @property
    def accepting(self) -> bool:
        return self.connected and not self.resubmission.refused

    @property
    def num_live(self) -> int:
        return len(self.streams)

    def is_live(self, request_id: int) -> bool:
        return request_id in self.streams

    def on_refused(self, take_over: Callable[..., bool]) -> None:
        self.resubmission.take_over = take_over

    def on_found(self, callback: Callable[[bool], None]) -> None:
        """Never called."""

    def submit(
        self, request: GenerationRequest, adapter: str = "", session: str = ""
    ) -> RequestStream:
        stream = self.streams.open(request.request_id)
        self.sent.append(request)
        self.resubmission.sent(request, adapter)
        return stream

    def adopt(self, stream: RequestStream, request: GenerationRequest, adapter: str) -> None:
        self.streams.adopt(request.request_id, stream)
        self.sent.append(request)
        self.resubmission.sent(request, adapter)

    def deliver(self, **outputs: Any) -> None:
        step = StepOutputs(**outputs)
        self.resubmission.check(step)
        self.streams.deliver(step)

    def token(self, request_id: int, token_id: int) -> None:
        self.deliver(
            request_ids=[request_id],
            token_ids=[token_id],
            logprobs=[0.0],
            top_ids=[[]],
            top_logprobs=[[]],
        )

    def refuse(self, request_id: int) -> None:
        self.deliver(finished=[Finished(request_id, FinishReason.DRAINING, STOPPING)])


def request(request_id: int, first: int = 0, **fields: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(range(first, first + 2 * BLOCK_TOKENS)),
        sampling=SamplingParams(),
        max_new_tokens=9,
        **fields,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.fixture
def two() -> list[StreamingReplica]:
    return [StreamingReplica(), StreamingReplica()]


async def test_a_prefix_stays_unless_its_replica_is_too_busy(two: list[StreamingReplica]) -> None:
    pool = pool_of(two, balance_abs_threshold=2)
    for number in range(4):
        pool.submit(request(number))
    assert [len(one.sent) for one in two] == [3, 1]
    for number in range(3):
        two[0].deliver(finished=[Finished(number, FinishReason.LENGTH)])
    pool.submit(request(9))
    assert len(two[0].sent) == 4
    reasons = {(replica, reason.value): n for (replica, reason), n in pool.routed.items()}
    assert reasons == {(0, "load"): 1, (0, "prefix"): 3, (1, "balance"): 1}


async def test_samples_of_a_prompt_share_a_replica(two: list[StreamingReplica]) -> None:
    pool = pool_of(two, balance_abs_threshold=0, balance_rel_threshold=1.0)
    pool.submit(request(1))
    pool.submit(request(2, first=9))
    for number in range(3, 9):
        pool.submit(request(number, first=9, fork_of=2))
    assert [len(one.sent) for one in two] == [1, 7]


async def test_what_a_draining_replica_refuses_goes_to_another(two: list[StreamingReplica]) -> None:
    pool = pool_of(two)
    first, second = pool.submit(request(1)), pool.submit(request(2))
    two[0].deliver(started=[Started(1, 5, 0)])
    two[0].token(1, 70)
    two[0].refuse(2)
    assert [one.request_id for one in two[1].sent] == [2]
    assert not two[0].accepting
    two[0].token(1, 71)  # what has started there finishes there
    assert (await anext(first)).token_ids == [70, 71]
    two[1].deliver(started=[Started(2, 5, 0)])
    two[1].token(2, 80)
    assert (await anext(second)).token_ids == [80]
    pool.submit(request(3))
    assert [one.request_id for one in two[1].sent] == [2, 3]
    second.cancel()
    assert (two[0].cancelled, two[1].cancelled) == ([], [2])


async def test_what_nobody_takes_ends_with_an_error(two: list[StreamingReplica]) -> None:
    pool = pool_of(two)
    stream = pool.submit(request(1))
    two[0].refuse(1)
    two[1].refuse(1)
    finished = (await anext(stream)).finished
    assert finished is not None
    assert (finished.reason, finished.error) == (FinishReason.ERROR, STOPPING)
    assert not pool.connected
    with pytest.raises(ShardError):
        pool.submit(request(2))


async def test_only_unstarted_requests_of_an_orderly_end_are_passed_on(
    two: list[StreamingReplica],
) -> None:
    pool = pool_of(two)
    streams = [pool.submit(request(number)) for number in (1, 2, 3)]
    two[0].deliver(started=[Started(1, 5, 0)])
    streams[2].cancel()
    two[0].connected = False
    two[0].resubmission.pass_on_all()
    two[0].streams.end("the model server is gone")
    assert [one.request_id for one in two[1].sent] == [2]
    finished = [batch.finished async for batch in streams[0]][-1]
    assert finished is not None
    assert finished.error == "the model server is gone"


async def test_limits_are_the_smallest(
    engines: list[FakeReplica], client: httpx.AsyncClient
) -> None:
    assert (await client.get("/info")).json()["max_total_tokens"] == LENGTH
    engines[1].restart(max_total_tokens=1024, max_input_tokens=1023)
    assert (await client.get("/info")).json()["max_total_tokens"] == 1024
    engines[1].restart(max_total_tokens=2 * LENGTH, max_input_tokens=2 * LENGTH - 1)
    assert (await client.get("/info")).json()["max_total_tokens"] == LENGTH


async def generate(client: httpx.AsyncClient, text: str = PROMPT, **more: Any) -> int:
    body = {"inputs": text, "parameters": {"max_new_tokens": 2, **more}}
    return (await client.post("/generate", json=body)).status_code


async def test_health_tells_the_replicas_apart(
    engines: list[FakeReplica], client: httpx.AsyncClient
) -> None:
    assert (await client.get("/health")).json() == {
        "status": "ok",
        "replicas": [{"replica": 0, "healthy": True}, {"replica": 1, "healthy": True}],
    }
    engines[0].connected = False
    found = await client.get("/health")
    assert found.status_code == 200
    assert found.json()["status"] == "degraded"
    assert [each["healthy"] for each in found.json()["replicas"]] == [False, True]
    assert [(await client.get(f"/health?replica={n}")).status_code for n in (0, 1)] == [503, 200]
    assert await generate(client) == 200
    assert len(engines[1].requests) == 1
    engines[1].is_healthy = False
    assert (await client.get("/health")).status_code == 503
    for wrong in ("2", "-1", "x", "", "0000000009", "0" * 5000, "1" * 5000):
        assert (await client.get(f"/health?replica={wrong}")).status_code == 422
    engines[1].connected = False
    assert await generate(client) == 503


async def test_a_silent_replica_does_not_delay_health(
    engines: list[FakeReplica], client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()
    monkeypatch.setattr(engines[0], "healthy", never.wait)
    assert (await client.get("/health")).json()["status"] == "degraded"


async def test_metrics_are_by_replica(
    engines: list[FakeReplica], client: httpx.AsyncClient
) -> None:
    assert await generate(client) == 200
    engines[1].connected = False
    text = (await client.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("replica"), sample.labels.get("reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for replica in "01":
        assert samples["tgi_queue_size", replica, None] == 3
        assert samples["tgi_batch_inference_duration_count", replica, None] == 0
    assert ("tgi_queue_size", None, None) not in samples
    assert samples["tgi_request_count_total", None, None] == 1, "the parser adds the suffix"
    assert [samples["tgi_replica_up", replica, None] for replica in "01"] == [1, 0]
    assert samples["tgi_replica_requests_total", "0", "load"] == 1
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


async def test_the_sum_of_metrics(engines: list[FakeReplica]) -> None:
    one, other = EngineMetrics(), EngineMetrics()
    one.counts["failed", "decode"], other.counts["failed", "decode"] = 2, 3
    one.histograms["total", "decode"].observe(0.5)
    other.histograms["total", "decode"].observe(0.5, 2)
    engines[0].measured, engines[1].measured = one, other
    found = await pool_of(engines).metrics()
    assert found.counts["failed", "decode"] == 5
    histogram = found.histograms["total", "decode"]
    assert (sum(histogram.counts), histogram.sum) == (3, 1.5)


HINTS = [
    ({"x-claude-code-session-id": "s"}, {}),
    ({"session-id": "s"}, {}),
    ({"session_id": "s"}, {}),
    ({}, {"prompt_cache_key": "s"}),
]


@pytest.mark.parametrize(("headers", "fields"), HINTS)
async def test_a_session_stays_where_it_was(
    engines: list[FakeReplica],
    client: httpx.AsyncClient,
    headers: dict[str, str],
    fields: dict[str, str],
) -> None:
    """Even if its prompts have nothing in common: others go to the least busy replica."""
    engines[0].num_live = 1

    async def ask(text: str, hinted: bool) -> None:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        more = {"json": body | fields, "headers": headers} if hinted else {"json": body}
        assert (await client.post("/v1/chat/completions", **more)).status_code == 200

    await ask("alpha", hinted=True)
    assert len(engines[1].requests) == 1
    engines[0].num_live, engines[1].num_live = 0, 1
    await ask("beta", hinted=True)
    assert len(engines[1].requests) == 2
    await ask("gamma", hinted=False)
    assert len(engines[0].requests) == 1


class TestAdapters:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "key"}

    @pytest.fixture(autouse=True)
    def enabled(self, engines: list[FakeReplica]) -> None:
        for engine in engines:
            engine.adapters = engine.there = Adapters(4)

    async def load(self, client: httpx.AsyncClient, name: str) -> int:
        body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
        return (await client.post("/v1/load_lora_adapter", json=body, headers=KEY)).status_code

    async def use(self, client: httpx.AsyncClient, name: str) -> int:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2, "adapter_id": name}}
        return (await client.post("/generate", json=body, headers=KEY)).status_code

    async def test_all_replicas_get_them(
        self, engines: list[FakeReplica], client: httpx.AsyncClient
    ) -> None:
        assert await self.load(client, "one") == 200
        assert [engine.there.names for engine in engines] == [["one"], ["one"]]
        assert await self.use(client, "one") == 200
        body = {"lora_name": "one"}
        answer = await client.post("/v1/unload_lora_adapter", json=body, headers=KEY)
        assert answer.status_code == 200
        assert [engine.there.names for engine in engines] == [[], []]

    async def test_a_failure_in_one_leaves_none(
        self, engines: list[FakeReplica], client: httpx.AsyncClient
    ) -> None:
        engines[1].fault = AdapterError("its rank is too high", "", AdapterFault.UNUSABLE)
        assert await self.load(client, "one") == 400
        engines[1].fault = None
        assert [engine.there.names for engine in engines] == [[], []]

    async def test_a_replica_that_was_away_gets_them_and_requests_only_then(
        self, engines: list[FakeReplica], client: httpx.AsyncClient
    ) -> None:
        engines[0].connected = False
        assert await self.load(client, "one") == 200
        assert engines[0].there.names == []
        engines[0].opened.clear()
        engines[0].restart()
        engines[1].num_live = 99
        assert await self.use(client, "one") == 200
        assert len(engines[1].requests) == 1
        engines[0].opened.set()
        await until(lambda: engines[0].there.names == ["one"])
        assert await self.use(client, "one") == 200
        assert len(engines[0].requests) == 1

    async def test_a_restarted_replica_gets_them_again(
        self, engines: list[FakeReplica], client: httpx.AsyncClient
    ) -> None:
        for engine in engines:
            engine.load_names("named")
        assert await self.load(client, "one") == 200
        engines[1].restart(Adapter("named", "/adapters/named"))
        await until(lambda: engines[1].there.names == ["named", "one"])
        assert [await self.use(client, name) for name in ("named", "one")] == [200, 200]
