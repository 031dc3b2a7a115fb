"""Steps against servers that do what a test tells them, through real load generators."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.tools.certificate_authority import CertificateFiles
from tests.unit.bench.load.fake_server import (
    Call,
    Died,
    FakeServer,
    Handler,
    Reply,
    completions,
    native,
)
from tests.unit.bench.load.words import Words
from tgi_cli.bench.events import (
    BatchDone,
    BenchRequest,
    BenchStep,
    BenchTarget,
    Event,
    RequestDone,
    StepEnded,
    StepFailed,
    StepProgress,
    StepRecord,
    StepStarted,
)
from tgi_cli.bench.settings import BenchSampling, RequestSettings
from tgi_cli.bench.step_driver import LoadDriver
from tgi_cli.bench.workloads.distributions import ArrivalProcess, scheduled
from tgi_cli.errors import ConfigError


def prompts(**more: Any) -> Iterator[BenchRequest]:
    while True:
        yield BenchRequest(prompt="one two three", prompt_tokens=4, max_tokens=4, **more)


def clients(number: int, requests: int | None = None, **more: Any) -> BenchStep:
    return BenchStep(kind="concurrency", value=number, label=str(number), requests=requests, **more)


async def driven(
    server: FakeServer | str,
    step: BenchStep,
    requests: Iterable[BenchRequest],
    settings: RequestSettings | None = None,
    kind: Any = "openai",
    driver: LoadDriver | None = None,
) -> list[Event]:
    """All events of a step."""
    url = server if isinstance(server, str) else server.url
    target = BenchTarget(kind=kind, address=url, model="acme/tiny")
    driver = driver or LoadDriver(target, settings or RequestSettings(), Words())
    events = []
    async with asyncio.timeout(60), contextlib.aclosing(driver.drive(step, requests, 3, 9)) as told:
        async for event in told:
            events.append(event)
    return events


def record_of(events: list[Event]) -> StepRecord:
    assert isinstance(events[0], StepStarted)
    assert isinstance(events[-1], StepEnded)
    assert sum(isinstance(event, StepEnded) for event in events) == 1
    return events[-1].record


async def recorded(
    handler: Handler,
    step: BenchStep,
    requests: Iterable[BenchRequest],
    *arguments: Any,
    **more: Any,
) -> tuple[StepRecord, FakeServer]:
    with FakeServer(handler).serving() as server:
        return record_of(await driven(server, step, requests, *arguments, **more)), server


# ------------------------------------------------------------------ what is sent


async def test_clients_wait_for_their_answers() -> None:
    record, server = await recorded(
        completions(tokens=3, gap=0.1), clients(3, requests=12, warmup=2), prompts()
    )
    assert [r.index for r in record.requests] == list(range(12))
    assert [r.warmup for r in record.requests] == [True] * 2 + [False] * 10
    assert server.most == 3
    assert len(server.calls) == 12
    body = server.calls[0].body
    assert body == {
        "model": "acme/tiny",
        "prompt": "one two three",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    for request in record.requests:
        assert request.error is None
        assert (request.input_tokens, request.output_tokens) == (4, 3)
        assert (request.counts, request.counted_by) == ([1, 1, 1], "usage")
        assert request.finish_reason == "length"
        assert request.scheduled == request.dispatched
        times = [request.dispatched, *request.arrivals, request.finished]
        assert times == sorted(times)
    assert 0 < record.duration < 60


async def test_native_streams_and_sampling_options() -> None:
    settings = RequestSettings(
        sampling=BenchSampling(temperature=0.5, top_k=3, do_sample=True, watermark=True),
        api_key="secret",
        headers={"X-Extra": "yes"},
        extra_body={"parameters": {"max_new_tokens": 4, "details": True, "seed": 5}},
    )
    record, server = await recorded(
        native(tokens=4), clients(1, requests=2), prompts(), settings, kind="tgi"
    )
    assert [(r.input_tokens, r.output_tokens) for r in record.requests] == [(9, 4)] * 2
    call = server.calls[0]
    assert call.headers["authorization"] == "Bearer secret"
    assert call.headers["x-extra"] == "yes"
    assert call.body["parameters"]["seed"] == 5


async def test_chats_send_messages_and_ignore_eos_takes_openai_routes() -> None:
    record, server = await recorded(
        completions(),
        clients(1, requests=1),
        prompts(messages=[{"role": "user", "content": "hi"}]),
        RequestSettings(ignore_eos=True, sampling=BenchSampling(temperature=0.7, top_p=0.9)),
        kind="tgi",
    )
    assert record.requests[0].error is None
    call = server.calls[0]
    assert call.path == "/v1/chat/completions"
    assert call.body["messages"] == [{"role": "user", "content": "hi"}]
    assert (call.body["ignore_eos"], call.body["temperature"], call.body["top_p"]) == (
        True,
        0.7,
        0.9,
    )


async def test_requests_are_sent_when_they_are_due() -> None:
    due = [0.0, 0.05, 0.05, 2.0]
    requests = [BenchRequest(prompt="x", prompt_tokens=1, max_tokens=4, at=at) for at in due]
    step = BenchStep(kind="rate", value=10, label="10/s")
    record, server = await recorded(completions(tokens=2, gap=0.5), step, requests)
    assert [r.scheduled for r in record.requests] == due
    assert all(r.dispatched >= r.scheduled for r in record.requests)
    assert server.most >= 3  # nobody waits for others
    at = sorted(call.at for call in server.calls)
    assert at[3] - at[0] > 0.5, "however late the first is"


async def test_batches_are_sent_together_and_again() -> None:
    step = BenchStep(kind="batch", value=4, label="4", requests=3, warmup=1)
    with FakeServer(completions(tokens=5, gap=0.1)).serving() as server:
        events = await driven(server, step, prompts())
    record = record_of(events)
    assert len(record.requests) == 12
    assert [r.warmup for r in record.requests] == [True] * 4 + [False] * 8
    batches = [event.record for event in events if isinstance(event, BatchDone)]
    assert batches == record.batches
    assert [batch.warmup for batch in batches] == [True, False, False]
    for batch in batches:
        assert (batch.batch_size, batch.sequence_length, batch.decode_length) == (4, 4, 5)
        assert len(batch.decodes) == 4
        assert batch.prefill > 0
    assert server.most == 4


async def test_conversations_send_their_history() -> None:
    def turns() -> Iterator[BenchRequest]:
        for conversation in range(2):
            for turn in range(3):
                content = f"turn {turn} of {conversation}"
                yield BenchRequest(
                    prompt=content,
                    prompt_tokens=5,
                    max_tokens=4,
                    messages=[{"role": "user", "content": content}],
                    conversation=conversation,
                    think=0.05 if turn else 0.0,
                )

    record, server = await recorded(completions(tokens=2), clients(2), turns())
    assert [r.error for r in record.requests] == [None] * 6
    last = max((call.body["messages"] for call in server.calls), key=len)
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert last[1]["content"] == " word word"
    first, second, third = record.requests[:3]
    assert second.dispatched - first.finished >= 0.045
    assert third.dispatched - second.finished >= 0.045


async def test_conversations_without_messages_are_one_growing_prompt() -> None:
    requests = [
        BenchRequest(prompt=f"part {n}", prompt_tokens=2, max_tokens=4, conversation=0)
        for n in range(2)
    ]
    _, server = await recorded(completions(tokens=1), clients(1), requests)
    sent = [call.body["prompt"] for call in server.calls]
    assert sent == ["part 0", "part 0 word\npart 1"]


async def test_several_processes_share_a_step() -> None:
    record, server = await recorded(
        completions(tokens=2, gap=0.1),
        clients(4, requests=30),
        prompts(),
        RequestSettings(processes=2),
    )
    assert [r.index for r in record.requests] == list(range(30))
    assert server.most == 4


# ------------------------------------------------------------------ when it ends


async def test_a_step_ends_when_its_time_is_over() -> None:
    record, _ = await recorded(
        completions(tokens=2, gap=0.02), clients(2, seconds=1.0, warmup=2), prompts()
    )
    counted = [r for r in record.requests if not r.warmup]
    assert len(counted) > 2
    assert max(r.dispatched for r in counted) - counted[0].dispatched < 10, "not for ever"
    assert all(r.error is None for r in counted)


async def test_requests_that_do_not_end_in_time_are_unfinished() -> None:
    record, _ = await recorded(
        completions(tokens=50, gap=0.1),
        clients(2, seconds=1.0),
        prompts(),
        RequestSettings(drain=0.5),
    )
    assert [r.error for r in record.requests] == ["unfinished"] * 2
    assert all(0 < len(r.arrivals) < 50 for r in record.requests)


async def test_a_step_can_be_stopped() -> None:
    with FakeServer(completions(tokens=3, gap=0.05)).serving() as server:
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        driver.stop("nothing runs")  # and nothing happens
        events = []
        async with asyncio.timeout(30):
            async for event in driver.drive(clients(2), prompts()):
                events.append(event)
                if sum(isinstance(one, RequestDone) for one in events) == 2:
                    driver.stop("asked to")
    record = record_of(events)
    assert record.stopped == "asked to"
    assert len(record.requests) >= 2
    assert all(r.error is None for r in record.requests)
    assert not any(isinstance(event, StepFailed) for event in events)


async def test_closing_the_events_ends_the_load() -> None:
    with FakeServer(completions(tokens=100, gap=0.05)).serving() as server:
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        events = driver.drive(clients(2), prompts())
        async with asyncio.timeout(30):
            async for event in events:
                if isinstance(event, StepProgress) and event.in_flight == 2:
                    break
            (pid,) = driver.pids
            await events.aclose()
        assert driver.pids == []
        assert _ends(pid)


async def test_a_load_generator_that_dies_is_reported() -> None:
    with FakeServer(completions(tokens=100, gap=0.05)).serving() as server:
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        events = []
        async with asyncio.timeout(30):
            async for event in driver.drive(clients(1), prompts()):
                events.append(event)
                if isinstance(event, StepProgress) and event.in_flight:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(driver.pids[0], signal.SIGKILL)
    failed = [event for event in events if isinstance(event, StepFailed)]
    assert len(failed) == 1
    assert failed[0].fatal
    assert "signal 9" in failed[0].cause
    assert record_of(events).stopped


async def test_a_stopped_load_generator_reports_that_it_was_behind() -> None:
    with FakeServer(completions(tokens=2)).serving() as server:
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        requests = scheduled(prompts(), ArrivalProcess.parse("constant").times(50.0, seed=1))
        step = BenchStep(kind="rate", value=50, label="", seconds=3.0)
        stops = 0  # several: one would be less than a percent of what its loop measures
        async with asyncio.timeout(60):
            async for event in driver.drive(step, requests):
                if isinstance(event, RequestDone) and event.record.scheduled >= stops / 2:
                    os.kill(driver.pids[0], signal.SIGSTOP)
                    await asyncio.sleep(0.3)
                    os.kill(driver.pids[0], signal.SIGCONT)
                    stops += 1
                if isinstance(event, StepEnded):
                    record = event.record
    assert record.client.behind
    assert record.client.late_p99 > 0.1
    assert record.client.lag_p99 > 0.1
    # The schedule stands, and what came late of it is in the record.
    assert [r.scheduled for r in record.requests] == [number / 50 for number in range(150)]
    assert max(r.dispatched - r.scheduled for r in record.requests) > 0.1


async def test_a_load_generator_does_not_outlive_its_run() -> None:
    with FakeServer(completions(tokens=100, gap=0.05)).serving() as server:
        program = (
            "import asyncio, sys\n"
            "from tests.unit.bench.load.test_step_driver import *\n"
            "async def main():\n"
            "    target = BenchTarget(kind='openai', address=sys.argv[1], model='m')\n"
            "    driver = LoadDriver(target, RequestSettings())\n"
            "    async for event in driver.drive(clients(1), prompts()):\n"
            "        if isinstance(event, StepProgress) and event.in_flight:\n"
            "            print(driver.pids[0], flush=True)\n"
            "asyncio.run(main())\n"
        )
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, server.url, stdout=asyncio.subprocess.PIPE
        )
        assert run.stdout is not None
        pid = int(await asyncio.wait_for(run.stdout.readline(), 60))
        run.kill()
        await run.wait()
        assert await asyncio.to_thread(_ends, pid)


def _ends(pid: int) -> bool:
    """Whether a process of nobody's ends within 20 seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


