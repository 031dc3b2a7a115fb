"""``tgi model-server``: the half of ``tgi serve`` that runs the model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings import SERVER

if TYPE_CHECKING:
    from tgi_cli.engine.messages import EngineInfo
    from tgi_cli.tgi_grpc.model_text import ModelText
    from tgi_cli.tgi_grpc.mount import GenerateOptions


@takes(SERVER)
def model_server(given: ParsedSettings) -> None:
    """Run a model behind a unix socket, for a router to connect to.

    `tgi serve` starts one of these and a `tgi router`; alone it is for two machines, and for
    trying things out.
    """
    from tgi_cli import logging
    from tgi_cli.config import ServeConfig
    from tgi_cli.launcher import serve
    from tgi_cli.model_server.main import run_model_server
    from tgi_cli.model_server.tcp_listener import tcp_listen
    from tgi_cli.process import parent_death
    from tgi_cli.process.heartbeat import SharedHeartbeat
    from tgi_cli.process.runtime_dir import SOCKET, default_uds_path, runtime_folder
    from tgi_cli.process.unix_socket import make_folder

    setup.prepare(given, "model-server")
    logging.dump_on_signal()
    pulse = None if given["pulse_fd"] is None else SharedHeartbeat.of(given["pulse_fd"])
    with contextlib.ExitStack() as stack:
        uds_path = given["uds_path"]
        if uds_path is None and given["shard_uds_path"] is not None:
            # Several of them may run beside each other, as TGI's do.
            uds_path = stack.enter_context(runtime_folder()) / SOCKET
        uds_path = uds_path or default_uds_path()
        if given["lifeline_fd"] is None:
            make_folder(uds_path)
        else:
            parent_death.exit_with_parent(given["lifeline_fd"])
        listen = tcp_listen(
            given["engine_listen"],
            certificate=given["engine_tls_cert"],
            key=given["engine_tls_key"],
            client_ca=given["engine_tls_client_ca"],
            insecure=given["insecure_tcp"],
        )
        own = {"model_id": given["model_id"] or ""}
        config = ServeConfig(**given.fields_of(ServeConfig) | own)
        config, path = serve.located(config, given["model_path"])
        config = serve.with_adapters(config)
        generate = _generate(given, path)
        run_model_server(config, path, uds_path, generate, listen=listen, pulse=pulse)


def _generate(given: ParsedSettings, path: Path) -> GenerateOptions:
    """Options of TGI's own services, which load the tokenizer on first use."""
    from tgi_cli.tgi_grpc.mount import GenerateOptions
    from tgi_cli.tgi_grpc.requests import Watermark

    def load_text(info: EngineInfo) -> ModelText:
        from tgi_cli.tgi_grpc.model_text import load_model_text

        return load_model_text(path, given["trust_remote_code"], info)

    watermark = Watermark(given["watermark_gamma"], given["watermark_delta"])
    return GenerateOptions(load_text, given["shard_uds_path"], watermark)
