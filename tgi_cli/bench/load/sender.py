"""Sends one request and records its response; follows conversations."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from tgi_cli.bench.events import BenchRequest, BenchRequestRecord
from tgi_cli.bench.load.frames import GeneratorJob, IndexedRequest, RequestFinished
from tgi_cli.bench.load.http import (
    BrokenResponseError,
    ConnectError,
    ConnectionPool,
    request_head,
)
from tgi_cli.bench.load.streams import StreamedResponse
from tgi_cli.bench.settings import BenchSampling, RequestSettings, Route

PATHS: dict[Route, str] = {
    "generate_stream": "/generate_stream",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_SAMPLED = ("temperature", "top_k", "top_p", "typical_p")
_USAGE_REFUSED = (400, 422)
_NO_USAGE = "The server rejects stream_options, so tokens were counted here."

Prompt = list[dict[str, Any]] | str
"""The messages of a chat, or a text."""


def request_body(
    route: Route,
    settings: RequestSettings,
    model: str,
    max_tokens: int,
    prompt: Prompt,
    usage: bool,
) -> bytes:
    """The JSON of one request; ``usage`` asks for usage at the end of OpenAI's streams."""
    sampling = sampling_fields(settings.sampling)
    if route == "generate_stream":
        parameters = {"max_new_tokens": max_tokens, "details": True} | sampling
        content: dict[str, Any] = {"inputs": prompt, "parameters": parameters}
        return msgspec.json.encode(content | settings.extra_body)
    # OpenAI samples by default, TGI does not.
    if not (sampling.pop("do_sample", False) or any(name in sampling for name in _SAMPLED)):
        sampling["temperature"] = 0
    content = {
        "model": model,
        "messages" if route == "chat" else "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        **sampling,
    }
    if usage:
        content["stream_options"] = {"include_usage": True}
    if settings.ignore_eos:
        content["ignore_eos"] = True
    return msgspec.json.encode(content | settings.extra_body)


def sampling_fields(sampling: BenchSampling) -> dict[str, Any]:
    """The sampling parameters that are set, by TGI's names."""
    fields = msgspec.structs.asdict(sampling)
    return {n: value for n, value in fields.items() if value is not None and value is not False}


@dataclass
class ConversationState:
    """A conversation so far.

    Attributes:
        messages, text: All turns and responses, for the chat route and for the others.
        tokens: Tokens of all of them, as far as they were counted.
        ended: When the last response was complete.
        failed: Whether a turn has no response; then no more are sent.
        running: Whether a task runs the conversation.
        waiting: Turns that wait for the response before them.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    ended: float = 0.0
    failed: bool = False
    running: bool = False
    waiting: deque[IndexedRequest] = field(default_factory=deque)

    def prompt(self, route: Route, request: BenchRequest) -> Prompt:
        """The next request after all turns so far."""
        if route == "chat":
            return [*self.messages, *_messages(request)]
        text = prompt_text(request)
        return f"{self.text}\n{text}" if self.text else text

    def add(self, request: BenchRequest, record: BenchRequestRecord, text: str) -> None:
        """Append a turn and its response."""
        self.messages += [*_messages(request), {"role": "assistant", "content": text}]
        self.text = f"{self.prompt('completions', request)}{text}"
        self.tokens = record.input_tokens + record.output_tokens
        self.ended, self.failed = record.finished, record.error is not None


def _messages(request: BenchRequest) -> list[dict[str, Any]]:
    """The messages of a request; images come before the text of the last one."""
    *others, last = request.messages or [{"role": "user", "content": request.prompt}]
    if not request.images:
        return [*others, last]
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}} for url in request.images
    ]
    return [*others, {**last, "content": [*parts, {"type": "text", "text": last["content"]}]}]


def prompt_text(request: BenchRequest) -> str:
    """The text of a request, after its images in TGI's Markdown."""
    return "".join(f"![]({url})" for url in request.images) + request.prompt


