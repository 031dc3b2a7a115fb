"""What a user asked to be measured, and the plan, the requests and the description that follow."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from tgi_cli.bench import sweeps
from tgi_cli.bench.events import BenchRequest, BenchStep
from tgi_cli.bench.settings import RequestSettings, TokenCounter
from tgi_cli.bench.statistics.metrics import ENOUGH
from tgi_cli.bench.sweeps import BenchPlan, RequestsOfStep, StepBounds
from tgi_cli.bench.workloads import (
    ArrivalProcess,
    ConversationWorkload,
    LengthDistribution,
    SyntheticWorkload,
    conversations,
    file_prompts,
    scheduled,
    sharegpt,
    synthetic,
    trace,
)
from tgi_cli.errors import ConfigError

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
CLIENTS = (1, 2, 4, 8, 16, 32)
OUTPUT = "128"
"""Tokens of an answer, if neither a file nor the user says otherwise."""
SECONDS = 30.0
"""Of a step of clients or of a rate, if nothing else bounds it."""

LoadKind = Literal["batch", "concurrency", "rate", "ramp", "sweep", "peak", "trace"]


class SharedPrefix(msgspec.Struct, frozen=True):
    """Beginnings that prompts share: so long, in so many of them, so many different ones."""

    tokens: int
    share: float = 1.0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """Of ``512``, ``512:0.5`` or ``512:0.5:4``. Raises ConfigError."""
        try:
            tokens, *rest = text.split(":")
            prefix = cls(
                int(tokens), *(kind(part) for kind, part in zip((float, int), rest, strict=False))
            )
            if len(rest) > 2 or prefix.tokens < 1 or not 0 < prefix.share <= 1 or prefix.count < 1:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--prefix: {text!r} is not TOKENS, TOKENS:SHARE or TOKENS:SHARE:DIFFERENT",
                "for example 512:0.5:4",
            ) from None
        return prefix


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as it was asked for.

    Attributes:
        load: what is varied.
        values: batch sizes, clients or rates; of a ramp the first and the last rate.
        input_tokens, output_tokens: lengths as ``LengthDistribution`` parses them; whole
            numbers for batches. Empty: those of the file, or the default.
        seconds, requests: of each step; of batches, ``requests`` are the runs.
        slo: limits by metric, ms.
        enough: share of requests that must meet them, of a search for the peak rate.
    """

    load: LoadKind
    values: tuple[float, ...] = ()
    input_tokens: str = "256"
    output_tokens: str = ""
    arrival: str = "poisson"
    prefix: SharedPrefix | None = None
    turns: str = ""
    think: float = 0.0
    prompts: Path | None = None
    trace: Path | None = None
    speed: float = 1.0
    requests: int | None = None
    seconds: float | None = None
    warmups: int = 1
    seed: int = 0
    slo: dict[str, float] = {}
    enough: float = ENOUGH
    chat: bool = False


def plan_of(options: BenchOptions) -> BenchPlan:
    """The steps. Raises ConfigError for values that no step can have."""
    bounds = _bounds(options)
    values = options.values
    if any(not value > 0 for value in values):
        raise ConfigError("a load of 0 or less cannot be measured", "give values above 0")
    match options.load:
        case "batch":
            sizes = [int(value) for value in values or BATCH_SIZES]
            return sweeps.batches(sizes, options.requests or 10, options.warmups)
        case "concurrency":
            return sweeps.clients([int(value) for value in values or CLIENTS], bounds)
        case "rate":
            return sweeps.rates(values, bounds)
        case "ramp":
            first, last = values
            label = f"{first:g} to {last:g}/s"
            return sweeps.listed("ramp", [sweeps.rate_step((first + last) / 2, bounds, label)])
        case "sweep":
            return sweeps.to_saturation(bounds)
        case "peak":
            return sweeps.peak_rate(options.slo, bounds, enough=options.enough)
        case "trace":
            assert options.trace is not None
            step = BenchStep(
                kind="rate",
                value=options.speed,
                label=f"trace x{options.speed:g}",
                requests=options.requests,
                seconds=options.seconds,
            )
            return sweeps.listed("trace", [step])


def _bounds(options: BenchOptions) -> StepBounds:
    seconds = options.seconds
    if seconds is None and (options.requests is None or options.load == "ramp"):
        seconds = SECONDS
    return StepBounds(requests=options.requests, seconds=seconds, warmups=options.warmups)


