"""A model server or a router of ``tgi serve``, which has written its configuration.

It parses no settings: the parser would take 40 ms, and 2 MB for as long as it serves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tgi_cli.cli.log_setup import set_up_logs
from tgi_cli.cli.reporting import run_reporting

if TYPE_CHECKING:
    from tgi_cli.engine.messages import EngineInfo
    from tgi_cli.model_server.config import ModelServerConfig
    from tgi_cli.model_server.grpc_service import ServiceFactory
    from tgi_cli.router.config import RouterConfig
    from tgi_cli.tgi_grpc.model_text import ModelText

_OPTION = "--config-fd="


def run_model_server_from(config_fd: int) -> None:
    """Run the model server that is described in a descriptor (:mod:`tgi_cli.process.spawn`)."""
    from tgi_cli.model_server.config import ModelServerConfig
    from tgi_cli.process.cores import pin
    from tgi_cli.process.spawn import read_config

    config = read_config(config_fd, ModelServerConfig)
    role = "model-server" if config.replica is None else f"model-server {config.replica}"
    set_up_logs(role, config.serve.logger_level, config.serve.json_output)
    pin(config.cpus)
    run_configured_model_server(config, ())


def run_configured_model_server(
    config: ModelServerConfig, services: Sequence[ServiceFactory]
) -> None:
    """Run a model server with TGI's services and ``services``; the log is set up."""
    from tgi_cli import logging
    from tgi_cli.model_server.main import run_model_server
    from tgi_cli.process.parent_death import exit_with_parent

    logging.dump_on_signal()
    if config.parent_fd is not None:
        exit_with_parent(config.parent_fd)
    run_model_server(config, [*services, _generate_services(config)])


def run_router_from(config_fd: int) -> None:
    """Run the router that is described in a descriptor (:mod:`tgi_cli.process.spawn`)."""
    from tgi_cli.process.spawn import read_config
    from tgi_cli.router.config import RouterConfig

    config = read_config(config_fd, RouterConfig)
    set_up_logs("router", config.logger_level, config.json_output)
    run_configured_router(config)


def run_configured_router(config: RouterConfig) -> None:
    """Run a router; the log is set up."""
    from tgi_cli import logging
    from tgi_cli.process.parent_death import exit_with_parent
    from tgi_cli.router.server import run_router

    logging.dump_on_signal()
    if config.parent_fd is not None:
        exit_with_parent(config.parent_fd)
    run_router(config)


def _generate_services(config: ModelServerConfig) -> ServiceFactory:
    """TGI's own services, which read the tokenizer when they are first used."""
    from tgi_cli.tgi_grpc.mount import GenerateOptions, GenerateServices
    from tgi_cli.tgi_grpc.requests import Watermark

    serve = config.serve

    def load_text(info: EngineInfo) -> ModelText:
        from tgi_cli.tgi_grpc.model_text import load_model_text

        return load_model_text(config.model_path, serve.trust_remote_code, info)

    watermark = Watermark(serve.watermark_gamma, serve.watermark_delta)
    options = GenerateOptions(load_text, serve.shard_uds_path, watermark, serve.asks_for_drafts)
    options.claim()
    return partial(GenerateServices, options=options)


_PARTS: dict[str, Callable[[int], None]] = {
    "model-server": run_model_server_from,
    "router": run_router_from,
}


def is_server_part(arguments: Sequence[str]) -> bool:
    """Whether a command line is one that :mod:`tgi_cli.launcher.start` writes."""
    return bool(arguments) and arguments[0] in _PARTS and _descriptor(arguments) is not None


def main() -> None:
    """Run the part that the command line names: ``PART MODEL --config-fd=N [--json-output]``."""
    arguments = sys.argv[1:]
    config_fd = _descriptor(arguments)
    assert config_fd is not None
    sys.exit(run_reporting(partial(_PARTS[arguments[0]], config_fd), arguments))


def _descriptor(arguments: Sequence[str]) -> int | None:
    for word in arguments[1:]:
        number = word.removeprefix(_OPTION)
        if number != word and number.isdecimal():
            return int(number)
    return None