@dataclass
class RequestCounters:
    """Counts of the requests of a generator.

    Attributes:
        refused_connections: Refused connections in a row, since ``refused_since``.
        kinds: Errors by kind.
        tokens: Tokens of completed responses.
        late: By how many seconds each request was started late.
    """

    done: int = 0
    in_flight: int = 0
    tokens: int = 0
    refused_connections: int = 0
    refused_since: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    late: list[float] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Number of failed requests."""
        return self.kinds.total()

    def add(self, record: BenchRequestRecord) -> None:
        """Count a completed request."""
        self.done += 1
        self.tokens += record.output_tokens
        if record.error is not None:
            self.kinds[record.error] += 1
        if record.error == "connect":
            if not self.refused_connections:
                self.refused_since = record.finished
            self.refused_connections += 1
        elif record.error != "unfinished":
            self.refused_connections = 0


class SenderState:
    """The clock and the counts of a step.

    Attributes:
        origin: Second 0 of the step.
        expired: Whether the step's time is over; what is cancelled then counts as unfinished.
    """

    def __init__(self) -> None:
        self.counters = RequestCounters()
        self.origin = 0.0
        self.expired = False

    def now(self) -> float:
        """Seconds since the start of the step."""
        return perf_counter() - self.origin

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self.counters.tokens

    def close(self) -> None:
        """Close the connections."""


class RequestSender(SenderState):
    """Sends requests over a pool of connections.

    Args:
        job: The target and the settings.
        note: Called with notes for the reader of the results.
    """

    def __init__(self, job: GeneratorJob, note: Callable[[str], None]) -> None:
        super().__init__()
        settings = job.settings
        self._route, self._settings = job.route, settings
        self._note = note
        self._model = settings.model or job.target.model
        self._usage = job.route != "generate_stream"
        self._usage_accepted = False
        address = job.target.address.removesuffix("/").removesuffix("/v1")
        self._head = request_head(address, PATHS[job.route], settings.all_headers)
        self._pool = ConnectionPool(address, settings.connect_timeout)
        self._active: set[StreamedResponse] = set()

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    @property
    def tokens(self) -> int:
        """Tokens so far; the events of responses that are not complete."""
        return self.counters.tokens + sum(len(active.arrivals) for active in self._active)

    async def send(
        self,
        item: IndexedRequest,
        due: float | None = None,
        conversation: ConversationState | None = None,
        warmup: bool = False,
    ) -> RequestFinished:
        """Send a request and wait for the end of its response; the record has its error.

        Args:
            due: When to start, or None for now.
            conversation: The conversation that the request continues.

        Raises:
            CancelledError: The step was stopped; there is no record then.
        """
        request, counters = item.request, self.counters
        started = self.now()
        if due is not None:
            counters.late.append(started - due)
        counters.in_flight += 1
        response, written = StreamedResponse(), started
        prompt = (conversation or ConversationState()).prompt(self._route, request)

        def on_write() -> None:
            nonlocal written
            written = self.now()

        async def exchange(usage: bool) -> int:
            nonlocal response
            self._active.discard(response)
            response = StreamedResponse()
            self._active.add(response)
            content = request_body(
                self._route, self._settings, self._model, request.max_tokens, prompt, usage
            )
            framed = b"%b%d\r\n\r\n%b" % (self._head, len(content), content)
            await self._pool.send(framed, response, on_write)
            response.complete()
            return response.status

        try:
            async with asyncio.timeout(self._settings.timeout):
                usage = self._usage
                status = await exchange(usage)
                if usage and status == 200:
                    self._usage_accepted = True
                elif (
                    usage
                    and not self._usage_accepted
                    and status in _USAGE_REFUSED  # perhaps because of stream_options
                    and await exchange(usage=False) == 200
                    and self._usage
                ):
                    self._usage = False
                    self._note(_NO_USAGE)
        except TimeoutError:
            response.fail("timeout", f"no complete response within {self._settings.timeout:g} s")
        except ConnectError as error:
            response.fail("connect", str(error))
        except BrokenResponseError as error:
            response.fail("cut off", str(error))
        except asyncio.CancelledError:
            if not self.expired:
                raise
            response.fail("unfinished", "the step's time was over")
        finally:
            counters.in_flight -= 1
            self._active.discard(response)
        sent = request.prompt_tokens + (conversation.tokens if conversation else 0)
        record = self._record(item, response, written, due, sent, warmup)
        text = "".join(response.pieces)
        counters.add(record)
        if conversation is not None:
            conversation.add(request, record, text)
        return RequestFinished(record, text)

    def _record(
        self,
        item: IndexedRequest,
        response: StreamedResponse,
        written: float,
        due: float | None,
        sent_tokens: int,
        warmup: bool,
    ) -> BenchRequestRecord:
        """The record of a response that has ended; ``sent_tokens`` are those of the texts."""
        output, read = response.output_tokens, response.input_tokens
        if read is None:
            read = sent_tokens
        return BenchRequestRecord(
            index=item.index,
            scheduled=written if due is None else due,
            dispatched=written,
            arrivals=[arrival - self.origin for arrival in response.arrivals],
            counts=response.counts,
            finished=self.now() if response.error else response.touched - self.origin,
            input_tokens=read,
            output_tokens=sum(response.counts) if output is None else output,
            image_tokens=max(0, read - sent_tokens) if item.request.images else 0,
            counted_by="events" if output is None else "usage",
            error=response.error,
            detail=response.detail,
            finish_reason=response.finish_reason,
            warmup=warmup,
        )
