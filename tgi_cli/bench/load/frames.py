"""What passes between a run and its load generators: msgpack behind four bytes of length.

To the generator go a Job, Requests as they are made, NoMore after the last, and Begin once all
generators are Ready. SIGTERM asks it to stop; it still answers with Ended. A closed pipe ends it.
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
from tgi_cli.process.framing import FrameDecoder, encode_frame, read_frame


class GeneratorJob(msgspec.Struct, frozen=True, tag=True):
    """The step, or one generator's share of it.

    Attributes:
        index: of the step in its run.
        clients: of a ``concurrency`` step, how many are this generator's.
        expected: requests or runs that it will get; 0: not known.
    """

    target: BenchTarget
    step: BenchStep
    settings: RequestSettings
    route: Route
    index: int
    clients: int
    expected: int


class IndexedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request and its number within the step."""

    index: int
    request: BenchRequest


class RequestChunk(msgspec.Struct, frozen=True, tag=True):
    """Some more."""

    items: list[IndexedRequest]


class EndOfRequests(msgspec.Struct, frozen=True, tag=True):
    """That were all."""


class BeginStep(msgspec.Struct, frozen=True, tag=True):
    """``origin``: the second 0 of the step, on time.perf_counter(), which all processes share."""

    origin: float


class GeneratorReady(msgspec.Struct, frozen=True, tag=True):
    """The generator can begin."""


class RequestFinished(msgspec.Struct, frozen=True, tag=True):
    """One request is over; ``text`` is what was generated."""

    record: BenchRequestRecord
    text: str


class RunNote(msgspec.Struct, frozen=True, tag=True):
    """Something that a reader of the figures must know."""

    text: str


class GeneratorEnded(msgspec.Struct, frozen=True, tag=True):
    """The last frame; ``stopped`` says why if that was before the step's own end."""

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

_encoder = msgspec.msgpack.Encoder()
_to_generator = msgspec.msgpack.Decoder(ToGenerator)
_from_generator = msgspec.msgpack.Decoder(FromGenerator)


def pack(message: ToGenerator | FromGenerator) -> bytes:
    """Return the message as a frame."""
    return encode_frame(_encoder.encode(message))


class FrameReader:
    """Decodes what a generator wrote."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder()

    def feed(self, data: bytes) -> list[FromGenerator]:
        """Return the messages that are complete by now. Raises msgspec.DecodeError."""
        return [_from_generator.decode(body) for body in self._decoder.feed(data)]


def read(stream: BinaryIO) -> ToGenerator | None:
    """Read the next message to the generator, or None if the pipe is closed. Blocks."""
    body = read_frame(stream)
    return None if body is None else _to_generator.decode(body)