async def test_a_workload_that_fails_is_raised() -> None:
    def requests() -> Iterator[BenchRequest]:
        yield from islice(prompts(), 100)
        raise ConfigError("the file ends in the middle")

    server = FakeServer(completions(tokens=1))
    with server.serving(), pytest.raises(ConfigError, match="ends in the middle"):
        await driven(server, clients(2), requests())


# ------------------------------------------------------------------ servers that misbehave


async def answers(handler: Handler, **more: Any) -> list[Any]:
    record, _ = await recorded(handler, clients(2, requests=4), prompts(), **more)
    return record.requests


async def test_statuses_are_errors_by_kind() -> None:
    async def overloaded(call: Call, reply: Reply) -> None:
        await reply.whole(429, {"error": "Model is overloaded", "error_type": "overloaded"})

    found = await answers(overloaded)
    assert {(r.error, r.detail) for r in found} == {("http 429", "Model is overloaded")}
    assert all(not r.arrivals and r.output_tokens == 0 for r in found)


async def test_a_server_that_dies_in_the_middle_cuts_answers_off() -> None:
    async def dies(call: Call, reply: Reply) -> None:
        await reply.start()
        await reply.event({"choices": [{"text": "a"}]})
        raise Died

    found = await answers(dies)
    assert {r.error for r in found} == {"cut off"}
    assert all(len(r.arrivals) == 1 and r.output_tokens == 1 for r in found)


