"""``tgi serve``: the port, the model, the processes, the ready line."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from tgi_cli.config import ServeConfig
from tgi_cli.hub import LocalModel
from tgi_cli.launcher import children, listener
from tgi_cli.launcher.children import Child, RouterOptions
from tgi_cli.launcher.runtime import SOCKET, runtime_folder
from tgi_cli.launcher.supervisor import Supervisor

log = logging.getLogger(__name__)

_EXAMPLE_PROMPT = "def read_json(path):"


def serve(config: ServeConfig, options: RouterOptions) -> int:
    """Serve ``config.model_id`` until a signal; an empty id means the bundled model.

    Returns:
        The exit code: 0 after SIGTERM or Ctrl-C, or that of a child which said itself why it
        ended.

    Raises:
        TgiError: the port is taken, the model cannot be had, a child died without a word.
    """
    with listener.bind(config.hostname, config.port) as sock:
        with _terminable():
            model = _resolve(config)
            config = replace(config, model_id=model.model_id, revision=model.revision or None)
            config = with_adapters(config)
        host, port = listener.local_address(sock)
        tls = options.ssl_certfile is not None
        supervisor = Supervisor(config.graceful_termination_timeout)
        with (
            runtime_folder() as folder,
            _pipe() as lifeline,
            supervisor.handling_signals(),
        ):
            uds_path = folder / SOCKET
            server = children.model_server_command(config, model, uds_path, lifeline)
            router = children.router_command(
                config, options, model, f"unix:{uds_path}", sock.fileno(), lifeline
            )

            def start_router() -> Child:
                child = children.start_router(router, lifeline, sock.fileno(), options.api_key)
                sock.close()  # the router's alone from here on: it goes when the router goes
                return child

            log.info("loading %s", model.model_id)
            return supervisor.run(
                partial(children.start_model_server, server, lifeline),
                start_router,
                (host, port),
                partial(_announce, config, options, uds_path, listener.url(host, port, tls)),
                tls,
            )


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
        progress=hub.pick_progress(json_output=config.json_output),
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

    progress = hub.pick_progress(json_output=config.json_output)
    adapters = hub.resolve_adapters(config.lora_adapters, config.model_id, progress)
    return replace(config, lora_adapters=tuple(map(str, adapters)))


def _announce(config: ServeConfig, options: RouterOptions, uds_path: Path, url: str) -> None:
    """The ready line; for people also a line to try."""
    from tgi_cli.rpc.client import fetch_info

    info = fetch_info(f"unix:{uds_path}", timeout=10.0)
    log.info(
        "ready: %s on %s (%s, %s; up to %d tokens a request, %d in the KV cache)",
        info.model_id,
        url,
        info.device,
        info.dtype,
        info.max_total_tokens,
        info.max_batch_total_tokens,
    )
    if not config.json_output:
        body = {"inputs": _EXAMPLE_PROMPT, "parameters": {"max_new_tokens": 40}}
        key = "" if options.api_key is None else '-H "Authorization: Bearer ${API_KEY%%,*}" '
        print(
            f"\n  curl {url}/generate {key}-H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))}\n",
            file=sys.stderr,
            flush=True,
        )


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
