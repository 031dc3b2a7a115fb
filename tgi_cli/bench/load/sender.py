"""What requests say, by route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from tgi_cli.bench.events import BenchRequest, BenchRequestRecord
from tgi_cli.bench.load.frames import GeneratorJob, IndexedRequest, RequestFinished
from tgi_cli.bench.load.http import BrokenResponseError, ConnectError, ConnectionPool, request_head
from tgi_cli.bench.load.streams import StreamedResponse
from tgi_cli.bench.settings import BenchSampling, RequestSettings, Route

PATHS: dict[Route, str] = {
    "generate_stream": "/generate_stream",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_DRAWN = ("temperature", "top_k", "top_p", "typical_p")


def request_body(
    route: Route,
    settings: RequestSettings,
    model: str,
    request: BenchRequest,
    said: list[dict[str, str]] | str,
    usage: bool,
) -> bytes:
    """The JSON of one request.

    Args:
        said: the whole prompt, or all messages.
        usage: ask for a usage at the end of OpenAI's streams.
    """
    if route == "generate_stream":
        parameters: dict[str, Any] = {"max_new_tokens": request.max_tokens, "details": True}
        content: dict[str, Any] = {
            "inputs": said,
            "parameters": parameters | sampling_fields(settings.sampling),
        }
    else:
        content = {
            "model": model,
            "messages" if route == "chat" else "prompt": said,
            "max_tokens": request.max_tokens,
            "stream": True,
        }
        content |= _openai(settings.sampling)
        if usage:
            content["stream_options"] = {"include_usage": True}
        if settings.ignore_eos:
            content["ignore_eos"] = True
    return msgspec.json.encode(content | settings.extra_body)


def sampling_fields(sampling: BenchSampling) -> dict[str, Any]:
    """What was asked for, by TGI's names."""
    return {
        name: value
        for name, value in msgspec.structs.asdict(sampling).items()
        if value is not None and value is not False
    }


def _openai(sampling: BenchSampling) -> dict[str, Any]:
    """The same by OpenAI's: greedy, as TGI is, unless something says that tokens are drawn."""
    said = sampling_fields(sampling)
    drawn = said.pop("do_sample", False) or any(name in said for name in _DRAWN)
    return said if drawn else said | {"temperature": 0}


_USAGE_REFUSED = (400, 422)
_NO_USAGE = "The server refuses stream_options, so that its answers were counted here."


@dataclass
class ConversationState:
    """What was said so far in one conversation.

    Attributes:
        messages, text: all turns and answers, for the chat route and for the others.
        tokens: of all that, as far as was counted.
        ended: when the last answer was whole.
        failed: a turn had no answer; there can be no more.
    """

    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    ended: float = 0.0
    failed: bool = False


@dataclass
class RequestCounters:
    """How the requests of a generator went so far.

    Attributes:
        refused_connections: in a row, since ``refused_since``; 0 once one was made.
        kinds: errors by kind.
        tokens: of answers that are over.
        late: seconds behind their time at which requests were begun.
    """

    done: int = 0
    good: int = 0
    errors: int = 0
    in_flight: int = 0
    tokens: int = 0
    refused_connections: int = 0
    refused_since: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    late: list[float] = field(default_factory=list)


