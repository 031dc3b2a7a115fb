"""``tgi serve``: a model over HTTP."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import typer

from tgi_cli.cli import setup
from tgi_cli.cli.on_ray import check_not_on_ray, run_on_ray
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config.settings.setting import SERVE

log = logging.getLogger(__name__)


@takes(
    SERVE,
    ("tgi serve", "the bundled miniature model"),
    ("tgi serve Qwen/Qwen3-0.6B --port 8080", "a model of the hub"),
    ("tgi serve ./my-model --quantize int8", "a folder, quantized on load"),
    ("API_KEY=secret tgi serve ./my-model", "clients need this key"),
    ("tgi serve ./one ./other", "two models behind one port"),
    several=True,
)
def serve(settings: ParsedSettings) -> None:
    """Serve a model: the APIs of TGI, OpenAI and Anthropic.

    Downloads the model if necessary. Without MODEL, serves a bundled miniature model. Requests
    choose one of several MODELs by its name, and as many as fit into memory are loaded.
    --replicas N runs one model N times behind one port.
    """
    from tgi_cli.cli.local_model import locate
    from tgi_cli.launcher.serve import serve as run
    from tgi_cli.process.parent_death import exit_with_parent
    from tgi_cli.router.config import RouterConfig

    setup.prepare(settings, "launcher")
    if settings["parent_fd"] is not None:
        exit_with_parent(settings["parent_fd"])
    if settings["env"]:
        _log_machine()
    if settings["distributed"] is not None:
        raise typer.Exit(run_on_ray(settings, own_cluster=False))
    check_not_on_ray(settings)
    if settings.further_arguments or settings["models"] is not None:
        raise typer.Exit(_serve_several(settings))
    config = setup.serve_config(settings, hostname=setup.listen_address(settings))
    if config.node_rank:
        from tgi_cli.launcher.node import serve_node

        raise typer.Exit(serve_node(config, locate))
    # The launcher fills in the model, the engine's address and the socket.
    own = {
        "hostname": config.hostname,
        "model_id": config.model_id,
        "revision": config.revision or "",
        "model_path": Path(),
        "engine_url": "",
    }
    router = RouterConfig(**settings.fields_of(RouterConfig) | setup.front(settings) | own)
    raise typer.Exit(run(config, router, locate))


def _serve_several(settings: ParsedSettings) -> int:
    from tgi_cli.cli.several_models import multi_model_config
    from tgi_cli.multi_model.server import serve_models

    return serve_models(multi_model_config(settings, settings.further_arguments))


def _log_machine() -> None:
    """Log versions, processor and GPUs of this machine as one record, for ``--env``."""
    from tgi_cli.process import machine

    found = machine.describe()
    found = {
        **found.pop("packages"),
        **found,
        "gpus": "; ".join(found["gpus"]) or "none found by nvidia-smi",
        "docker label": os.environ.get("DOCKER_LABEL") or "none",
    }
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in found.items()]
    log.info("environment:\n  %s", "\n  ".join(lines))
