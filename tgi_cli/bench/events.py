"""Requests, steps and records of a benchmark, and the events while it runs.

All are msgspec structs, which processes exchange as msgpack and files store as JSON. Times are
seconds of a monotonic clock since the start of their step, unless documented otherwise.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

VERSION = 1
"""Version of saved runs. A reader supports every version up to its own."""


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a workload.

    Attributes:
        prompt: Text of the prompt; the new turn if ``messages`` are a conversation.
        prompt_tokens: Tokens as counted by the local tokenizer, or 0 without one.
        max_tokens: Maximum tokens to generate; exact with ``ignore_eos``.
        at: When the request is due, or None for as soon as a client is free.
        conversation: Number of its conversation, whose requests run one after another, each after
            the response to the one before.
        think: Seconds between that response and this request.
        images: ``data:`` URLs of its images, which come before the text.
    """

    prompt: str
    prompt_tokens: int
    max_tokens: int
    at: float | None = None
    messages: list[dict[str, str]] | None = None
    conversation: int | None = None
    think: float = 0.0
    images: list[str] = []


class BenchStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A load for a limited time: a batch size, a number of concurrent clients, or a rate.

    Attributes:
        kind: ``batch`` for closed batches, ``concurrency`` for clients that each wait for their
            response (closed loop), ``rate`` for requests at given times (open loop).
        value: Batch size, concurrent clients, or requests per second.
        label: Label in tabs and tables.
        warmup: Number of requests, or of runs of a batch, that are not counted.
        requests, seconds: Limits, whichever is reached first, or None for no limit.
    """

    kind: Literal["batch", "concurrency", "rate"]
    value: float
    label: str
    warmup: int = 0
    requests: int | None = None
    seconds: float | None = None

    @property
    def title(self) -> str:
        """``batch size 8``, ``8 clients``, ``2.5 requests/s``."""
        if self.kind == "batch":
            return f"batch size {self.label}"
        if self.kind == "concurrency":
            return f"{self.label} client{'' if self.value == 1 else 's'}"
        return re.sub("/s$", " requests/s", self.label)


class BenchRequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as its client saw it.

    Attributes:
        scheduled: When it was due; equal to ``dispatched`` for clients that wait.
        dispatched: When its first byte was written.
        arrivals: When each event with tokens arrived; the first is that of the first token.
        counts: Tokens of each event; 1 if the stream does not count.
        finished: When the response was complete, or the error known.
        input_tokens, output_tokens: Tokens as counted by ``counted_by``.
        image_tokens: Of ``input_tokens``, those of images and of the chat template: all that the
            text does not have. 0 without images, or if the server does not count them.
        counted_by: The server's usage, the local tokenizer, or the number of events.
        error: Kind of error (``http 429``, ``connect``, ``timeout``, ``stream`` ...), or None.
        detail: Message of the error, shortened.
        warmup: Whether it is not counted.
    """

    index: int
    scheduled: float
    dispatched: float
    arrivals: list[float]
    counts: list[int]
    finished: float
    input_tokens: int
    output_tokens: int
    image_tokens: int = 0
    counted_by: Literal["usage", "tokenizer", "events"] = "events"
    error: str | None = None
    detail: str = ""
    finish_reason: str = ""
    warmup: bool = False


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of a batch on a shard, or over HTTP as TGI's benchmark would count it.

    Attributes:
        prefill: Seconds of the prefill call.
        decodes: Seconds of each decode call (over HTTP: between two tokens, mean of the batch).
    """

    batch_size: int
    sequence_length: int
    decode_length: int
    prefill: float
    decodes: list[float]
    warmup: bool = False


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the load generator kept up during a step.

    Attributes:
        lag_p99: Lag of its event loop; it falls behind from 0.1 s on.
        lag_p50: The median of that, below which it resolves nothing; 0 in older records.
        cpu: Share of a core that its busiest process used.
        late_p99: Delay from when requests were due until they were dispatched.
        behind: Whether it was the bottleneck instead of the server, for ``reason``.
    """

    lag_p99: float = 0.0
    lag_p50: float = 0.0
    cpu: float = 0.0
    late_p99: float = 0.0
    behind: bool = False
    reason: str = ""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A completed step.

    Attributes:
        began: Unix time.
        duration: Seconds from the first counted request to the end of the last.
        server: The server's metrics over the step, from /metrics, by TGI's names; empty if it has
            none.
    """

    step: BenchStep
    began: float
    duration: float
    requests: list[BenchRequestRecord] = []
    batches: list[BatchRecord] = []
    client: ClientHealth = ClientHealth()
    server: dict[str, float] = {}
    stopped: str = ""


class BenchTarget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The server that is measured.

    Attributes:
        kind: ``shard-v3`` (a socket), ``tgi`` or ``openai`` routes of a URL.
        info: The server's /info or its entry in /v1/models.
        started_here: The command with which this run started the server, if it did.
    """

    kind: Literal["shard-v3", "tgi", "openai"]
    address: str
    model: str
    info: dict[str, Any] = {}
    started_here: list[str] = []


class BenchRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole run, as it is saved.

    Attributes:
        created: Unix time.
        command: The command line.
        machine: Processor, cores, memory, GPUs, system, versions.
        workload: Every setting that shaped the requests, with the seed.
        slo: Limits by metric in ms, such as ``{"ttft": 200, "tpot": 50}``.
        failure: The error that ended the run early; empty if none did.
    """

    version: int = VERSION
    created: float
    command: list[str]
    tgi: str
    machine: dict[str, Any]
    target: BenchTarget
    workload: dict[str, Any]
    steps: list[StepRecord]
    slo: dict[str, float] = {}
    notes: list[str] = []
    failure: str = ""


# The events of a run, in order. The dashboard and the text output follow them.


class StepStarted(msgspec.Struct, frozen=True, tag=True):
    """Step ``index`` of ``total`` begins; ``total`` is 0 if unknown (a search)."""

    index: int
    total: int
    step: BenchStep


class StepProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of a step, a few times per second."""

    index: int
    done: int
    expected: int
    """Requests or runs of the step, or 0 if only its time is limited."""
    elapsed: float
    in_flight: int
    errors: int
    tokens_per_second: float


class RequestDone(msgspec.Struct, frozen=True, tag=True):
    """A request has ended."""

    index: int
    record: BenchRequestRecord


class BatchDone(msgspec.Struct, frozen=True, tag=True):
    """A run of a batch has ended."""

    index: int
    record: BatchRecord


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """A step failed; the run continues unless ``fatal``."""

    index: int
    cause: str
    remedy: str = ""
    fatal: bool = False


class StepEnded(msgspec.Struct, frozen=True, tag=True):
    """A step has ended; ``record`` has all of it."""

    index: int
    record: StepRecord


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The run has ended; its ``notes`` give the reason if it did so early."""

    run: BenchRun


Event = StepStarted | StepProgress | RequestDone | BatchDone | StepFailed | StepEnded | RunEnded
