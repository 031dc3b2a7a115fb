"""``tgi model-server``: the process of ``tgi serve`` that runs the model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import typer

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.server_part import run_configured_model_server, run_model_server_from
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import SERVER

if TYPE_CHECKING:
    from tgi_cli.model_server.config import ModelServerConfig
    from tgi_cli.model_server.grpc_service import ServiceFactory


@takes(
    SERVER,
    ("tgi model-server ./my-model", "on the user's socket"),
    ("tgi model-server ./my-model --uds-path /run/tgi.sock", "on another"),
)
def model_server(settings: ParsedSettings) -> None:
    """Run a model behind a unix socket, for a router.

    `tgi serve` starts a model server and a router; use this command to run them separately.
    """
    if settings["config_fd"] is not None:
        run_model_server_from(settings["config_fd"])
        return
    with contextlib.ExitStack() as stack:
        setup.prepare(settings, "model-server")
        if settings["node_rank"]:
            raise typer.Exit(_run_node(settings))
        services = _tcp_listener(settings)
        run_configured_model_server(_config(settings, stack), services)


def _run_node(settings: ParsedSettings) -> int:
    from tgi_cli.cli.local_model import locate
    from tgi_cli.launcher.node import serve_node

    return serve_node(setup.serve_config(settings), locate)


def _config(settings: ParsedSettings, stack: contextlib.ExitStack) -> ModelServerConfig:
    from tgi_cli.cli.local_model import locate, locate_adapters, locate_drafter
    from tgi_cli.config import check_settings
    from tgi_cli.model_server.config import ModelServerConfig
    from tgi_cli.process.runtime_dir import SOCKET, default_uds_path, runtime_folder
    from tgi_cli.process.unix_socket import make_folder
    from tgi_cli.telemetry.tracer import check_endpoint

    uds_path = settings["uds_path"]
    if uds_path is None and settings["shard_uds_path"] is not None:
        # Several model servers may run side by side, as with TGI.
        uds_path = stack.enter_context(runtime_folder()) / SOCKET
    uds_path = uds_path or default_uds_path()
    make_folder(uds_path)
    serve = setup.serve_config(settings)
    check_settings(serve)
    if serve.otlp_endpoint:
        check_endpoint(serve.otlp_endpoint)
    path = settings["model_path"]
    if path is None:
        serve, path = locate(serve)
    else:
        serve = locate_drafter(locate_adapters(serve))
    return ModelServerConfig(serve=serve, model_path=path, uds_path=uds_path)


def _tcp_listener(settings: ParsedSettings) -> list[ServiceFactory]:
    from tgi_cli.model_server.tcp_listener import tcp_listener

    listener = tcp_listener(
        settings["engine_listen"],
        certificate=settings["engine_tls_cert"],
        key=settings["engine_tls_key"],
        client_ca=settings["engine_tls_client_ca"],
        insecure=settings["insecure_tcp"],
    )
    if listener is None:
        return []
    listener.claim()
    return [lambda _engine: listener]
