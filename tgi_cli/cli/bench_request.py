"""From the settings of ``tgi bench`` to its configuration; validates their combination."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from tgi_cli.bench.plan import BenchOptions, LoadKind, SharedPrefix
from tgi_cli.bench.run import BenchConfig
from tgi_cli.bench.settings import BenchSampling, RequestSettings
from tgi_cli.bench.statistics.rates import parse_slo
from tgi_cli.bench.workloads.distributions import ArrivalProcess, LengthDistribution
from tgi_cli.bench.workloads.images import ImageWorkload
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.setup import checked_key
from tgi_cli.errors import ConfigError
from tgi_cli.files import decode_json

TGI_SOCKET = "/tmp/text-generation-server-0"
_ROUTES = {"auto": "auto", "tgi": "generate_stream", "completions": "completions", "chat": "chat"}
_HTTP_LOADS: tuple[LoadKind, ...] = ("concurrency", "rate", "ramp", "sweep", "trace")
_LOADS: dict[str, LoadKind] = {"batch_size": "batch", **{name: name for name in _HTTP_LOADS}}
_BATCH_ONLY = ("batch_size", "runs")
_HTTP_ONLY = (
    *_HTTP_LOADS,
    *("slo", "prompts", "conversations", "prefix"),
    *("input_tokens", "output_tokens", "requests", "duration"),
)
"""Settings that do not apply to closed batches."""


def bench_config(settings: ParsedSettings) -> BenchConfig:
    """The configuration of a benchmark.

    Raises:
        ConfigError: invalid or contradictory settings.
    """
    options = _options(settings)
    model, tokenizer = settings["model"] or "", settings["tokenizer_name"] or ""
    return BenchConfig(
        options=options,
        settings=_request_settings(settings, options),
        address=_address(settings, options),
        model=model or tokenizer,
        tokenizer_name=tokenizer or model,
        revision=settings["revision"] or "",
        serve_arguments=_serve_arguments(settings),
        command=settings.command_line(),
        jsonl=settings["jsonl"],
    )


def _address(settings: ParsedSettings, options: BenchOptions) -> str:
    """The target's address, or an empty string to start a server."""
    url, socket = settings["url"], settings["master_shard_uds_path"]
    if url and socket:
        raise ConfigError("--url and --master-shard-uds-path are two targets", "give one of them")
    if url:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: {url!r} is not a URL", "for example http://127.0.0.1:3000")
        return str(url)
    # As text-generation-benchmark does: -t names the tokenizer, and the shard is running.
    is_batch = options.load == "batch"
    if is_batch and not socket and settings["tokenizer_name"] and not settings["model"]:
        socket = TGI_SOCKET
    if socket and not is_batch:
        raise ConfigError(
            "behind a shard's socket only closed batches can be measured",
            "use --url for other loads",
        )
    return str(socket or "")


def _options(settings: ParsedSettings) -> BenchOptions:
    load = _load(settings)
    images = ImageWorkload.parse(settings["images"]) if settings["images"] else None
    if images is not None and settings["route"] == "completions":
        raise ConfigError("--route completions takes no images", "use --route chat or tgi")
    common: dict[str, Any] = {name: settings[name] for name in ("warmups", "seed")}
    common["images"] = images
    # A shard is given text and images; servers of all vendors take images in chats.
    is_chat = settings["route"] == "chat" or (images is not None and settings["route"] == "auto")
    if load == "batch":
        _reject(settings, _HTTP_ONLY, "does not apply to closed batches", "use --url and a load")
        return BenchOptions(
            load=load,
            **common,
            values=tuple(settings["batch_size"] or ()),
            input_tokens=str(settings["sequence_length"] or 10),
            output_tokens=str(settings["decode_length"] or 8),
            requests=settings["runs"] or 10,
            chat=images is not None and is_chat and bool(settings["url"]),
        )
    _reject(settings, _BATCH_ONLY, "is for closed batches only", "leave out one of them")
    return BenchOptions(
        load=load,
        **common,
        values=_values(settings, load),
        input_tokens=_length(settings, "input_tokens", "sequence_length") or "256",
        output_tokens=_length(settings, "output_tokens", "decode_length"),
        arrival=_arrival(settings["arrival"]),
        prefix=SharedPrefix.parse(settings["prefix"]) if settings["prefix"] else None,
        turns=settings["conversations"] or "",
        think=settings["think"],
        prompts=settings["prompts"],
        trace=settings["trace"],
        speed=settings["speed"],
        requests=settings["requests"],
        seconds=settings["duration"],
        slo=_slo(settings["slo"]),
        enough=settings["slo_share"],
        chat=is_chat,
    )


