"""What a run of a benchmark is made of: the plan, the events while it runs, the record it leaves.

All are msgspec structs, so that they cross processes (msgpack) and are kept in files (JSON) as
they are. Times are seconds of one monotonic clock, counted from the start of their step, unless a
name says otherwise.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

VERSION = 1
"""Of saved runs. A reader takes every version up to its own."""


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that a workload wants sent.

    Attributes:
        prompt: text; with ``messages`` the new turn of a conversation is the last of these.
        prompt_tokens: as this machine's tokenizer counts it; 0 where there is none.
        max_tokens: to be generated at most; with ``ignore_eos`` exactly.
        at: when it is due; None: as soon as a place is free.
        conversation: requests of one run one after the other, each behind the answer before it.
        think: seconds between that answer and this request.
    """

    prompt: str
    prompt_tokens: int
    max_tokens: int
    at: float | None = None
    messages: list[dict[str, str]] | None = None
    conversation: int | None = None
    think: float = 0.0


class BenchStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One load to be held for a while: a batch size, a number of clients, a rate.

    Attributes:
        kind: ``batch`` closed batches (all at once, then all again), ``concurrency`` so many
            clients that each wait for their answer, ``rate`` requests when they are due.
        value: batch size, clients, or requests per second.
        label: for tabs and tables.
        warmup: of its requests (or runs of a batch), how many are not counted.
        requests, seconds: when it ends, whichever comes first; None: no such bound.
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
        scheduled: when it was due; equal to ``dispatched`` where nothing was due.
        dispatched: when its first byte was written.
        arrivals: when each event with tokens came; the first is the first token's.
        counts: tokens in each of them, as far as the stream says (1 where it does not).
        finished: when the answer was whole, or the error known.
        input_tokens, output_tokens: as ``counted_by`` counts them.
        counted_by: the server's own usage, this machine's tokenizer, or events.
        error: None, or what kind: ``http 429``, ``connect``, ``timeout``, ``stream`` ...
        detail: the error's text, shortened.
        warmup: not to be counted.
    """

    index: int
    scheduled: float
    dispatched: float
    arrivals: list[float]
    counts: list[int]
    finished: float
    input_tokens: int
    output_tokens: int
    counted_by: Literal["usage", "tokenizer", "events"] = "events"
    error: str | None = None
    detail: str = ""
    finish_reason: str = ""
    warmup: bool = False


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One batch run straight on a shard, or over HTTP as TGI's benchmark would count it.

    Attributes:
        prefill: seconds of the prefill call.
        decodes: seconds of each decode call (over HTTP: between two tokens, mean of the batch).
    """

    batch_size: int
    sequence_length: int
    decode_length: int
    prefill: float
    decodes: list[float]
    warmup: bool = False


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the load generator itself fared during a step.

    Attributes:
        lag_p99: how late its own clock ticked; 0.1 s is a client that falls behind.
        cpu: share of one core that its busiest process took.
        late_p99: how long after they were due requests were dispatched.
        behind: whether its figures are its own limit rather than the server's; ``reason`` says
            why.
    """

    lag_p99: float = 0.0
    cpu: float = 0.0
    late_p99: float = 0.0
    behind: bool = False
    reason: str = ""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step that has run.

    Attributes:
        began: Unix time.
        duration: from the first request that counts to the end of the last.
        server: its own figures over the step, from /metrics, by TGI's names; empty where it has
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
    """What is measured.

    Attributes:
        kind: ``shard-v3`` or ``engine`` (a socket), ``tgi`` or ``openai`` routes of a URL.
        info: what the server says of itself (/info, /v1/models).
        started_here: whether this run started the server, and with which command.
    """

    kind: Literal["shard-v3", "engine", "tgi", "openai"]
    address: str
    model: str
    info: dict[str, Any] = {}
    started_here: list[str] = []


class BenchRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole run: what is saved, reported, compared and opened again.

    Attributes:
        created: Unix time.
        command: the command line.
        machine: processor, cores, memory, GPUs, system, versions.
        workload: every setting that shaped the requests, seed included.
        slo: limits by metric in ms, such as ``{"ttft": 200, "tpot": 50}``.
        failure: what ended the run before its plan did; empty if nothing, or somebody, did.
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


# What happens while a run goes on, in order; the screens and the plain output follow these.


class StepStarted(msgspec.Struct, frozen=True, tag=True):
    """``index`` of ``total`` begins; ``total`` is 0 where the end is not known (a search)."""

    index: int
    total: int
    step: BenchStep


class StepProgress(msgspec.Struct, frozen=True, tag=True):
    """A few times a second: how far the step is, and what is in flight."""

    index: int
    done: int
    expected: int
    """Requests or runs of the step; 0 where only its time is bounded."""
    elapsed: float
    in_flight: int
    errors: int
    tokens_per_second: float
    queued: int = 0


class RequestDone(msgspec.Struct, frozen=True, tag=True):
    """One request is over."""

    index: int
    record: BenchRequestRecord


class BatchDone(msgspec.Struct, frozen=True, tag=True):
    """One run of a batch is over."""

    index: int
    record: BatchRecord


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """A run within a step failed; the sweep goes on unless ``fatal``."""

    index: int
    cause: str
    remedy: str = ""
    fatal: bool = False


class StepEnded(msgspec.Struct, frozen=True, tag=True):
    """The step is over; ``record`` has all of it."""

    index: int
    record: StepRecord


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The run is over, whole or cut short (``notes`` say why)."""

    run: BenchRun


Event = StepStarted | StepProgress | RequestDone | BatchDone | StepFailed | StepEnded | RunEnded
