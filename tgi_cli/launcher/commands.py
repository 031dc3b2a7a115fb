"""The two processes of a server: their command lines and their environment."""

from __future__ import annotations

import os
import site
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import tgi_cli
from tgi_cli.config import ServeConfig
from tgi_cli.config.settings import ROUTER, SERVER, SETTINGS, settings_of
from tgi_cli.hub import LocalModel

_APART = frozenset({"model_id", "revision", "hostname", "port"})
"""Settings that the two are told in other words."""
_NEGATIVE = {
    s.name: "--no-" + s.flag[2:] for s in SETTINGS if s.negative and s.default is not False
}
"""Switches that are not off unless they are given, and how they are switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What the router alone is told; names and defaults are TGI's."""

    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    validation_workers: int = 2
    payload_limit: int = 2_000_000
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    generation_config: str = "auto"
    tokenizer_config_path: Path | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    api_key: str | None = field(default=None, repr=False)
    cors_allow_origin: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    otlp_endpoint: str | None = None
    otlp_service_name: str = "text-generation-inference.router"
    vllm_metrics: bool = False


def _shared(command: str) -> tuple[str, ...]:
    """Fields of ServeConfig that a command takes and does something with."""
    taken = {setting.name for setting in settings_of(command) if not setting.has_no_effect(command)}
    return tuple(f.name for f in fields(ServeConfig) if f.name in taken - _APART)


_ENGINE_FLAGS = _shared(SERVER)
_ROUTER_FLAGS = tuple(
    name for name in _shared(ROUTER) if name not in {f.name for f in fields(RouterOptions)}
)


def model_server_command(
    config: ServeConfig, model: LocalModel, uds_path: Path, lifeline: int
) -> list[str]:
    """The arguments of ``tgi model-server`` that say what ``config`` says."""
    return [
        "model-server",
        model.model_id,
        *_flags({"revision": model.revision or None, "model_path": model.path}),
        *_flags({name: getattr(config, name) for name in _ENGINE_FLAGS}),
        *_flags({"uds_path": uds_path, "lifeline_fd": lifeline}),
    ]


def router_command(
    config: ServeConfig,
    options: RouterOptions,
    model: LocalModel,
    engine_url: str,
    listener: int,
    lifeline: int,
) -> list[str]:
    """The arguments of ``tgi router`` that say what ``config`` and ``options`` say.

    All but the API key: others could read it in the list of processes.
    """
    return [
        "router",
        model.model_id,
        *_flags({"revision": model.revision or None, "model_path": model.path}),
        *_flags({name: getattr(config, name) for name in _ROUTER_FLAGS}),
        *_flags({f.name: getattr(options, f.name) for f in fields(options) if f.name != "api_key"}),
        *_flags({"engine_url": engine_url, "socket_fd": listener, "lifeline_fd": lifeline}),
    ]


def _flags(values: Mapping[str, object]) -> Iterable[str]:
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            if value:
                yield flag
            elif name in _NEGATIVE:
                yield _NEGATIVE[name]
        elif isinstance(value, tuple):
            if value:
                yield f"{flag}={','.join(map(str, value))}"
        elif value is not None:
            yield f"{flag}={value}"


def environment() -> dict[str, str]:
    """For the two: ours, less what the command lines say, plus where this package is."""
    said = [setting for setting in SETTINGS if not setting.inherited]
    names = {name for setting in said for name in setting.all_variables}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    root = str(Path(tgi_cli.__file__).resolve().parents[1])
    if root not in [*site.getsitepackages(), site.getusersitepackages()]:
        paths = [root, kept.get("PYTHONPATH", "")]
        kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return kept
