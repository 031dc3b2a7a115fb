"""``tgi deploy ray`` and ``tgi serve --distributed ray``: replicas of a model on Ray."""

from __future__ import annotations

from pathlib import Path

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.config.settings.deploy import DEPLOY_SETTINGS, KUBERNETES_SETTINGS
from tgi_cli.config.settings.ray import RAY_SETTINGS
from tgi_cli.errors import ConfigError

_OF_CLUSTER = frozenset(["target", "cpus", "gpus"])
"""Settings of `tgi deploy` that apply to a cluster on this machine."""


def run_on_ray(settings: ParsedSettings, *, own_cluster: bool) -> int:
    """Deploy the model that the settings name and serve it until a signal.

    Args:
        settings: Settings of `tgi serve` or of `tgi deploy`.
        own_cluster: Start a cluster on this machine instead of joining one.

    Returns:
        The exit code.
    """
    from tgi_cli.cli.local_model import locate
    from tgi_cli.ray_serve.config import RayConfig
    from tgi_cli.ray_serve.run import run
    from tgi_cli.router.config import RouterConfig

    if settings.further_arguments or settings["models"] is not None:
        raise ConfigError(
            "a deployment on Ray serves one model",
            "deploy the others under names and ports of their own",
        )
    cluster: dict[str, object] = {"own_cluster": own_cluster}
    if own_cluster:
        cluster |= {"cluster_cpus": settings["cpus"], "cluster_gpus": settings["gpus"] or None}
        _refuse_others(settings)
    config = RayConfig(**settings.fields_of(RayConfig) | cluster)
    hostname = setup.listen_address(settings)
    model = setup.serve_config(settings, hostname=hostname)
    # Replicas fill in the model and the engine's address.
    own = {
        "hostname": hostname,
        "model_id": model.model_id,
        "revision": model.revision or "",
        "model_path": Path(),
        "engine_url": "",
        "socket_fd": None,
        "parent_fd": None,
        "control_fd": None,
    }
    router = RouterConfig(**settings.fields_of(RouterConfig) | setup.front(settings) | own)
    return run(config, model, router, locate)


def check_not_on_ray(settings: ParsedSettings) -> None:
    """Refuse settings of deployments on Ray for a server without it. Raises ConfigError."""
    for setting in RAY_SETTINGS:
        name = setting.name
        if settings.origins[name].kind in ("flag", "file"):
            raise ConfigError(
                f"{settings.source_of(name)} is for deployments on Ray",
                "add --distributed ray, or leave it off",
            )


def _refuse_others(settings: ParsedSettings) -> None:
    """Refuse settings of `tgi deploy` that are for files. Raises ConfigError."""
    for setting in (*DEPLOY_SETTINGS, *KUBERNETES_SETTINGS):
        if setting.name not in _OF_CLUSTER and settings.is_set(setting.name):
            raise ConfigError(
                f"{settings.source_of(setting.name)} is for files, and `tgi deploy ray` writes "
                "none",
                "leave it off",
            )
