"""The messages between a run and its load generators: msgpack in frames.

A generator receives a GeneratorJob, RequestChunks as they are built, EndOfRequests, and BeginStep
once all generators are GeneratorReady. SIGTERM ends the step; the generator still sends
GeneratorEnded. It exits when the pipe closes.
"""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from tgi_cli.bench.events import (
    BatchDone,
    BenchRequest,
    BenchRequestRecord,
    BenchStep,
    BenchTarget,
    ClientHealth,
    StepFailed,
    StepProgress,
)
from tgi_cli.bench.settings import RequestSettings, Route
from tgi_cli.process.framing import encode_frame, read_frame


class GeneratorJob(msgspec.Struct, frozen=True, tag=True):
    """A step, or the share of one generator.

    Attributes:
        index: Number of the step in its run.
        clients: Number of concurrent clients of this generator.
        expected: Number of requests or runs of the step, or 0 if unknown.
    """

    target: BenchTarget
    step: BenchStep
    settings: RequestSettings
    route: Route
    index: int
    clients: int
    expected: int


class IndexedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request with its number within the step."""

    index: int
    request: BenchRequest


class RequestChunk(msgspec.Struct, frozen=True, tag=True):
    """Some requests."""

    items: list[IndexedRequest]


class EndOfRequests(msgspec.Struct, frozen=True, tag=True):
    """Sent when there are no more requests."""


class BeginStep(msgspec.Struct, frozen=True, tag=True):
    """Start the step; its second 0 is ``origin`` on time.perf_counter(), which processes share."""

    origin: float


class GeneratorReady(msgspec.Struct, frozen=True, tag=True):
    """The generator is ready to begin."""


class RequestFinished(msgspec.Struct, frozen=True, tag=True):
    """A request has ended; ``text`` is the generated text."""

    record: BenchRequestRecord
    text: str


class RunNote(msgspec.Struct, frozen=True, tag=True):
    """A note for the reader of the results."""

    text: str


class GeneratorEnded(msgspec.Struct, frozen=True, tag=True):
    """The last frame; ``stopped`` is the reason if the step ended early."""

    client: ClientHealth
    stopped: str


ToGenerator = GeneratorJob | RequestChunk | EndOfRequests | BeginStep
FromGenerator = (
    GeneratorReady
    | RequestFinished
    | BatchDone
    | StepProgress
    | StepFailed
    | RunNote
    | GeneratorEnded
)

_encode = msgspec.msgpack.Encoder().encode
_to_generator = msgspec.msgpack.Decoder(ToGenerator)
_from_generator = msgspec.msgpack.Decoder(FromGenerator)


def pack(message: ToGenerator | FromGenerator) -> bytes:
    """Encode a frame."""
    return encode_frame(_encode(message))


def decode(frame: bytes) -> FromGenerator:
    """Decode a frame of a generator. Raises msgspec.DecodeError."""
    message: FromGenerator = _from_generator.decode(frame)
    return message


def read(stream: BinaryIO) -> ToGenerator | None:
    """Wait for the next message to the generator, or None if the pipe is closed."""
    frame = read_frame(stream)
    return None if frame is None else _to_generator.decode(frame)
