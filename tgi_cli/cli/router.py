"""``tgi router``: the HTTP server of ``tgi serve``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.server_part import run_configured_router, run_router_from
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import ROUTER

if TYPE_CHECKING:
    from tgi_cli.router.config import RouterConfig


@takes(
    ROUTER,
    ("tgi router ./my-model", "the user's server"),
    ("tgi router ./my-model --engine-url unix:/run/tgi.sock", "another"),
)
def router(settings: ParsedSettings) -> None:
    """Serve HTTP in front of a model server.

    MODEL provides the tokenizer and the chat template. `tgi serve` starts a router and a model
    server.
    """
    if settings["config_fd"] is not None:
        run_router_from(settings["config_fd"])
        return
    setup.prepare(settings, "router")
    run_configured_router(_config(settings))


def _config(settings: ParsedSettings) -> RouterConfig:
    from tgi_cli.cli.local_model import locate_model
    from tgi_cli.config import check_input
    from tgi_cli.process import bind
    from tgi_cli.process.runtime_dir import default_uds_path
    from tgi_cli.router.config import RouterConfig
    from tgi_cli.rpc.tls import tls_files

    # A router's --tokenizer-name is another name of MODEL, not a tokenizer for a GGUF file.
    model = replace(setup.serve_config(settings), tokenizer_name=None)
    if model.max_input_tokens is not None and model.max_total_tokens is not None:
        check_input(model.max_input_tokens, model.max_total_tokens)
    checked = setup.front(settings)
    hostname = setup.listen_address(settings)
    socket_fd = bind.bind(hostname, settings["port"]).detach()
    path = settings["model_path"]
    if path is None:
        model, path = locate_model(model, weights=False)
    own = {
        "model_path": path,
        "model_id": model.model_id,
        "revision": model.revision or "",
        "engine_tls": tls_files(
            certificate=settings["engine_tls_cert"],
            key=settings["engine_tls_key"],
            authority=settings["engine_tls_ca"],
            server_name=settings["engine_tls_server_name"],
        ),
        "engine_url": settings["engine_url"] or f"unix:{default_uds_path()}",
        "replica_url": tuple(
            url.strip() for word in settings["replica_url"] or () for url in word.split(",")
        ),
        "hostname": hostname,
        "socket_fd": socket_fd,
    }
    config = RouterConfig(**settings.fields_of(RouterConfig) | checked | own)
    bind.warn_if_open(hostname, settings["port"], config.api_key, config.cors_allow_origin)
    return config