class RequestSender:
    """Sends requests over connections that it keeps.

    Args:
        job: says where and how.
        note: takes what a reader of the figures must know.

    Attributes:
        origin: the second 0 of the step.
        expired: the step's time is over; what is cancelled now counts as unfinished.
    """

    def __init__(self, job: GeneratorJob, note: Callable[[str], None]) -> None:
        settings = job.settings
        self._job = job
        self._note = note
        self._route = job.route
        self._model = settings.model or job.target.model
        self._usage = settings.include_usage and job.route != "generate_stream"
        self._usage_taken = False
        headers = dict(settings.headers)
        if settings.api_key:
            headers = {"authorization": f"Bearer {settings.api_key}"} | headers
        address = job.target.address.removesuffix("/").removesuffix("/v1")
        self._head = request_head(address, PATHS[job.route], headers)
        self._pool = ConnectionPool(
            address,
            insecure=settings.insecure,
            ca_file=settings.ca_file,
            connect_timeout=settings.connect_timeout,
        )
        self.tally = RequestCounters()
        self.origin = 0.0
        self.expired = False
        self._active: set[StreamedResponse] = set()

    def close(self) -> None:
        """Close its connections."""
        self._pool.close()

    def now(self) -> float:
        """Seconds of the step."""
        return perf_counter() - self.origin

    @property
    def tokens(self) -> int:
        """That came so far; of answers under way, as many as their events."""
        return self.tally.tokens + sum(len(answer.arrivals) for answer in self._active)

    async def send(
        self,
        item: IndexedRequest,
        due: float | None = None,
        talk: ConversationState | None = None,
        warmup: bool = False,
    ) -> RequestFinished:
        """Send a request and wait for the end of its answer; errors are in the record.

        Args:
            due: when it should begin; None: now.
            talk: that it goes on with.

        Raises:
            CancelledError: the step was stopped; no record is made then.
        """
        tally = self.tally
        begun = self.now()
        if due is not None:
            tally.late.append(begun - due)
        tally.in_flight += 1
        answer, written = StreamedResponse(self._route), begun
        said = self._said(item.request, talk)

        def on_write() -> None:
            nonlocal written
            written = self.now()

        async def ask(usage: bool) -> StreamedResponse:
            nonlocal answer
            self._active.discard(answer)
            answer = StreamedResponse(self._route)
            self._active.add(answer)
            content = request_body(
                self._route, self._job.settings, self._model, item.request, said, usage
            )
            framed = b"%b%d\r\n\r\n%b" % (self._head, len(content), content)
            await self._pool.send(framed, answer, on_write)
            answer.complete()
            return answer

        try:
            async with asyncio.timeout(self._job.settings.timeout):
                usage = self._usage
                status = (await ask(usage)).status
                if usage and status == 200:
                    self._usage_taken = True
                elif (
                    usage
                    and not self._usage_taken
                    and status in _USAGE_REFUSED  # perhaps it was that question
                    and (await ask(usage=False)).status == 200
                    and self._usage
                ):
                    self._usage = False
                    self._note(_NO_USAGE)
        except TimeoutError:
            answer.fail("timeout", f"no whole answer within {self._job.settings.timeout:g} s")
        except ConnectError as error:
            answer.fail("connect", str(error))
        except BrokenResponseError as error:
            answer.fail("cut off", str(error))
        except asyncio.CancelledError:
            if not self.expired:
                raise
            answer.fail("unfinished", "the step's time was over")
        finally:
            tally.in_flight -= 1
            self._active.discard(answer)
        return self._finished(item, answer, due, written, talk, warmup)

    def _said(
        self, request: BenchRequest, talk: ConversationState | None
    ) -> list[dict[str, str]] | str:
        """All messages, or the whole prompt."""
        if self._route == "chat":
            own = request.messages or [{"role": "user", "content": request.prompt}]
            return [*talk.messages, *own] if talk else own
        return f"{talk.text}\n{request.prompt}" if talk and talk.text else request.prompt

    def _finished(
        self,
        item: IndexedRequest,
        answer: StreamedResponse,
        due: float | None,
        written: float,
        talk: ConversationState | None,
        warmup: bool,
    ) -> RequestFinished:
        request = item.request
        ended = answer.touched - self.origin if answer.error is None else self.now()
        text = "".join(answer.pieces)
        said = answer.output_tokens
        output = sum(answer.counts) if said is None else said
        self._count(answer, output, ended)
        read = answer.input_tokens
        if read is None:
            read = request.prompt_tokens + (talk.tokens if talk else 0)
        if talk is not None:
            own = request.messages or [{"role": "user", "content": request.prompt}]
            talk.messages += [*own, {"role": "assistant", "content": text}]
            talk.text = (
                f"{talk.text}\n{request.prompt}{text}" if talk.text else request.prompt + text
            )
            talk.tokens = read + output
            talk.ended, talk.failed = ended, answer.error is not None
        record = BenchRequestRecord(
            index=item.index,
            scheduled=written if due is None else due,
            dispatched=written,
            arrivals=[arrival - self.origin for arrival in answer.arrivals],
            counts=answer.counts,
            finished=ended,
            input_tokens=read,
            output_tokens=output,
            counted_by="events" if said is None else "usage",
            error=answer.error,
            detail=answer.detail,
            finish_reason=answer.finish_reason,
            warmup=warmup,
        )
        return RequestFinished(record, text)

    def _count(self, answer: StreamedResponse, output: int, now: float) -> None:
        tally = self.tally
        tally.done += 1
        tally.tokens += output
        if answer.error is None:
            tally.good += 1
        else:
            tally.errors += 1
            tally.kinds[answer.error] = tally.kinds.get(answer.error, 0) + 1
        if answer.error == "connect":
            if not tally.refused_connections:
                tally.refused_since = now
            tally.refused_connections += 1
        elif answer.error != "unfinished":
            tally.refused_connections = 0