def _load(settings: ParsedSettings) -> LoadKind:
    chosen = [name for name in _LOADS if settings[name]]
    if len(chosen) > 1:
        both = " and ".join(map(_flag, chosen[:2]))
        raise ConfigError(f"{both} are two loads", "give one of them")
    if chosen:
        return _LOADS[chosen[0]]
    if settings["slo"]:
        return "peak"
    http = settings["url"] or any(settings[name] for name in _HTTP_ONLY)
    return "concurrency" if http else "batch"


def _reject(settings: ParsedSettings, names: Iterable[str], reason: str, remedy: str) -> None:
    for name in names:
        if settings[name]:
            raise ConfigError(f"{_flag(name)} {reason}", remedy)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _values(settings: ParsedSettings, load: LoadKind) -> tuple[float, ...]:
    match load:
        case "concurrency" if settings["concurrency"]:
            return _numbers("--concurrency", settings["concurrency"], ",", int)
        case "rate":
            return _numbers("--rate", settings["rate"], ",", float)
        case "ramp":
            text = settings["ramp"]
            ends = _numbers("--ramp", text, ":", float)
            if len(ends) != 2:
                raise ConfigError(f"--ramp: {text!r} is not FROM:TO", "for example 1:10")
            return ends
    return ()


def _numbers(flag: str, text: str, comma: str, kind: type) -> tuple[float, ...]:
    try:
        values = tuple(kind(part) for part in text.split(comma))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not numbers separated by {comma!r}") from None
    if not all(0 < value < 1e9 for value in values):
        raise ConfigError(f"{flag}: {text!r} is out of range", "give numbers above 0")
    return values


def _length(settings: ParsedSettings, name: str, fixed: str) -> str:
    """Lengths; the flag of closed batches is another name of a fixed length."""
    if settings[name] and settings[fixed]:
        raise ConfigError(f"{_flag(name)} and {_flag(fixed)} set the same", "give one of them")
    text = str(settings[name] or settings[fixed] or "")
    if text:
        LengthDistribution.parse(text)
    return text


def _arrival(text: str) -> str:
    if ArrivalProcess.parse(text).kind == "ramp":
        raise ConfigError(f"--arrival: {text!r} is a separate load", "use --ramp FROM:TO")
    return text


def _slo(text: str | None) -> dict[str, float]:
    if not text:
        return {}
    try:
        return parse_slo(text)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}", "for example ttft:200,tpot:50") from error


def _request_settings(settings: ParsedSettings, options: BenchOptions) -> RequestSettings:
    sampling = {n: settings[n] for n in BenchSampling.__struct_fields__}
    return RequestSettings(
        route=_ROUTES[settings["route"]],  # type: ignore[arg-type]
        model=(settings["model"] or "") if settings["url"] else "",
        api_key=(checked_key(settings) or "").partition(",")[0],
        headers=dict(_header(text) for text in settings["header"] or ()),
        extra_body=_body(settings["extra_body"]),
        sampling=BenchSampling(**sampling),
        ignore_eos=settings["ignore_eos"] or options.load == "batch",
        timeout=settings["timeout"],
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f"--header: {text!r} is not NAME:VALUE")
    return name.strip(), value.strip()


def _body(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    try:
        body = decode_json(text.encode())
    except ValueError as error:
        raise ConfigError(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError("--extra-body is not a JSON object", 'for example {"min_tokens": 8}')
    return body


def _serve_arguments(settings: ParsedSettings) -> tuple[str, ...]:
    text = settings["serve_args"]
    if text and (settings["url"] or settings["master_shard_uds_path"]):
        raise ConfigError("--serve-args is for a server that this command starts", "leave it out")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--serve-args: {error}") from error
