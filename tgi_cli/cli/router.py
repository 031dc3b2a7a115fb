"""``tgi router``: the half of ``tgi serve`` that speaks HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings import ROUTER

if TYPE_CHECKING:
    from tgi_cli.router.config import RouterConfig


@takes(ROUTER)
def router(given: ParsedSettings) -> None:
    """Serve HTTP in front of a model server.

    MODEL is for its tokenizer and chat template. `tgi serve` starts one of these and a
    `tgi model-server`.
    """
    from tgi_cli import logging
    from tgi_cli.process.parent_death import exit_with_parent
    from tgi_cli.process.spawn import read_config
    from tgi_cli.router.config import RouterConfig
    from tgi_cli.router.server import run_router

    if given["config_fd"] is not None:
        config = read_config(given["config_fd"], RouterConfig)
        setup.set_up_logs("router", config.logger_level, config.json_output)
    else:
        setup.prepare(given, "router")
        config = _config(given)
    logging.dump_on_signal()
    if config.parent_fd is not None:
        exit_with_parent(config.parent_fd)
    run_router(config)


def _config(given: ParsedSettings) -> RouterConfig:
    from tgi_cli.cli.local_model import locate_model
    from tgi_cli.config import ServeConfig
    from tgi_cli.process import bind
    from tgi_cli.process.runtime_dir import default_uds_path
    from tgi_cli.router.config import RouterConfig
    from tgi_cli.rpc.tls import tls_files

    checked = setup.front(given)
    hostname = setup.listen_address(given)
    socket_fd = bind.bind(hostname, given["port"]).detach()
    model = ServeConfig(**given.fields_of(ServeConfig) | {"model_id": given["model_id"] or ""})
    path = given["model_path"]
    if path is None:
        model, path = locate_model(model, weights=False)
    own = {
        "model_path": path,
        "model_id": model.model_id,
        "revision": model.revision or "",
        "engine_tls": tls_files(
            certificate=given["engine_tls_cert"],
            key=given["engine_tls_key"],
            authority=given["engine_tls_ca"],
            server_name=given["engine_tls_server_name"],
        ),
        "engine_url": given["engine_url"] or f"unix:{default_uds_path()}",
        "hostname": hostname,
        "socket_fd": socket_fd,
    }
    return RouterConfig(**given.fields_of(RouterConfig) | checked | own)
