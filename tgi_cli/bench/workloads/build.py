"""Builds the requests of each step from the options, and describes them for the saved run."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from tgi_cli.bench.events import BenchRequest, BenchStep
from tgi_cli.bench.plan import (
    DEFAULT_RUNS,
    DEFAULT_SECONDS,
    BenchOptions,
    RequestsOfStep,
    bounds_of,
)
from tgi_cli.bench.settings import RequestSettings, TokenCounter
from tgi_cli.bench.workloads.distributions import ArrivalProcess, LengthDistribution, scheduled
from tgi_cli.bench.workloads.files import ShareGptWorkload, file_prompts, sharegpt, trace
from tgi_cli.bench.workloads.images import with_images
from tgi_cli.bench.workloads.synthetic import (
    ConversationWorkload,
    SyntheticWorkload,
    conversations,
    synthetic,
)
from tgi_cli.errors import ConfigError

DEFAULT_OUTPUT = "128"
"""Tokens of a response, unless a file or the user sets them."""


def requests_of(options: BenchOptions, tokenizer: TokenCounter) -> RequestsOfStep:
    """Return a function that builds the requests of a step.

    Their seed depends on the step's kind and value. So no step repeats the synthetic prompts of
    another, which a prefix cache would hold by then, and two runs send the same requests.

    Raises:
        ConfigError: Invalid lengths, arrivals or files; raised here, not in the first step.
    """
    input_ = LengthDistribution.parse(options.input_tokens)
    output = LengthDistribution.parse(options.output_tokens or DEFAULT_OUTPUT)
    arrivals = _arrivals(options)

    def requests(step: BenchStep, index: int) -> Iterator[BenchRequest]:
        seed = zlib.crc32(f"{options.seed} {step.kind} {step.value:g}".encode())
        stream = _stream(options, tokenizer, input_, output, seed)
        if options.images is not None:
            stream = with_images(stream, options.images, seed)
        if step.kind == "rate" and options.load != "trace":
            return scheduled(stream, arrivals.times(step.value, seed))
        return stream

    if not list(islice(requests(BenchStep(kind="concurrency", value=1, label=""), 0), 1)):
        raise ConfigError("the workload has no requests", "name another file")
    return requests


def _arrivals(options: BenchOptions) -> ArrivalProcess:
    if options.load != "ramp":
        return ArrivalProcess.parse(options.arrival)
    first, last = options.values
    return ArrivalProcess.parse(f"ramp:{first:g},{last:g},{options.seconds or DEFAULT_SECONDS:g}")


def _stream(
    options: BenchOptions,
    tokenizer: TokenCounter,
    input_: LengthDistribution,
    output: LengthDistribution,
    seed: int,
) -> Iterator[BenchRequest]:
    chat, prefix, turns = options.chat, options.prefix, options.turns
    if options.trace is not None:
        return trace(options.trace, tokenizer, options.seed, speed=options.speed, chat=chat)
    if options.prompts is not None and options.prompts.suffix == ".json":
        shared = ShareGptWorkload(
            output=output if options.output_tokens else None,
            turns=LengthDistribution.parse(turns).high if turns else 1,
            think=options.think,
            chat=chat,
        )
        return sharegpt(options.prompts, tokenizer, shared, seed)
    if options.prompts is not None:
        return file_prompts(options.prompts, tokenizer, output, seed, chat=chat)
    if turns:
        talk = ConversationWorkload(
            turns=LengthDistribution.parse(turns),
            first=input_,
            turn=input_,
            output=output,
            think=options.think,
            system_tokens=prefix.tokens if prefix else 0,
            chat=chat,
        )
        return conversations(tokenizer, talk, seed)
    return synthetic(tokenizer, SyntheticWorkload(input_, output, prefix, chat), seed)


def notes_of(options: BenchOptions) -> list[str]:
    """Notes on the workload for the reader of the results."""
    notes = []
    if options.prompts is not None:
        notes.append(
            "each step repeats the prompts of the file, which a prefix cache may hold by then"
        )
    if options.images is not None and options.load == "batch" and not options.chat:
        notes.append("a shard does not report the tokens of images: prompts count as their text")
    return notes


def described(
    options: BenchOptions, settings: RequestSettings, tokenizer_name: str
) -> dict[str, Any]:
    """Describe the workload for ``BenchRun.workload``, without API keys and headers."""
    sampling = msgspec.structs.asdict(settings.sampling)
    common: dict[str, Any] = {"load": options.load, "tokenizer_name": tokenizer_name}
    if options.images is not None:
        common["images"] = str(options.images)
    if options.load == "batch":
        return {
            **common,
            "sequence_length": int(options.input_tokens),
            "decode_length": int(options.output_tokens),
            "runs": options.requests or DEFAULT_RUNS,
            "warmups": options.warmups,
            **sampling,
            "seed": options.seed,
        }
    traced = options.trace is not None
    described = {
        **common,
        "route": settings.route,
        "input_tokens": None if traced else options.input_tokens,
        "output_tokens": None if traced else options.output_tokens or DEFAULT_OUTPUT,
        "arrival": str(_arrivals(options)) if options.load in ("rate", "ramp", "peak") else None,
        "prefix": msgspec.structs.asdict(options.prefix) if options.prefix else None,
        "turns": options.turns or None,
        "think": options.think or None,
        "prompts": str(options.prompts) if options.prompts else None,
        "trace": str(options.trace) if traced else None,
        "requests": options.requests,
        "seconds": None if traced else bounds_of(options).seconds,
        "warmups": options.warmups,
        "ignore_eos": settings.ignore_eos,
        "extra_body": settings.extra_body or None,
        **{name: value for name, value in sampling.items() if value},
        "seed": options.seed,
    }
    return {name: value for name, value in described.items() if value is not None}
