"""``tgi serve`` of several models: from the command line and the file of models to a configuration.

Every setting of the command line applies to all models, unless it is one of the server in front of
them; the file of ``--models`` adds settings to single ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_cli.cli import setup
from tgi_cli.cli.parsed_settings import ParsedSettings
from tgi_cli.config import ServeConfig, check_settings
from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.setting import SERVE, Setting
from tgi_cli.errors import ConfigError

if TYPE_CHECKING:
    from tgi_cli.multi_model.config import MultiModelConfig

FRONT_SETTINGS = frozenset(
    [
        *("hostname", "port", "api_key", "api_key_file", "cors_allow_origin"),
        *("ssl_certfile", "ssl_keyfile", "graceful_termination_timeout", "config", "env"),
        *("models", "models_max", "models_memory", "model_residence_seconds"),
        *("model_queue_size", "model_wait_seconds", "sleep_idle_seconds", "parent_fd"),
        *("config_fd", "socket_fd", "model_id", "model"),
    ]
)
"""Settings of the server in front; the models' own servers do not get them."""
_PER_MODEL = frozenset(["sleep_idle_seconds", "served_model_name", "model_id", "model"])
"""Settings of a single model that are not passed on as they are."""
_REFUSED = ("shard_uds_path", "enable_sleep_mode", "nnodes")
_ONE_ONLY = ("revision", "model_gguf", "tokenizer_name", "served_model_name")
_MEMORY_SHARE = 0.9


@dataclass(slots=True)
class _Entry:
    """A model with its own settings, parsed."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)


def multi_model_config(settings: ParsedSettings, further: Sequence[str]) -> MultiModelConfig:
    """The configuration of a server of several models, which are downloaded if necessary.

    Args:
        settings: The command line.
        further: The models that it names after the first.

    Raises:
        ConfigError: Settings contradict each other, or the file of models is invalid.
        HubError, ModelError: A model is unavailable.
    """
    from tgi_cli.multi_model.config import ModelSpec, MultiModelConfig
    from tgi_cli.multi_model.memory_estimate import estimate_memory
    from tgi_cli.multi_model.model_scheduler import SwitchPolicy
    from tgi_cli.process.spawn import run_in_fork
    from tgi_cli.router.config import IMAGE_PAYLOAD

    for name in _REFUSED:
        if settings.is_set(name) and settings[name]:
            raise ConfigError(
                f"{settings.source_of(name)} is for a server of one model",
                "leave it off, or serve the models separately",
            )
    entries = _entries(settings, further)
    configs = [_serve_config(settings, entry) for entry in entries]
    for config in configs:
        check_settings(config)
    found = run_in_fork(partial(_locate_all, configs))
    specs = []
    for entry, config, (model_id, path) in zip(entries, configs, found, strict=True):
        served = tuple(entry.values.get("served_model_name") or ())
        aliases = (entry.name, *served, config.model_id, model_id)
        specs.append(
            ModelSpec(
                name=entry.name,
                model_id=config.model_id,
                path=path,
                names=tuple(dict.fromkeys(name for name in aliases if name)),
                arguments=tuple(_arguments(settings, entry)),
                memory=estimate_memory(path, config.max_batch_total_tokens),
                idle_seconds=entry.values.get("sleep_idle_seconds", settings["sleep_idle_seconds"]),
            )
        )
    budget = settings["models_memory"] or _available_memory()
    policy = SwitchPolicy(
        budget=budget,
        most_loaded=_most_loaded(settings),
        residence=settings["model_residence_seconds"],
        drain=settings["graceful_termination_timeout"],
        queue_size=settings["model_queue_size"],
        wait=settings["model_wait_seconds"],
    )
    front = setup.front(settings)
    own = {
        "models": tuple(specs),
        "policy": policy,
        "hostname": setup.listen_address(settings),
        "payload_limit": settings["payload_limit"] or IMAGE_PAYLOAD,
        "api_key": front["api_key"],
        "cors_allow_origin": front["cors_allow_origin"],
        "otlp_endpoint": front["otlp_endpoint"],
    }
    return MultiModelConfig(**settings.fields_of(MultiModelConfig) | own)


def _entries(settings: ParsedSettings, further: Sequence[str]) -> list[_Entry]:
    """The models, from the command line or the file. Raises ConfigError."""
    file: Path | None = settings["models"]
    if file is None:
        ids = [settings["model_id"], *further]
        for name in _ONE_ONLY:
            if settings.is_set(name):
                raise ConfigError(
                    f"{settings.source_of(name)} is for one model, and there are {len(ids)}",
                    "set it for each in a file of models: --models FILE",
                )
        entries = [_Entry(each, {"model_id": each}) for each in ids]
    else:
        if settings["model_id"] or further:
            raise ConfigError(
                f"--models {file} and MODEL both name models", "add MODEL to the file"
            )
        from tgi_cli.config.settings.models_file import read_models

        refused = (FRONT_SETTINGS - _PER_MODEL) | set(_REFUSED)
        read = read_models(file, refused)
        entries = [_Entry(name, dict(_parsed(values))) for name, values in read.items()]
        for entry in entries:
            entry.values.setdefault("model_id", entry.name)
    names: dict[str, str] = {}
    for entry in entries:
        for name in dict.fromkeys((entry.name, *(entry.values.get("served_model_name") or ()))):
            if name in names:
                raise ConfigError(f"two of the models are called {name!r}", "give each a name")
            names[name] = entry.name
    return entries


def _parsed(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Parse the values of a file, which are written as on a command line."""
    by_name = {setting.name: setting for setting in settings_of(SERVE)}
    for name, value in values.items():
        setting = by_name[name]
        if isinstance(value, list):
            yield setting.alias_of or name, [part for w in value for part in setting.kind.read(w)]
        else:
            parsed = value if isinstance(value, bool) else setting.kind.read(value)
            yield setting.alias_of or name, parsed


