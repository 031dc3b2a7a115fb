"""From the flags of ``tgi bench`` to what is to be measured; only what goes together passes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from tgi_cli.bench.plan import BenchOptions, LoadKind, SharedPrefix
from tgi_cli.bench.run import BenchConfig
from tgi_cli.bench.settings import BenchSampling, RequestSettings
from tgi_cli.bench.statistics import parse_slo
from tgi_cli.bench.workloads.distributions import ArrivalProcess, LengthDistribution
from tgi_cli.errors import ConfigError
from tgi_cli.files import decode_json

TGI_SOCKET = "/tmp/text-generation-server-0"
SECRET = "***"
_SECRET_FLAGS = ("--api-key", "--header", "-H")
_ROUTES = {"auto": "auto", "tgi": "generate_stream", "completions": "completions", "chat": "chat"}
_LOADS = {
    "batch_size": "--batch-size",
    "concurrency": "--concurrency",
    "rate": "--rate",
    "ramp": "--ramp",
    "sweep": "--sweep",
    "trace": "--trace",
}
_BATCH_ONLY = {"batch_size": "--batch-size", "runs": "--runs"}
_HTTP_ONLY = {
    **{name: flag for name, flag in _LOADS.items() if name != "batch_size"},
    "slo": "--slo",
    "prompts": "--prompts",
    "conversations": "--conversations",
    "prefix": "--prefix",
    "input_tokens": "--input-tokens",
    "output_tokens": "--output-tokens",
    "requests": "--requests",
    "duration": "--duration",
}
"""Without meaning for closed batches."""


def measurement(given: Mapping[str, Any], command: list[str]) -> BenchConfig:
    """What the flags ask for.

    Args:
        given: values by the names of ``bench``'s parameters.
        command: the command line, without secrets.

    Raises:
        ConfigError: values that cannot be, or do not go together.
    """
    options = _options(given)
    return BenchConfig(
        options=options,
        settings=_settings(given, options),
        address=_address(given, options),
        model=(given["model"] or given["tokenizer_name"] or ""),
        tokenizer_name=given["tokenizer_name"] or (given["model"] or ""),
        revision=given["revision"] or "",
        serve_arguments=_serve_arguments(given),
        command=command,
        jsonl=given["jsonl"],
    )


def _address(given: Mapping[str, Any], options: BenchOptions) -> str:
    """Where the target is; empty if it is to be started."""
    url, socket = given["url"], given["master_shard_uds_path"]
    if url and socket:
        raise ConfigError("--url and --master-shard-uds-path are two targets", "give one of them")
    if url:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url: {url!r} is no URL", "for example http://127.0.0.1:3000")
        return str(url)
    # text-generation-benchmark's own way: -t says whose tokenizer, and the shard runs already.
    if not socket and given["tokenizer_name"] and not given["model"] and options.load == "batch":
        socket = TGI_SOCKET
    if socket and options.load != "batch":
        raise ConfigError(
            "behind a shard's socket there are batches only, no requests in flight",
            "give --url for that, or leave out the load",
        )
    return str(socket or "")


def _options(given: Mapping[str, Any]) -> BenchOptions:
    load = _load(given)
    common: dict[str, Any] = {"load": load, "warmups": given["warmups"], "seed": given["seed"]}
    if load == "batch":
        _refuse(given, _HTTP_ONLY, "has no meaning for closed batches", "give --url and a load")
        return BenchOptions(
            **common,
            values=tuple(given["batch_size"] or ()),
            input_tokens=str(given["sequence_length"] or 10),
            output_tokens=str(given["decode_length"] or 8),
            requests=given["runs"] or 10,
        )
    _refuse(given, _BATCH_ONLY, "is for closed batches only", "leave it out, or the load")
    return BenchOptions(
        **common,
        values=_values(given, load),
        input_tokens=_length(given, "input_tokens", "sequence_length") or "256",
        output_tokens=_length(given, "output_tokens", "decode_length"),
        arrival=_arrival(given["arrival"]),
        prefix=SharedPrefix.parse(given["prefix"]) if given["prefix"] else None,
        turns=given["conversations"] or "",
        think=given["think"],
        prompts=given["prompts"],
        trace=given["trace"],
        speed=given["speed"],
        requests=given["requests"],
        seconds=given["duration"],
        slo=_slo(given["slo"]),
        enough=given["slo_share"],
        chat=given["route"] == "chat",
    )


def _load(given: Mapping[str, Any]) -> LoadKind:
    chosen = [name for name in _LOADS if given[name]]
    if len(chosen) > 1:
        both = " and ".join(_LOADS[name] for name in chosen[:2])
        raise ConfigError(f"{both} are two loads", "give one of them")
    if chosen:
        loads: dict[str, LoadKind] = {
            "batch_size": "batch",
            "concurrency": "concurrency",
            "rate": "rate",
            "ramp": "ramp",
            "sweep": "sweep",
            "trace": "trace",
        }
        return loads[chosen[0]]
    if given["slo"]:
        return "peak"
    http = given["url"] or any(given[name] for name in _HTTP_ONLY)
    return "concurrency" if http else "batch"


def _refuse(given: Mapping[str, Any], names: Mapping[str, str], why: str, remedy: str) -> None:
    for name, flag in names.items():
        if given[name]:
            raise ConfigError(f"{flag} {why}", remedy)


def _values(given: Mapping[str, Any], load: LoadKind) -> tuple[float, ...]:
    match load:
        case "concurrency" if given["concurrency"]:
            return _numbers("--concurrency", given["concurrency"], ",", int)
        case "rate":
            return _numbers("--rate", given["rate"], ",", float)
        case "ramp":
            ends = _numbers("--ramp", given["ramp"], ":", float)
            if len(ends) != 2:
                raise ConfigError(f"--ramp: {given['ramp']!r} is not FROM:TO", "for example 1:10")
            return ends
    return ()


def _numbers(flag: str, text: str, comma: str, kind: type) -> tuple[float, ...]:
    try:
        values = tuple(kind(part) for part in text.split(comma))
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not numbers with {comma!r} between them") from None
    if not all(0 < value < 1e9 for value in values):
        raise ConfigError(f"{flag}: {text!r} has a load that cannot be", "give numbers above 0")
    return values


def _length(given: Mapping[str, Any], name: str, fixed: str) -> str:
    """A form of lengths; the flag of closed batches is the same as a fixed length."""
    if given[name] and given[fixed]:
        flags = f"--{name} and --{fixed}".replace("_", "-")
        raise ConfigError(f"{flags} say the same", "give one of them")
    text = str(given[name] or given[fixed] or "")
    if text:
        LengthDistribution.parse(text)
    return text


def _arrival(text: str) -> str:
    if ArrivalProcess.parse(text).kind == "ramp":
        raise ConfigError(f"--arrival: {text!r} is a load of its own", "give --ramp FROM:TO")
    return text


def _slo(text: str | None) -> dict[str, float]:
    if not text:
        return {}
    try:
        return parse_slo(text)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}", "for example ttft:200,tpot:50") from error


def _settings(given: Mapping[str, Any], options: BenchOptions) -> RequestSettings:
    names = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty")
    more = ("frequency_penalty", "top_n_tokens", "watermark", "do_sample")
    return RequestSettings(
        route=_ROUTES[given["route"]],  # type: ignore[arg-type]
        model=(given["model"] or "") if given["url"] else "",
        api_key=given["api_key"] or "",
        headers=dict(_header(text) for text in given["header"] or ()),
        extra_body=_body(given["extra_body"]),
        sampling=BenchSampling(**{name: given[name] for name in (*names, *more)}),
        ignore_eos=given["ignore_eos"] or options.load == "batch",
        timeout=given["timeout"],
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
        raise ConfigError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError("--extra-body is no JSON object", 'for example {"min_tokens": 8}')
    return body


def _serve_arguments(given: Mapping[str, Any]) -> tuple[str, ...]:
    text = given["serve_args"]
    if text and (given["url"] or given["master_shard_uds_path"]):
        raise ConfigError("--serve-args is for a server that is started here", "leave it out")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--serve-args: {error}") from error


def without_secrets(words: list[str]) -> list[str]:
    """A command line that may be kept and shown."""
    kept: list[str] = []
    for word in words:
        flag, equals, _ = word.partition("=")
        if kept and kept[-1] in _SECRET_FLAGS:
            word = SECRET
        elif equals and flag in _SECRET_FLAGS:
            word = f"{flag}={SECRET}"
        elif word.startswith("-H") and len(word) > 2:
            word = f"-H{SECRET}"
        kept.append(word)
    return ["tgi", *kept[1:]]
