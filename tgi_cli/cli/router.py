"""``tgi router``: the half of ``tgi serve`` that speaks HTTP."""

from __future__ import annotations

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings import ROUTER


@takes(ROUTER)
def router(given: ParsedSettings) -> None:
    """Serve HTTP in front of a model server.

    MODEL is for its tokenizer and chat template. `tgi serve` starts one of these and a
    `tgi model-server`.
    """
    from tgi_cli import logging
    from tgi_cli.config import ServeConfig
    from tgi_cli.launcher import serve
    from tgi_cli.process import bind, parent_death
    from tgi_cli.process.runtime_dir import default_uds_path
    from tgi_cli.router.config import RouterConfig
    from tgi_cli.router.server import run_router
    from tgi_cli.rpc.tls import tls_files

    setup.prepare(given, "router")
    logging.dump_on_signal()
    if given["lifeline_fd"] is not None:
        parent_death.exit_with_parent(given["lifeline_fd"])
    checked = setup.front(given)
    hostname, socket_fd = setup.listen_address(given), given["socket_fd"]
    if socket_fd is None:
        socket_fd = bind.bind(hostname, given["port"]).detach()
    model = ServeConfig(
        model_id=given["model_id"] or "",
        revision=given["revision"],
        trust_remote_code=given["trust_remote_code"],
        json_output=given["json_output"],
        load_format="dummy",  # of the model, its tokenizer is enough
    )
    model, path = serve.located(model, given["model_path"])
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
    run_router(RouterConfig(**given.fields_of(RouterConfig) | checked | own))