async def test_a_response_that_is_not_a_stream_is_an_error() -> None:
    async def whole(call: Call, reply: Reply) -> None:
        await reply.whole(200, {"choices": [{"text": "all at once"}]})

    found = await answers(whole)
    assert {r.error for r in found} == {"protocol"}
    assert "application/json" in found[0].detail


async def test_errors_within_a_stream_have_their_kind() -> None:
    async def failing(call: Call, reply: Reply) -> None:
        await reply.start()
        await reply.event({"error": "out of blocks", "error_type": "generation"})
        await reply.end()

    found = await answers(failing, kind="tgi")
    assert {(r.error, r.detail) for r in found} == {("stream generation", "out of blocks")}


async def test_slow_servers_time_out() -> None:
    found = await answers(completions(tokens=50, gap=0.1), settings=RequestSettings(timeout=2.0))
    assert {r.error for r in found} == {"timeout"}
    assert all(r.arrivals for r in found)


async def test_a_server_that_is_not_there_ends_the_step() -> None:
    with FakeServer(completions()).serving() as server:
        url = server.url
    events = await driven(url, clients(2), prompts())
    record = record_of(events)
    failed = [event for event in events if isinstance(event, StepFailed)]
    assert len(failed) == 1
    assert failed[0].fatal
    assert "no connection" in record.stopped
    assert {r.error for r in record.requests} == {"connect"}
    assert len(record.requests) < 200  # it is asked again, but not as fast as it refuses


