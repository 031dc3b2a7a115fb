"""``tgi serve``: the port, the model, the processes, the ready line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from tgi_cli.config import ServeConfig
from tgi_cli.engine.messages import EngineInfo
from tgi_cli.errors import RouterError, ShardError
from tgi_cli.hub import LocalModel
from tgi_cli.launcher import commands
from tgi_cli.launcher.backoff import Restarts
from tgi_cli.launcher.banner import announce
from tgi_cli.launcher.child_process import TGI, Child, adopt_orphans
from tgi_cli.launcher.commands import RouterOptions
from tgi_cli.launcher.health_probe import Probe
from tgi_cli.launcher.run_in_fork import run_in_fork
from tgi_cli.launcher.supervisor import Parts, Supervisor
from tgi_cli.process import bind
from tgi_cli.process.heartbeat import SharedHeartbeat
from tgi_cli.process.runtime_dir import SOCKET, VARIABLE, runtime_folder
from tgi_cli.process.unix_socket import remove_stale

log = logging.getLogger(__name__)


def serve(config: ServeConfig, options: RouterOptions) -> int:
    """Serve ``config.model_id`` until a signal; an empty id means the bundled model.

    Returns:
        The exit code: 0 after SIGTERM or Ctrl-C, or that of a child which said itself why it
        ended.

    Raises:
        TgiError: the port is taken, the model cannot be had, a child died without a word, or the
            model server died too often.
    """
    began = time.monotonic()
    with bind.bind(config.hostname, config.port) as sock:
        with _terminable():
            model, config = run_in_fork(partial(_found, config))
        host, port = bind.local_address(sock)
        tls = options.ssl_certfile is not None
        supervisor = Supervisor(
            config.graceful_termination_timeout,
            Restarts(config.max_restarts),
            config.watchdog_timeout,
        )
        adopt_orphans()
        with (
            _no_stale_socket(config.shard_uds_path),
            runtime_folder() as folder,
            _pipe() as lifeline,
            supervisor.handling_signals(),
        ):
            uds_path = folder / SOCKET
            variables = {VARIABLE: str(folder)}
            server = commands.model_server_command(config, model, uds_path, lifeline)
            router = commands.router_command(
                config, options, model, f"unix:{uds_path}", sock.fileno(), lifeline
            )
            roles = ("model-server", "router") if config.json_output else (None, None)

            pulse: SharedHeartbeat

            def start_server() -> tuple[Child, SharedHeartbeat]:
                nonlocal pulse
                pulse = SharedHeartbeat.make()
                command = [*TGI, *server, f"--pulse-fd={pulse.fd}"]
                fds = (lifeline, pulse.fd)
                child = Child("model server", ShardError, command, fds, variables, roles[0])
                pulse.hand_over()
                return child, pulse

            def start_router() -> Child:
                key = {} if options.api_key is None else {"API_KEY": options.api_key}
                fds = (lifeline, sock.fileno())
                command = [*TGI, *router]
                child = Child("router", RouterError, command, fds, variables | key, roles[1])
                sock.close()  # the router's alone from here on: it goes when the router goes
                return child

            def on_ready() -> None:
                served = pulse.published()
                assert served is not None, "published before the state is SERVING"
                info = EngineInfo.from_dict(served)
                url = bind.url(host, port, tls)
                seconds = time.monotonic() - began
                announce(config, info, url, seconds, key=options.api_key is not None)

            log.info("loading %s", model.model_id)
            parts = Parts(
                start_server=start_server,
                start_router=start_router,
                probe=Probe(host, port, tls),
                on_ready=on_ready,
            )
            return supervisor.run(parts)


def _found(config: ServeConfig) -> tuple[LocalModel, ServeConfig]:
    """The model, and ``config`` with its names and with each adapter's folder."""
    model = _resolve(config)
    config = replace(config, model_id=model.model_id, revision=model.revision or None)
    return model, with_adapters(config)


def _resolve(config: ServeConfig) -> LocalModel:
    """The model's folder; downloads it if it has to."""
    from tgi_cli import demo, hub

    if not config.model_id:
        log.info("no model named: serving the bundled miniature model, %s", demo.MODEL_ID)
        return LocalModel(demo.model_path(), demo.MODEL_ID, "")
    return hub.resolve_model(
        config.model_id,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        weights=config.load_format != "dummy",
        progress=hub.download_progress(json_output=config.json_output),
    )


def located(config: ServeConfig, model_path: Path | None) -> tuple[ServeConfig, Path]:
    """``config`` with the model's names, and its folder: ``model_path`` if that is given.

    Raises:
        HubError, ModelError: it cannot be had.
    """
    if model_path is not None:
        return config, model_path
    model = _resolve(config)
    config = replace(config, model_id=model.model_id, revision=model.revision or None)
    return config, model.path


def with_adapters(config: ServeConfig) -> ServeConfig:
    """``config`` with each adapter as ``name=path``; downloads those that have to be.

    Raises:
        ConfigError: a form or a name that cannot be.
        HubError, ModelError: one cannot be had, or is no adapter.
    """
    if not config.lora_adapters:
        return config
    from tgi_cli import hub

    progress = hub.download_progress(json_output=config.json_output)
    adapters = hub.resolve_adapters(config.lora_adapters, config.model_id, progress)
    return replace(config, lora_adapters=tuple(map(str, adapters)))


@contextmanager
def _pipe() -> Iterator[int]:
    """The lifeline's reading end; the writing end is ours alone, and closes with this process."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM while a model is downloaded ends the process in order, with status 0."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _no_stale_socket(prefix: Path | None) -> Iterator[None]:
    """Afterwards, remove the socket of TGI's naming that a killed model server leaves behind."""
    try:
        yield
    finally:
        if prefix is not None:
            remove_stale(prefix.with_name(f"{prefix.name}-0"))
