"""Server and client over a real socket, around an engine that is two queues."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from tests.unit.model_server.fakes import INFO, ScriptedEngine, request, until
from tgi_cli.engine.messages import (
    Cancel,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    Shutdown,
    Started,
    StepOutputs,
    VerifiedDrafts,
)
from tgi_cli.engine.metrics import EngineLoad
from tgi_cli.errors import ShardError
from tgi_cli.model_server.grpc_server import EngineServer
from tgi_cli.model_server.main import shut_down
from tgi_cli.model_server.session import ClientSession
from tgi_cli.process.heartbeat import HeartbeatWriter
from tgi_cli.rpc import codec, engine_pb2
from tgi_cli.rpc.client import GrpcEngineClient, fetch_info
from tgi_cli.rpc.interface import GONE, Adapter, Adapters, TokenBatch, TokenStream
from tgi_cli.rpc.services import make_stub
from tgi_cli.rpc.streams import STOPPING
from tgi_cli.sampling.params import SamplingParams


@pytest.fixture
def socket_path() -> Iterator[Path]:
    # Not tmp_path: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tgi-test-") as folder:
        yield Path(folder) / "engine.sock"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(engine: ScriptedEngine, socket_path: Path) -> Iterator[EngineServer]:
    server = EngineServer(engine, INFO)
    server.start(socket_path)
    yield server
    engine.outbox.put(None)
    server.stop()


@pytest_asyncio.fixture
async def client(server: EngineServer, socket_path: Path) -> AsyncIterator[GrpcEngineClient]:
    client = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    yield client
    await client.close()


async def collect(stream: TokenStream) -> TokenBatch:
    """All batches of a stream as one."""
    total = TokenBatch()
    async with asyncio.timeout(60):
        async for batch in stream:
            total.token_ids += batch.token_ids
            total.logprobs += batch.logprobs
            total.top_ids += batch.top_ids
            total.top_logprobs += batch.top_logprobs
            total.started = batch.started or total.started
            assert total.finished is None, "a batch after the last"
            total.finished = batch.finished
    return total


async def test_the_client_gets_the_engines_info(
    client: GrpcEngineClient, socket_path: Path
) -> None:
    assert client.info == INFO
    assert client.connected
    assert await asyncio.to_thread(fetch_info, f"unix:{socket_path}", 60) == INFO


async def test_tokens_reach_their_streams(client: GrpcEngineClient, engine: ScriptedEngine) -> None:
    first, second = client.submit(request(10)), client.submit(request(11))
    a, b = await engine.taken(), await engine.taken()
    assert isinstance(a, GenerationRequest)
    assert isinstance(b, GenerationRequest)
    assert a.prompt_ids == (3, 4, 5)
    assert a.sampling.seed == 7
    engine.put_tokens((a.request_id, 50), started=[Started(a.request_id, 123, 4)])
    engine.put_tokens((b.request_id, 60), (a.request_id, 51))
    engine.outbox.put(
        StepOutputs(
            request_ids=[b.request_id],
            token_ids=[61],
            logprobs=[-0.25],
            top_ids=[[61, 7]],
            top_logprobs=[[-0.25, -2.0]],
            finished=[
                Finished(a.request_id, FinishReason.EOS_TOKEN),
                Finished(b.request_id, FinishReason.LENGTH),
            ],
        )
    )
    got = await collect(first)
    assert got.token_ids == [50, 51]
    assert got.started == Started(10, 123, 4)
    assert got.finished == Finished(10, FinishReason.EOS_TOKEN)
    got = await collect(second)
    assert got.token_ids == [60, 61]
    assert got.logprobs == [-0.5, -0.25]
    assert got.top_ids == [[], [61, 7]]
    assert got.top_logprobs == [[], [-0.25, -2.0]]


async def test_two_clients_may_use_the_same_ids(
    client: GrpcEngineClient, engine: ScriptedEngine, socket_path: Path
) -> None:
    other = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    mine = client.submit(request(1))
    a = await engine.taken()
    theirs = other.submit(request(1))
    b = await engine.taken()
    assert a.request_id != b.request_id  # type: ignore[union-attr]
    engine.put_tokens(
        (b.request_id, 9),  # type: ignore[union-attr]
        (a.request_id, 8),  # type: ignore[union-attr]
        finished=[
            Finished(a.request_id, FinishReason.LENGTH),  # type: ignore[union-attr]
            Finished(b.request_id, FinishReason.LENGTH),  # type: ignore[union-attr]
        ],
    )
    assert (await collect(mine)).token_ids == [8]
    assert (await collect(theirs)).token_ids == [9]
    await other.close()


async def test_a_live_id_is_refused_and_its_request_continues(
    engine: ScriptedEngine, server: EngineServer, socket_path: Path
) -> None:
    async with grpc.aio.insecure_channel(f"unix:{socket_path}") as channel:
        call = make_stub(engine_pb2, channel).Session()
        await call.write(codec.encode_submit(request(5)))
        taken = await engine.taken()
        await call.write(codec.encode_submit(request(5)))
        refused = codec.decode_step(await call.read())
        assert [(f.request_id, f.reason) for f in refused.finished] == [(5, FinishReason.ERROR)]
        assert "in use" in refused.finished[0].error
        assert engine.inbox.empty()
        assert isinstance(taken, GenerationRequest)
        engine.put_tokens(
            (taken.request_id, 42), finished=[Finished(taken.request_id, FinishReason.LENGTH)]
        )
        ended = codec.decode_step(await call.read())
        assert ended.token_ids == [42]
        # The id is free again.
        await call.write(codec.encode_submit(request(5)))
        assert isinstance(await engine.taken(), GenerationRequest)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt_ids": ()}, "no tokens"),
        ({"prompt_ids": (3, 100)}, "vocabulary"),
        ({"prompt_ids": (3,) * 21, "max_new_tokens": 1}, "max_input_tokens (20)"),
        ({"prompt_ids": (3,) * 20, "max_new_tokens": 13}, "max_total_tokens (32)"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"sampling": SamplingParams(logit_bias=((100, 1.0),))}, "vocabulary"),
        ({"sampling": SamplingParams(bad_words=((3,), (4, 100)))}, "vocabulary"),
        ({"sampling": SamplingParams(allowed_token_ids=(3, 100))}, "vocabulary"),
        ({"stop_token_ids": frozenset(range(8193))}, "more than 8192 stop token ids"),
        ({"cache_salt": b"s" * 4097}, "more than 4096 bytes"),
        ({"tenant": b"t" * 4097}, "more than 4096 bytes"),
        ({"prediction": (3, 100)}, "vocabulary"),
        ({"prediction": (3,) * 33}, "a prediction of more than 32 tokens"),
        ({"sampling": SamplingParams(top_logprobs=101)}, "log-probabilities"),
        ({"prompt_logprobs": 101}, "log-probabilities"),
    ],
)
async def test_a_request_that_cannot_run_never_reaches_the_engine(
    client: GrpcEngineClient, engine: ScriptedEngine, fields: dict[str, Any], expected: str
) -> None:
    ended = (await collect(client.submit(request(3, **fields)))).finished
    assert ended is not None
    assert ended.reason is FinishReason.ERROR
    assert expected in ended.error
    assert engine.inbox.empty()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("min_p", 2.0)],
)
async def test_invalid_sampling_values_end_the_request_with_an_error(
    server: EngineServer, engine: ScriptedEngine, socket_path: Path, field: str, value: float
) -> None:
    message = codec.encode_submit(request(3))
    setattr(message.submit.sampling, field, value)
    async with grpc.aio.insecure_channel(f"unix:{socket_path}") as channel:
        call = make_stub(engine_pb2, channel).Session()
        await call.write(message)
        ended = codec.decode_step(await call.read()).finished[0]
    assert ended.reason is FinishReason.ERROR
    assert field in ended.error
    assert engine.inbox.empty()


async def test_a_fork_names_its_parent_by_the_engines_id(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    client.submit(request(client.next_request_id()))
    await engine.taken()
    client.submit(request(70))
    parent = await engine.taken()
    client.submit(request(71, fork_of=70))
    child = await engine.taken()
    assert child.fork_of == parent.request_id != 70  # type: ignore[union-attr]
    # A parent that has ended leaves an ordinary request.
    client.submit(request(72, fork_of=999))
    assert (await engine.taken()).fork_of is None  # type: ignore[union-attr]


async def test_prompt_logprobs_reach_their_stream(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    stream = client.submit(request(5, prompt_logprobs=1))
    taken = await engine.taken()
    assert isinstance(taken, GenerationRequest)
    assert taken.prompt_logprobs == 1
    run = PromptLogprobs(taken.request_id, 1, [-1.0, -2.0], [[7], [8]], [[-1.0], [-2.0]])
    engine.outbox.put(StepOutputs(prompt_logprobs=[run]))
    batch = await asyncio.wait_for(anext(aiter(stream)), 60)
    assert batch.prompt_logprobs == [replace(run, request_id=5)]


async def test_a_prediction_reaches_the_engine_and_verified_drafts_their_stream(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    stream = client.submit(request(5, prediction=(7, 8, 9)))
    taken = await engine.taken()
    assert isinstance(taken, GenerationRequest)
    assert taken.prediction == (7, 8, 9)
    other = client.submit(request(6))
    also = await engine.taken()
    assert isinstance(also, GenerationRequest)
    verified = VerifiedDrafts(taken.request_id, 3, 1, "prediction")
    tokens = [(taken.request_id, 7), (taken.request_id, 4), (also.request_id, 1)]
    engine.put_tokens(*tokens, drafts=[verified])
    batch = await asyncio.wait_for(anext(aiter(stream)), 60)
    assert batch.token_ids == [7, 4]
    assert batch.drafts == (replace(verified, request_id=5),)
    assert (await asyncio.wait_for(anext(aiter(other)), 60)).drafts == ()


async def test_a_cancel_reaches_the_engine_and_ends_the_stream(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    stream = client.submit(request(7))
    taken = await engine.taken()
    assert isinstance(taken, GenerationRequest)
    reader = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    stream.cancel()
    stream.cancel()
    assert await engine.taken() == Cancel(taken.request_id)
    assert (await reader).finished is None
    engine.put_tokens(
        (taken.request_id, 1), finished=[Finished(taken.request_id, FinishReason.CANCELLED)]
    )
    await asyncio.sleep(0.05)
    assert (await collect(stream)).token_ids == []
    assert engine.inbox.empty()


async def test_a_session_that_ends_cancels_its_requests(
    client: GrpcEngineClient, engine: ScriptedEngine, socket_path: Path
) -> None:
    other = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    stream = other.submit(request(1))
    taken = await engine.taken()
    client.submit(request(1))
    await engine.taken()
    await other.close()
    assert await engine.taken() == Cancel(taken.request_id)  # type: ignore[union-attr]
    ended = (await collect(stream)).finished
    assert ended == Finished(1, FinishReason.ERROR, GONE)
    assert engine.inbox.empty(), "the other client's request goes on"


async def test_a_half_closed_session_ends_with_its_last_request(
    server: EngineServer, engine: ScriptedEngine, socket_path: Path
) -> None:
    async with grpc.aio.insecure_channel(f"unix:{socket_path}") as channel:
        call = make_stub(engine_pb2, channel).Session()
        await call.write(codec.encode_submit(request(5)))
        await call.done_writing()
        taken = await engine.taken()
        engine.put_tokens((taken.request_id, 1))  # type: ignore[union-attr]
        engine.put_tokens(
            (taken.request_id, 2),  # type: ignore[union-attr]
            finished=[Finished(taken.request_id, FinishReason.LENGTH)],  # type: ignore[union-attr]
        )
        tokens: list[int] = []
        async with asyncio.timeout(60):
            async for message in call:
                tokens += message.token_ids
    assert tokens == [1, 2]


def test_a_slow_writer_merges_steps_into_one_message() -> None:
    session = ClientSession()
    for token in range(5):
        session.outgoing.put(StepOutputs([1], [token], [0.0], [[]], [[]]))
    session.outgoing.put(None)
    messages = list(session.messages())
    assert [list(m.token_ids) for m in messages] == [[0, 1, 2, 3, 4]]


async def test_streams_end_when_the_engine_is_gone_and_the_client_reconnects(
    engine: ScriptedEngine, socket_path: Path
) -> None:
    server = EngineServer(engine, INFO)
    server.start(socket_path)
    client = await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=60)
    heard: list[tuple[bool, int, tuple[str, ...], bool]] = []

    def hear(another: bool) -> None:
        names = tuple(client.adapters.names)
        heard.append((another, client.info.max_total_tokens, names, client.connected))

    client.on_found(hear)
    stream = client.submit(request(1))
    await engine.taken()
    engine.metrics.load = EngineLoad(running=5)
    await client.metrics()
    engine.outbox.put(None)
    await asyncio.to_thread(server.stop, "it broke")
    assert (await collect(stream)).finished == Finished(1, FinishReason.ERROR, "it broke")
    await until(lambda: not client.connected)
    assert not await client.healthy()
    with pytest.raises(ShardError, match="gone"):
        client.submit(request(2))
    with pytest.raises(ShardError, match="gone"):
        await client.list_adapters()
    assert (await client.metrics()).load.running == 5, "as last heard"
    assert not heard

    engine = ScriptedEngine()
    server = EngineServer(engine, replace(INFO, max_total_tokens=24), max_loras=3)
    server.adapters.now = Adapters(3, (Adapter("named", "/named"),))
    server.start(socket_path)
    await until(lambda: client.connected)
    assert heard == [(True, 24, ("named",), False)]
    assert (await client.metrics()).load.running == 0, "of another engine"
    assert await client.healthy()
    stream = client.submit(request(2))
    taken = await engine.taken()
    engine.put_tokens(
        (taken.request_id, 5),  # type: ignore[union-attr]
        finished=[Finished(taken.request_id, FinishReason.LENGTH)],  # type: ignore[union-attr]
    )
    assert (await collect(stream)).token_ids == [5]
    await client.close()
    engine.outbox.put(None)
    await asyncio.to_thread(server.stop)


async def test_a_cancellation_by_the_engine_is_an_error(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    stream = client.submit(request(1))
    taken = await engine.taken()
    engine.put_tokens(
        finished=[Finished(taken.request_id, FinishReason.CANCELLED)]  # type: ignore[union-attr]
    )
    assert (await collect(stream)).finished == Finished(1, FinishReason.ERROR, STOPPING)


async def test_draining_refuses_only_new_requests(
    client: GrpcEngineClient, server: EngineServer, engine: ScriptedEngine
) -> None:
    old = client.submit(request(1))
    taken = await engine.taken()
    server.drain()
    ended = (await collect(client.submit(request(2)))).finished
    assert ended is not None
    assert "shutting down" in ended.error
    engine.put_tokens(
        (taken.request_id, 5),  # type: ignore[union-attr]
        finished=[Finished(taken.request_id, FinishReason.LENGTH)],  # type: ignore[union-attr]
    )
    assert (await collect(old)).token_ids == [5]


async def test_a_draining_server_opens_no_session(server: EngineServer, socket_path: Path) -> None:
    """Whose requests would be lost with it."""
    server.drain()
    with pytest.raises(ShardError, match="no model server answered"):
        await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=0.5)


async def test_the_engine_ends_after_what_it_has_not_seen_yet(
    client: GrpcEngineClient, server: EngineServer, engine: ScriptedEngine
) -> None:
    """A request was accepted before the signal, and is on its way to the engine."""
    signals: SimpleQueue[signal.Signals] = SimpleQueue()
    stream = client.submit(request(1))
    submitted = await engine.taken()
    assert isinstance(submitted, GenerationRequest)
    assert (engine.live_requests, server.live_requests) == (0, 1)
    signals.put(signal.SIGTERM)
    ending = asyncio.create_task(
        asyncio.to_thread(shut_down, signals, engine, server, 60.0, HeartbeatWriter(None))
    )
    await until(lambda: signals.empty())
    await asyncio.sleep(0.2)
    assert engine.inbox.empty(), "the loop is not to end yet"
    finished = Finished(submitted.request_id, FinishReason.LENGTH)
    engine.put_tokens((submitted.request_id, 7), finished=[finished])
    assert (await collect(stream)).token_ids == [7]
    await ending
    assert isinstance(await engine.taken(), Shutdown)


async def test_health_is_whether_the_server_answers(
    server: EngineServer, engine: ScriptedEngine, socket_path: Path
) -> None:
    client = await GrpcEngineClient.connect(f"unix:{socket_path}", 60)
    assert await client.healthy()
    engine.outbox.put(None)
    await asyncio.to_thread(server.stop)
    async with asyncio.timeout(60):
        while await client.healthy():  # noqa: ASYNC110 (until the end of the session has arrived)
            await asyncio.sleep(0.01)
    await client.close()


@pytest.mark.tgi_pain(15)
async def test_a_stalled_engine_ends_streams_until_it_makes_progress(
    server: EngineServer,
    engine: ScriptedEngine,
    socket_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine an answer may take longer than an engine may stall here.
    monkeypatch.setattr("tgi_cli.rpc.engine_watch._ANSWER_SECONDS", 60.0)
    client = await GrpcEngineClient.connect(f"unix:{socket_path}", 60, stall_seconds=1.0)
    heard: list[bool] = []
    client.on_found(heard.append)
    await asyncio.sleep(1.5)
    assert client.connected, "it is idle: it need not move"
    engine.live_requests = 1
    engine.moves = True
    stream = client.submit(request(1))
    await asyncio.sleep(1.5)
    assert client.connected, "it moves, however long the request takes"
    engine.moves = False
    ended = (await collect(stream)).finished
    assert ended is not None
    assert ended.error == "the model server has not moved for 1 s"
    assert not client.connected
    assert not await client.healthy()
    with pytest.raises(ShardError, match="gone"):
        client.submit(request(2))
    await asyncio.sleep(0.6)
    assert not client.connected, "it answers, but makes no progress"
    engine.progress += 1
    await until(lambda: client.connected)
    assert heard == [False], "it is the same"
    await client.close()


async def test_a_stall_timeout_of_zero_never_ends_streams(
    server: EngineServer, engine: ScriptedEngine, socket_path: Path
) -> None:
    client = await GrpcEngineClient.connect(f"unix:{socket_path}", 60, stall_seconds=0.0)
    engine.live_requests = 1
    await asyncio.sleep(0.5)
    assert client.connected
    await client.close()


async def test_connecting_times_out_without_a_server(socket_path: Path) -> None:
    with pytest.raises(ShardError, match="no model server answered"):
        await GrpcEngineClient.connect(f"unix:{socket_path}", timeout=0.3)


async def test_who_waits_for_a_server_is_told_how_to_start_one(
    socket_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgi_cli.rpc.client._HINT_SECONDS", 0.1)
    target = f"unix:{socket_path}"
    with caplog.at_level("INFO", "tgi_cli.rpc.client"), pytest.raises(ShardError):
        await GrpcEngineClient.connect(target, timeout=0.3, hint="start one")
    # Once or twice: on a busy machine, the first pause may take all of the time.
    said = {record.message for record in caplog.records if record.name == "tgi_cli.rpc.client"}
    assert said == {f"waiting for the model server at {target}; start one"}


async def test_connecting_waits_for_the_server(engine: ScriptedEngine, socket_path: Path) -> None:
    connecting = asyncio.create_task(GrpcEngineClient.connect(f"unix:{socket_path}", 60))
    await asyncio.sleep(0.2)
    server = EngineServer(engine, INFO)
    server.start(socket_path)
    client = await connecting
    assert client.info == INFO
    await client.close()
    engine.outbox.put(None)
    await asyncio.to_thread(server.stop)


async def test_many_streams_keep_their_tokens_apart(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    """An engine on its own thread echoes ids in bursts; nothing is lost, mixed or reordered."""
    streams = [client.submit(request(client.next_request_id())) for _ in range(40)]
    readers = [asyncio.create_task(collect(stream)) for stream in streams]
    ids = [(await engine.taken()).request_id for _ in streams]  # type: ignore[union-attr]
    rounds = 50

    def play(outbox: SimpleQueue[StepOutputs | None]) -> None:
        for n in range(rounds):
            last = n == rounds - 1
            engine.put_tokens(
                *((i, (i * 31 + n) % 100) for i in ids),
                finished=[Finished(i, FinishReason.LENGTH) for i in ids] if last else [],
            )

    await asyncio.to_thread(play, engine.outbox)
    for engine_id, reader in zip(ids, readers, strict=True):
        assert (await reader).token_ids == [(engine_id * 31 + n) % 100 for n in range(rounds)]


async def test_ended_sessions_leave_no_state_in_the_server(
    client: GrpcEngineClient, server: EngineServer, engine: ScriptedEngine
) -> None:
    stream = client.submit(request(1))
    taken = await engine.taken()
    engine.put_tokens(
        finished=[Finished(taken.request_id, FinishReason.LENGTH)]  # type: ignore[union-attr]
    )
    await collect(stream)
    cancelled = client.submit(request(2))
    await engine.taken()
    cancelled.cancel()
    await engine.taken()
    await client.close()
    await until(lambda: not server.sessions and not server._routes)


async def test_messages_may_exceed_grpcs_default_limit(
    client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    stream = client.submit(request(1, grammar="x" * 5_000_000))
    taken = await engine.taken()
    assert isinstance(taken, GenerationRequest)
    assert taken.grammar is not None
    assert len(taken.grammar) == 5_000_000
    cause = "y" * 5_000_000
    engine.put_tokens(finished=[Finished(taken.request_id, FinishReason.ERROR, cause)])
    assert (await collect(stream)).finished == Finished(1, FinishReason.ERROR, cause)


async def test_metrics_are_fetched_and_the_last_ones_outlive_the_engine(
    server: EngineServer, client: GrpcEngineClient, engine: ScriptedEngine
) -> None:
    engine.metrics.counts["launched", "decode"] = 7
    engine.metrics.load = EngineLoad(queued=4, running=2)
    metrics = await client.metrics()
    assert metrics.counts["launched", "decode"] == 7
    assert metrics.load == engine.metrics.load
    engine.metrics.counts["launched", "decode"] = 8
    engine.outbox.put(None)
    await asyncio.to_thread(server.stop)
    await until(lambda: not client.connected)
    assert (await client.metrics()).counts["launched", "decode"] == 7, "as last heard"