async def test_a_server_that_refuses_everything_ends_the_step() -> None:
    async def no_key(call: Call, reply: Reply) -> None:
        await reply.whole(401, {"error": {"message": "bad key"}})

    with FakeServer(no_key).serving() as server:
        events = await driven(server, clients(2), prompts())
    failed = [event for event in events if isinstance(event, StepFailed)]
    assert len(failed) == 1
    assert failed[0].fatal
    assert "http 401" in failed[0].cause
    assert {r.detail for r in record_of(events).requests} == {"bad key"}


async def test_a_failed_batch_is_reported_and_the_next_one_runs() -> None:
    seen = 0

    async def once(call: Call, reply: Reply) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            await reply.whole(500, {"error": "oops"})
        else:
            await completions(tokens=2)(call, reply)

    step = BenchStep(kind="batch", value=2, label="2", requests=2)

    with FakeServer(once).serving() as server:
        events = await driven(server, step, prompts())
    failed = [event for event in events if isinstance(event, StepFailed)]
    assert len(failed) == 1
    assert not failed[0].fatal
    assert "oops" in failed[0].cause
    assert len(record_of(events).batches) == 1


@pytest.mark.parametrize(("is_trusted", "error"), [(False, "connect"), (True, None)])
async def test_certificates_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool, error: str | None
) -> None:
    files = CertificateFiles.make(tmp_path)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
    with FakeServer(completions(tokens=2)).serving(files) as server:
        record = record_of(await driven(server, clients(1, requests=2), prompts()))
    assert [r.error for r in record.requests] == [error] * 2
    assert error is None or "certificate" in record.requests[0].detail.lower()


