"""The two processes of a server: their command lines, their start, and what their end means."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import tgi_cli
from tgi_cli.config import ServeConfig
from tgi_cli.errors import ExitCode, RouterError, ShardError, TgiError
from tgi_cli.hub import LocalModel

_ENGINE_FLAGS = (
    "dtype",
    "trust_remote_code",
    "max_concurrent_requests",
    "max_input_tokens",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_batch_size",
    "max_queued_requests",
    "max_queued_tokens",
    "batching",
    "capacity_policy",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "prefix_caching",
    "disable_grammar_support",
    "kv_cache_dtype",
    "attention",
    "cuda_graphs",
    "quantize",
    "load_format",
    "cross_check",
    "sharded",
    "num_shard",
    "lora_adapters",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "graceful_termination_timeout",
    "json_output",
    "logger_level",
)
_ROUTER_FLAGS = (
    "trust_remote_code",
    "max_concurrent_requests",
    "graceful_termination_timeout",
    "json_output",
    "logger_level",
)
_NEGATIVE = {"prefix_caching": "--no-prefix-caching", "sharded": "--no-sharded"}
"""Flags that can be switched off, and how; all others are off unless they are given."""
_OTHER_VARIABLES = ("MODEL_ID", "REVISION", "LOG_LEVEL", "MAX_INPUT_LENGTH", "HOSTNAME", "PORT")

# -P: files in the working directory do not pass for modules.
_TGI = [sys.executable, "-P", "-m", "tgi_cli"]


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


def _environment() -> dict[str, str]:
    """Ours, less what the command lines say, plus where this package is."""
    said = {*_ENGINE_FLAGS, *_ROUTER_FLAGS, *(f.name for f in fields(RouterOptions))}
    names = {name.upper() for name in said} | set(_OTHER_VARIABLES)
    environment = {name: value for name, value in os.environ.items() if name not in names}
    root = str(Path(tgi_cli.__file__).resolve().parents[1])
    if root not in [*site.getsitepackages(), site.getusersitepackages()]:
        paths = [root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


class Child:
    """A running part of the server, named in the words of its users."""

    def __init__(
        self,
        name: str,
        failure: type[TgiError],
        command: list[str],
        pass_fds: Iterable[int] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._failure = failure
        # A session of its own: Ctrl-C on the terminal is the launcher's to handle.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(pass_fds),
            env=_environment() | dict(variables or {}),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Block until it has ended."""
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it runs."""
        self._process.send_signal(number)

    def failed(self) -> int:
        """The exit code that its unasked-for end gives the launcher.

        Raises:
            ShardError, RouterError: it ended without a word; one that exits with an error's code
                has said why itself.
        """
        status = self._process.wait()
        if status < 0:
            raise self._failure(
                f"the {self.name} was killed by {_signal_name(-status)}",
                _WHY.get(-status, "see its log above"),
            )
        if status == ExitCode.OK:
            raise self._failure(f"the {self.name} ended unexpectedly", "see its log above")
        if status in (ExitCode.FAILURE, ExitCode.INTERRUPTED) or status not in set(ExitCode):
            return int(self._failure.exit_code)
        return status


_WHY: dict[int, str] = {
    signal.SIGKILL: "if nobody did that, the system was out of memory: see its log, and try a "
    "smaller model or cache (--max-batch-total-tokens)",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start_model_server(arguments: list[str], lifeline: int) -> Child:
    """Start ``tgi model-server``."""
    return Child("model server", ShardError, [*_TGI, *arguments], [lifeline])


def start_router(
    arguments: list[str], lifeline: int, listener: int, api_key: str | None = None
) -> Child:
    """Start ``tgi router``."""
    variables = {} if api_key is None else {"API_KEY": api_key}
    return Child("router", RouterError, [*_TGI, *arguments], [lifeline, listener], variables)
