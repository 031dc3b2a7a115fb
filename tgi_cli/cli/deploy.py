"""``tgi deploy``: the file that runs a server under Docker, Compose, systemd or Kubernetes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tgi_cli.cli import setup
from tgi_cli.cli.log_setup import set_up_logs
from tgi_cli.cli.on_ray import run_on_ray
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.cli.settings_flags import takes
from tgi_cli.config import ServeConfig
from tgi_cli.config.settings.deploy import KUBERNETES_SETTINGS
from tgi_cli.config.settings.ray import RAY_SETTINGS
from tgi_cli.config.settings.setting import DEPLOY, SERVE, Setting
from tgi_cli.deploy import compose, docker, kubernetes, systemd
from tgi_cli.deploy.deployment import Deployment, existing_paths, with_link_targets
from tgi_cli.deploy.kubernetes.options import KubernetesOptions
from tgi_cli.deploy.monitoring.alerts import render_alerts
from tgi_cli.deploy.monitoring.dashboard import dashboard_json
from tgi_cli.errors import ConfigError, HubError
from tgi_cli.process.units import format_memory
from tgi_cli.version import __version__

if TYPE_CHECKING:
    from tgi_cli.deploy.memory import MemoryPlan

STORAGE_BYTES = 100 << 30
"""Default size of the volume for models."""

_WRITTEN = frozenset(
    [
        *("model", "model_id", "port", "hostname", "json_output", "config", "api_key_file"),
        *("graceful_termination_timeout", "huggingface_hub_cache", "distributed", "ray_address"),
    ]
)
"""Settings of `tgi serve` that the file expresses in another way."""
_MONITORING = {"grafana": dashboard_json, "prometheus": render_alerts}
"""Targets that do not depend on the server."""
_OF_ANY_TARGET = frozenset(["target", "output", "force", "logger_level", "config"])
_MAY_BE_PATHS = frozenset(["lora_adapters", "speculative_model", "chat_template"])
"""Settings whose values may be files or folders."""


@takes(
    DEPLOY,
    ("tgi deploy compose ./my-model -o compose.yaml", "a service of Compose"),
    ("tgi deploy k8s org/model --memory 16GiB", "objects of Kubernetes"),
)
def deploy(settings: ParsedSettings) -> None:
    """Print files for Docker or Kubernetes, or deploy on Ray.

    Takes the settings of `tgi serve`, which the server is to have. For a file, a model on this
    machine that `tgi warmup` has not measured is loaded once.
    """
    if settings["target"] == "ray":
        setup.prepare(settings, "ray")
        raise typer.Exit(run_on_ray(settings, own_cluster=True))
    set_up_logs("deploy", settings["logger_level"], json_output=False)
    _refuse_flags_without_effect(settings)
    if monitoring := _MONITORING.get(settings["target"]):
        _write(settings, monitoring())
        return
    if settings.origins["api_key"].kind in ("flag", "file"):
        raise ConfigError(
            f"{settings.source_of('api_key')}: keys are not written into files for everybody",
            "put them into a file, one per line, and name it by --api-key-file",
        )
    if not settings["port"]:
        raise ConfigError("--port 0 leaves the port open, which has to be published", "name one")
    _write(settings, _render(settings, _deployment(settings)))


def _refuse_flags_without_effect(settings: ParsedSettings) -> None:
    """Raises ConfigError for a flag that this target does not take."""
    target = settings["target"]
    others: set[str] = set()
    if target in _MONITORING:
        others = {setting.name for setting in settings.settings} - _OF_ANY_TARGET
    elif target != "k8s":
        others = {setting.name for setting in KUBERNETES_SETTINGS}
    for name in others:
        if settings.origins[name].kind == "flag":
            raise ConfigError(f"{settings.source_of(name)} has no effect on `tgi deploy {target}`")
    if settings["nnodes"] > 1:
        raise ConfigError(
            f"{settings.source_of('nnodes')} is not for files of `tgi deploy {target}`",
            "`tgi deploy k8s --nodes N` places pipeline stages on several nodes",
        )
    on_ray = target == "k8s" and settings["nodes"] > 1
    for setting in RAY_SETTINGS:
        own_cluster = setting.name in ("distributed", "ray_address")
        if settings.origins[setting.name].kind == "flag" and (own_cluster or not on_ray):
            raise ConfigError(
                f"{settings.source_of(setting.name)} is not for files of `tgi deploy {target}`",
                "`tgi deploy k8s --nodes N` makes Ray clusters",
            )


def _write(settings: ParsedSettings, text: str) -> None:
    """Print the text, or write it to the file that ``--output`` names."""
    output: Path | None = settings["output"]
    if output is None:
        print(text, end="")
        return
    try:
        with output.open("w" if settings["force"] else "x", encoding="utf-8") as file:
            file.write(text)
        if settings["target"] == "docker":
            output.chmod(0o755)
    except FileExistsError:
        raise ConfigError(f"{output} exists", "give another name, or --force") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    print(f"wrote {output}", file=sys.stderr)


def _render(settings: ParsedSettings, deployment: Deployment) -> str:
    target = settings["target"]
    if target == "systemd":
        return systemd.render(deployment, _executable())
    if settings.is_set("ssl_certfile"):
        raise ConfigError(
            f"--ssl-certfile: {target} has no certificate, and probes speak HTTP",
            "terminate TLS in front of the container",
        )
    if target == "k8s":
        return kubernetes.render(deployment, _kubernetes_options(settings))
    return {"docker": docker.render, "compose": compose.render}[target](deployment)


def _kubernetes_options(settings: ParsedSettings) -> KubernetesOptions:
    for name in ("max_pods", "target_queue", "target_token_latency", "prometheus_url"):
        if settings.is_set(name) and not settings["autoscale"]:
            raise ConfigError(
                f"{settings.source_of(name)} needs an autoscaler",
                "add --autoscale hpa or --autoscale keda",
            )
    milliseconds: float | None = settings["target_token_latency"]
    return KubernetesOptions(
        namespace=settings["namespace"] or "",
        storage_class=settings["storage_class"] or "",
        nodes=settings["nodes"],
        pods=settings["pods"],
        max_pods=settings["max_pods"],
        autoscaler=settings["autoscale"] or "",
        target_queue=settings["target_queue"],
        target_token_seconds=None if milliseconds is None else milliseconds / 1000,
        prometheus_url=settings["prometheus_url"],
        gateway=settings["gateway"] or "",
        monitoring=settings["monitoring"],
        adapters=bool(settings["lora_adapters"]),
        replicas=settings["replicas"],
        stages=settings["pipeline_parallel_size"],
    )


def _deployment(settings: ParsedSettings) -> Deployment:
    serve = setup.serve_config(settings)
    plan = _plan(settings, serve)
    in_container = settings["target"] != "systemd"
    memory = settings["memory"] if plan is None else plan.total
    limits = {} if plan is None else _limits(settings, plan)
    hostname = "0.0.0.0" if in_container else serve.hostname
    own = {
        **({} if hostname == "0.0.0.0" else {"hostname": hostname}),
        "port": serve.port,
        "graceful_termination_timeout": serve.graceful_termination_timeout,
        **limits,
    }
    given = [
        (setting, settings[setting.name])
        for setting in settings.settings
        if SERVE in setting.commands and _is_written(settings, setting)
    ]
    paths = [serve.model_id, *(value for setting, value in given if _is_path(setting))]
    return Deployment(
        arguments=(
            "serve",
            *_model_words(settings),
            *(f"--{name.replace('_', '-')}={value}" for name, value in own.items()),
            *(word for setting, value in given for word in _words(setting, value)),
            "--json-output",
        ),
        name=settings["name"],
        image=settings["image"] or f"tgi-cli:{__version__}",
        port=serve.port,
        hostname=serve.hostname,
        drain_seconds=serve.graceful_termination_timeout,
        memory=memory,
        cpus=settings["cpus"] or _cores(),
        cpuset_cpus=settings["cpuset_cpus"] or "",
        cpuset_mems=settings["cpuset_mems"] or "",
        gpus=settings["gpus"],
        storage=settings["storage"] or STORAGE_BYTES,
        api_key_file=_api_key_file(settings),
        hf_token_file=_absolute(settings["hf_token_file"]),
        mounts=with_link_targets(existing_paths(paths)) if in_container else (),
        notes=tuple(_notes(settings, plan)),
    )


def _plan(settings: ParsedSettings, serve: ServeConfig) -> MemoryPlan | None:
    """The server's memory by purpose; None if only the total is given, and the model is not local.

    Raises:
        ConfigError: it is not given, and the model is not local, so that it cannot be measured.
    """
    if settings["gpus"]:
        return None
    if serve.replicas > 1:
        if settings["memory"] is None:
            raise ConfigError(
                f"the memory of {serve.replicas} replicas on CPUs is not known",
                "give it by --memory: each has its own weights and KV cache",
            )
        return None
    from tgi_cli.cli.local_model import locate
    from tgi_cli.deploy.memory import measured_profile, plan_memory
    from tgi_cli.worker.factory import resolve_config

    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    try:
        found, path = locate(serve)
    except HubError as error:
        if settings["memory"] is not None:
            return None
        raise ConfigError(
            f"the memory of {serve.model_id} is not known: {error.cause}",
            "`tgi warmup MODEL` downloads and measures it; or give a limit by --memory",
        ) from error
    _, facts = resolve_config(found, path)
    config, profile = measured_profile(found, path)
    if config.device != "cpu":
        return None
    pixels = settings["image_workers"] * settings["max_image_pixels"] if facts.takes_images else 0
    return plan_memory(config, profile, settings["memory"], pixels)


def _limits(settings: ParsedSettings, plan: MemoryPlan) -> dict[str, int]:
    """The limits of requests that the memory suffices for, unless they are given."""
    limits = {
        "max_batch_total_tokens": plan.cache_tokens,
        "max_total_tokens": plan.max_total_tokens,
        "max_batch_size": plan.max_batch_size,
    }
    return {name: value for name, value in limits.items() if not settings.is_set(name)}


def _notes(settings: ParsedSettings, plan: MemoryPlan | None) -> Iterator[str]:
    if plan is not None:
        yield f"{plan.note}."
    elif settings["memory"] is not None:
        yield f"Memory, not measured: {format_memory(settings['memory'])}, as given."
    else:
        yield "Memory: no limit, since the model runs on a GPU; --memory sets one."


def _is_written(settings: ParsedSettings, setting: Setting) -> bool:
    return (
        settings.is_set(setting.name)
        and not (setting.secret or setting.hidden or setting.alias_of)
        and setting.name not in _WRITTEN
        and settings[setting.name] is not None
    )


def _model_words(settings: ParsedSettings) -> list[str]:
    model: str = settings["model_id"] or ""
    if not model:
        return []
    if found := existing_paths([model]):
        return [str(found[0])]
    return [f"--model-id={model}" if model.startswith("-") else model]


def _words(setting: Setting, value: Any) -> list[str]:
    """A setting as words of a command line; paths are absolute, as in the container."""
    if isinstance(value, bool):
        return [setting.flag if value else setting.negative_flag]
    words = []
    for each in value if isinstance(value, list) else [value]:
        parts = [str(part) for part in (each if isinstance(each, tuple) else (each,))]
        if _is_path(setting):
            parts = [_absolute_part(part) for part in parts]
        words.append(f"{setting.flag}={','.join(parts)}")
    return words


def _is_path(setting: Setting) -> bool:
    return setting.kind.type is Path or setting.name in _MAY_BE_PATHS


def _absolute_part(word: str) -> str:
    """An existing path made absolute; in NAME=PATH, the path."""
    if whole := existing_paths([word]):
        return str(whole[0])
    name, _, path = word.partition("=")
    found = existing_paths([path]) if path else ()
    return f"{name}={found[0]}" if found else word


def _api_key_file(settings: ParsedSettings) -> Path | None:
    if not settings["keys"]:
        return None
    return _absolute(settings["api_key_file"]) or Path(f"/etc/{settings['name']}/api-key")


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _executable() -> Path:
    """The program ``tgi`` of this environment."""
    beside = Path(sys.executable).with_name("tgi")
    found = str(beside) if beside.exists() else shutil.which("tgi")
    if found is None:
        raise ConfigError("the program tgi is not installed", "pip install it where it shall run")
    return Path(found).absolute()