# ------------------------------------------------------------------ tokens and times


async def test_tokens_are_counted_here_if_the_server_does_not_say() -> None:
    with FakeServer(completions(tokens=6, per_event=3, usage=False)).serving() as server:
        target = BenchTarget(kind="openai", address=server.url, model="m")
        driver = LoadDriver(target, RequestSettings(), Words())
        record = record_of(await driven(server, clients(1, requests=2), prompts(), driver=driver))
        bare = LoadDriver(target, RequestSettings())
        counted = record_of(await driven(server, clients(1, requests=2), prompts(), driver=bare))
    for request in record.requests:
        assert (request.output_tokens, request.counted_by) == (6, "tokenizer")
        assert request.counts == [1, 1]  # events, as far as the stream says
        assert request.input_tokens == 4
    assert driver.notes == []
    assert {(r.output_tokens, r.counted_by) for r in counted.requests} == {(2, "events")}
    assert "events were counted" in bare.notes[0]


async def test_a_usage_that_does_not_fit_the_text_is_noted() -> None:
    class Double(Words):
        def count(self, text: str, special: bool = True) -> int:
            return 2 * len(text.split())

    with FakeServer(completions(tokens=6)).serving() as server:
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Double()
        )
        record = record_of(await driven(server, clients(1, requests=3), prompts(), driver=driver))
    assert {r.output_tokens for r in record.requests} == {6}
    assert len(driver.notes) == 1
    assert "18 output tokens" in driver.notes[0]
    assert "36" in driver.notes[0]


async def test_different_prompt_counts_of_the_server_are_noted() -> None:
    with FakeServer(completions(tokens=2, prompt_tokens=9)).serving() as server:
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        step = clients(1, requests=3)
        record = record_of(await driven(server, step, prompts(), driver=driver))
        said = {"messages": [{"role": "user", "content": "x"}]}
        chat = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        await driven(server, step, prompts(**said), driver=chat)
    assert {r.input_tokens for r in record.requests} == {9}
    assert len(driver.notes) == 1
    assert "27 prompt tokens where words counts 12 (3 prompts)" in driver.notes[0]
    assert chat.notes == []  # a template belongs to them


@pytest.mark.parametrize(("reason", "noted"), [("stop", True), ("length", False)])
async def test_servers_that_stop_at_eos_are_noted(reason: str, noted: bool) -> None:
    async def ends(call: Call, reply: Reply) -> None:
        assert call.body["ignore_eos"] is True
        await reply.start()
        await reply.event({"choices": [{"text": " word", "finish_reason": reason}]})
        await reply.end()

    with FakeServer(ends).serving() as server:
        settings = RequestSettings(ignore_eos=True)
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), settings, Words()
        )
        record_of(await driven(server, clients(1, requests=2), prompts(), driver=driver))
    assert any("ignore_eos" in note for note in driver.notes) == noted