def requests_of(options: BenchOptions, tokenizer: TokenCounter) -> RequestsOfStep:
    """What each step sends; built anew for each, from a seed that its kind and value decide.

    So no step repeats another's made-up prompts, which a prefix cache would know by then, and
    two runs send the same in the same steps.

    Raises:
        ConfigError: lengths, arrivals or files that cannot be; now rather than in the first step.
    """
    lengths = (
        LengthDistribution.parse(options.input_tokens),
        LengthDistribution.parse(options.output_tokens or OUTPUT),
    )
    arrivals = _arrivals(options)

    def requests(step: BenchStep, index: int) -> Iterable[BenchRequest]:
        seed = zlib.crc32(f"{options.seed} {step.kind} {step.value:g}".encode())
        stream = _stream(options, tokenizer, *lengths, seed)
        if step.kind == "rate" and options.load != "trace":
            return scheduled(stream, arrivals.times(step.value, seed))
        return stream

    first = requests(BenchStep(kind="concurrency", value=1, label=""), 0)
    if not list(islice(first, 1)):
        raise ConfigError("the workload has no requests", "give another file")
    return requests


def _arrivals(options: BenchOptions) -> ArrivalProcess:
    if options.load != "ramp":
        return ArrivalProcess.parse(options.arrival)
    first, last = options.values
    return ArrivalProcess.parse(f"ramp:{first:g},{last:g},{options.seconds or SECONDS:g}")


def _stream(
    options: BenchOptions,
    tokenizer: TokenCounter,
    input_: LengthDistribution,
    output: LengthDistribution,
    seed: int,
) -> Iterator[BenchRequest]:
    if options.trace is not None:
        return trace(options.trace, tokenizer, options.seed, speed=options.speed, chat=options.chat)
    if options.prompts is not None:
        if options.prompts.suffix == ".json":
            turns = LengthDistribution.parse(options.turns).high if options.turns else 1
            return sharegpt(
                options.prompts,
                tokenizer,
                output if options.output_tokens else None,
                seed=seed,
                chat=options.chat,
                turns=turns,
                think=options.think,
            )
        return file_prompts(
            options.prompts, tokenizer, output, seed, chat=options.chat, shuffle=True
        )
    if options.turns:
        spec = ConversationWorkload(
            turns=LengthDistribution.parse(options.turns),
            first=input_,
            turn=input_,
            output=output,
            think=options.think,
            system_tokens=options.prefix.tokens if options.prefix else 0,
            chat=options.chat,
        )
        return conversations(tokenizer, spec, seed)
    prefix = options.prefix or SharedPrefix(0)
    made = SyntheticWorkload(
        prompt=input_,
        output=output,
        prefix_tokens=prefix.tokens,
        prefix_share=prefix.share,
        prefixes=prefix.count,
        chat=options.chat,
    )
    return synthetic(tokenizer, made, seed)


def notes_of(options: BenchOptions) -> list[str]:
    """What a reader of the figures must know of the workload."""
    if options.prompts is None:
        return []
    return ["the file's prompts come again in every step: a prefix cache may know them by then"]


def described(
    options: BenchOptions, settings: RequestSettings, tokenizer_name: str
) -> dict[str, Any]:
    """Every setting that shaped the requests, for ``Run.workload``; no key, no header."""
    sampling = msgspec.structs.asdict(settings.sampling)
    common: dict[str, Any] = {"load": options.load, "tokenizer_name": tokenizer_name}
    if options.load == "batch":
        return {
            **common,
            "sequence_length": int(options.input_tokens),
            "decode_length": int(options.output_tokens),
            "runs": options.requests or 10,
            "warmups": options.warmups,
            **sampling,
            "seed": options.seed,
        }
    bounds = _bounds(options)
    from_file = options.trace is not None
    lengths = {
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens or OUTPUT,
    }
    chosen: dict[str, Any] = {
        **common,
        "route": settings.route,
        **({} if from_file else lengths),
        "arrival": str(_arrivals(options)) if options.load in ("rate", "ramp", "peak") else None,
        "prefix": msgspec.structs.asdict(options.prefix) if options.prefix else None,
        "turns": options.turns or None,
        "think": options.think or None,
        "prompts": str(options.prompts) if options.prompts else None,
        "trace": str(options.trace) if options.trace else None,
        "requests": options.requests,
        "seconds": None if from_file else bounds.seconds,
        "warmups": options.warmups,
        "ignore_eos": settings.ignore_eos,
        "extra_body": settings.extra_body or None,
        **{name: value for name, value in sampling.items() if value},
        "seed": options.seed,
    }
    return {name: value for name, value in chosen.items() if value is not None}