def _serve_config(settings: ParsedSettings, entry: _Entry) -> ServeConfig:
    names = {each.name for each in fields(ServeConfig)}
    own = {name: value for name, value in entry.values.items() if name in names}
    return setup.serve_config(settings, **own)


def _locate_all(configs: Sequence[ServeConfig]) -> list[tuple[str, Path]]:
    """The full names and the folders of all models. Raises HubError, ModelError."""
    from tgi_cli.cli.local_model import locate

    located = [locate(config) for config in configs]
    return [(config.model_id, path) for config, path in located]


def _arguments(settings: ParsedSettings, entry: _Entry) -> Iterator[str]:
    """The flags of a model's own ``tgi serve``, without what process lists should not show."""
    for setting in settings.settings:
        name = setting.name
        if setting.secret:
            continue
        if name in entry.values and name not in _PER_MODEL:
            yield from _words(setting, entry.values[name])
        elif name not in FRONT_SETTINGS and not setting.alias_of and settings.is_set(name):
            yield from _words(setting, settings[name])


def _words(setting: Setting, value: Any) -> Iterator[str]:
    """A value as words of a command line."""
    if isinstance(value, bool):
        if value or setting.negative_flag:
            yield setting.flag if value else setting.negative_flag
    elif isinstance(value, list):
        yield from (f"{setting.flag}={each}" for each in value)
    elif isinstance(value, tuple):
        yield f"{setting.flag}={','.join(map(str, value))}"
    elif value is not None:
        yield f"{setting.flag}={value}"


def _available_memory() -> int:
    from tgi_cli.process.system_memory import available_system_memory

    available = available_system_memory()
    if available is None:
        raise ConfigError(
            "the system does not say how much memory is available", "set --models-memory"
        )
    return int(available * _MEMORY_SHARE)


def _most_loaded(settings: ParsedSettings) -> int:
    """The number of models that may be loaded at once; 0 for as many as fit."""
    if settings["models_max"] is not None:
        return int(settings["models_max"])
    from tgi_cli.process.machine import has_gpu

    return 1 if has_gpu() else 0