async def test_stream_options_are_omitted_after_a_rejection() -> None:
    with FakeServer(completions(tokens=2, refuse_usage=True)).serving() as server:
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        record = record_of(await driven(server, clients(1, requests=3), prompts(), driver=driver))
    assert [r.error for r in record.requests] == [None] * 3
    assert [r.counted_by for r in record.requests] == ["tokenizer"] * 3
    assert sum("stream_options" in call.body for call in server.calls) == 1
    assert any("stream_options" in note for note in driver.notes)


async def test_recorded_gaps_are_the_servers() -> None:
    record, server = await recorded(
        completions(tokens=20, gap=0.02, keep_alive=True), clients(2, requests=4), prompts()
    )
    gaps, own = (
        [after - before for times in all_times for before, after in pairwise(times)]
        for all_times in (
            [request.arrivals for request in record.requests],
            [call.sent for call in server.calls],
        )
    )
    assert len(gaps) == len(own) == 4 * 19
    assert statistics.median(gaps) == pytest.approx(statistics.median(own), rel=0.3)


async def test_progress_counts_requests_and_tokens() -> None:
    with FakeServer(completions(tokens=30, gap=0.02)).serving() as server:
        events = await driven(server, clients(2, requests=4), prompts())
    progress = [event for event in events if isinstance(event, StepProgress)]
    assert all(event.index == 3 and event.expected == 4 for event in progress)
    assert max(event.in_flight for event in progress) == 2
    assert progress[-1].done == 4
    assert any(event.tokens_per_second > 10 for event in progress)
    assert [event.elapsed for event in progress] == sorted(event.elapsed for event in progress)
    done = [event for event in events if isinstance(event, RequestDone)]
    assert {event.index for event in done} == {3}
    assert len(done) == 4


# ------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("kind", "settings", "step", "why"),
    [
        (
            "tgi",
            RequestSettings(route="generate_stream", ignore_eos=True),
            clients(1),
            "ignore_eos",
        ),
        (
            "openai",
            RequestSettings(sampling=BenchSampling(watermark=True)),
            clients(1),
            "watermark",
        ),
        ("openai", RequestSettings(headers={"a\n": "b"}), clients(1), "cannot be sent"),
        (
            "openai",
            RequestSettings(),
            BenchStep(kind="concurrency", value=1.5, label=""),
            "whole numbers",
        ),
        ("openai", RequestSettings(), BenchStep(kind="batch", value=0, label=""), "whole numbers"),
        ("shard-v3", RequestSettings(), clients(1), "driven in batches"),
    ],
)
async def test_settings_that_cannot_be_are_refused(
    kind: Any, settings: RequestSettings, step: BenchStep, why: str
) -> None:
    driver = LoadDriver(
        BenchTarget(kind=kind, address="http://127.0.0.1:9", model="m"), settings, Words()
    )
    with pytest.raises(ConfigError, match=why):
        async for _ in driver.drive(step, prompts()):
            pass


async def test_messages_need_the_chat_route() -> None:
    target = BenchTarget(kind="openai", address="http://127.0.0.1:9", model="m")
    driver = LoadDriver(target, RequestSettings(route="completions"), Words())
    with pytest.raises(ConfigError, match="messages"):
        async for _ in driver.drive(clients(1), prompts(messages=[{"role": "user"}])):
            pass


# ------------------------------------------------------------------ the server's own metrics


async def test_metrics_of_the_step_are_the_differences() -> None:
    def exposition(count: int, waiting: int) -> str:
        return (
            "# TYPE tgi_request_count counter\n"
            f"tgi_request_count {count}\n"
            "# TYPE tgi_queue_size gauge\n"
            f"tgi_queue_size {waiting}\n"
        )

    with FakeServer(completions(tokens=30, gap=0.05)).serving() as server:
        server.metrics = exposition(10, 0)
        driver = LoadDriver(
            BenchTarget(kind="openai", address=server.url, model="m"), RequestSettings(), Words()
        )
        async for event in driver.drive(clients(1, requests=1), prompts()):
            if isinstance(event, StepProgress):
                server.metrics = exposition(14, 6)
            if isinstance(event, StepEnded):
                record = event.record
    assert record.server["tgi_request_count"] == 4
    assert record.server["tgi_queue_size_max"] == 6
