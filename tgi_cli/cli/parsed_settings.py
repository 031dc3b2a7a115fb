"""The settings of one run of a command: every value, and where it came from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import typer

from tgi_cli.config.settings import settings_of
from tgi_cli.config.settings.inherited import variable_notes
from tgi_cli.config.settings.setting import Setting
from tgi_cli.config.settings.values import parse_bool
from tgi_cli.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "tgi_cli.config_file"
"""The key of a command's context that holds the path of its configuration file and its keys."""

NEGATION = "no_"
"""Prefix of a switch's name: the flag that switches it off, where it is a parameter of its own."""

SAGEMAKER_PORT = 8080
MASK = "***"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from.

    Attributes:
        kind: ``flag``, ``variable``, ``file`` or ``default``.
        name: name of the flag, the variable or the file.
    """

    kind: str
    name: str = ""

    @property
    def rank(self) -> int:
        """Precedence: the higher overrides the lower."""
        return ("default", "file", "variable", "flag").index(self.kind)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


DEFAULT = Origin("default")


class ParsedSettings(Mapping[str, Any]):
    """The settings of one run of a command, by name.

    Attributes:
        command: the command.
        settings: its entries in the table of settings.
        origins: where each value came from.
        further_arguments: arguments beyond those that settings declare.
    """

    def __init__(self, command: str, values: Mapping[str, Any], origins: Mapping[str, Origin]):
        self.command = command
        self.further_arguments: tuple[str, ...] = ()
        self.settings = settings_of(command)
        self.origins = dict(origins)
        self._values = dict(values)
        aliases: dict[str, list[str]] = {}
        for setting in self.settings:
            if setting.alias_of:
                aliases.setdefault(setting.alias_of, [setting.alias_of]).append(setting.name)
        for names in aliases.values():
            self._merge(*names)
        if self._on_sagemaker() and "port" in self._values and not self.is_set("port"):
            self._values["port"] = SAGEMAKER_PORT
            self.origins["port"] = Origin("variable", "HF_MODEL_ID")

    @classmethod
    def read(
        cls, command: str, context: typer.Context, values: Mapping[str, Any]
    ) -> ParsedSettings:
        """The values that Typer parsed, and their origins."""
        path, keys = context.meta.get(FILE, ("", ()))
        values, origins = dict(values), {}
        for setting in settings_of(command):
            source = context.get_parameter_source(setting.name)
            kind = "DEFAULT" if source is None else source.name
            origins[setting.name] = _origin(kind, setting, path, keys)
            if origins[setting.name].kind == "variable" and setting.kind.type is bool:
                # Some versions of click take any word for true.
                values[setting.name] = _parse_switch(origins[setting.name].name)
            if values.pop(NEGATION + setting.name, False):
                values[setting.name] = False
                origins[setting.name] = Origin("flag", setting.negative_flag)
        found = cls(command, values, origins)
        found.further_arguments = tuple(context.args)
        return found

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def is_set(self, name: str) -> bool:
        """Whether a flag, a variable or the file sets it."""
        return self.origins.get(name, DEFAULT).kind != "default"

    def fields_of(self, cls: type) -> dict[str, Any]:
        """The values of the settings that are fields of a dataclass."""
        names = [field.name for field in fields(cls)]
        return {name: self._values[name] for name in names if name in self._values}

    def source_of(self, name: str) -> str:
        """What sets it, for messages: the flag, the variable, or the key of the file."""
        origin = self.origins[name]
        return f"{name} in {origin.name}" if origin.kind == "file" else origin.name

    def command_line(self) -> list[str]:
        """The command with the arguments and flags that were given, secrets masked."""
        arguments: list[str] = []
        flags: list[str] = []
        for setting in self.settings:
            value, origin = self._values[setting.name], self.origins[setting.name]
            if setting.alias_of or value is None or origin.kind != "flag":
                continue
            if setting.argument:
                arguments.append(str(value))
            elif isinstance(value, bool):
                flags.append(origin.name if value else setting.negative_flag)
            else:
                for each in value if isinstance(value, list) else [value]:
                    word = ",".join(map(str, each)) if isinstance(each, tuple) else str(each)
                    flags += [origin.name, MASK if setting.secret else word]
        return ["tgi", *self.command.split(), *arguments, *flags]

    def log_ignored(self) -> None:
        """Log one line for each setting that has no effect here.

        Raises:
            ConfigError: a setting that is rejected.
        """
        if self._values.get("ngrok"):
            raise ConfigError(
                f"{self.source_of('ngrok')}: there is no tunnel through ngrok here",
                "leave it off, and run `ngrok http PORT` beside the server",
            )
        for setting in self.settings:
            note = setting.note_for(self.command)
            if note and self.is_set(setting.name):
                value = self._values[setting.name]
                if value is False or value == 0:
                    continue  # the behavior in any case
                log.warning("%s: %s", self.source_of(setting.name), note)
        if self._values.get("nnodes") == 1:
            for name in ("master_addr", "master_port"):
                if self.is_set(name):
                    log.warning("%s: without --nnodes, no port is opened", self.source_of(name))
        if self.origins.get("port", DEFAULT).name == "HF_MODEL_ID":
            log.info("HF_MODEL_ID: listening on port %d, as on SageMaker", SAGEMAKER_PORT)
        for name, note in variable_notes(os.environ):
            log.info("%s: %s", name, note)

    def export(self) -> None:
        """Set the environment variables that libraries and child processes read."""
        cache = self._values.get("huggingface_hub_cache")
        if cache is not None and self.origins["huggingface_hub_cache"].kind != "variable":
            os.environ["HF_HUB_CACHE"] = str(cache)
        weights = self._values.get("weights_cache_override")
        if weights is not None:
            os.environ["WEIGHTS_CACHE_OVERRIDE"] = str(weights)
        if self._values.get("disable_custom_kernels"):
            os.environ["DISABLE_CUSTOM_KERNELS"] = "true"

    def _on_sagemaker(self) -> bool:
        """Whether the model is named as on SageMaker, whose start script sets the port too."""
        return self.origins.get("model_id", DEFAULT).name == "HF_MODEL_ID"

    def _merge(self, name: str, *aliases: str) -> None:
        """Take the value of a setting with several names from the one with highest precedence.

        Raises:
            ConfigError: two of them have different values and the same precedence.
        """
        given = [n for n in (name, *aliases) if self._values[n] is not None]
        if not given or given == [name]:
            return
        best = max(given, key=lambda n: self.origins[n].rank)
        for other in given:
            if other == best or self.origins[other].rank < self.origins[best].rank:
                continue
            same = self._values[other] == self._values[best] and name == "model_id"
            if self.origins[other].kind != "default" and not same:
                raise self._contradiction(other, best)
        value = self._values[best]
        if best == "master_shard_uds_path":
            value = f"unix:{value}"
        self._values[name], self.origins[name] = value, self.origins[best]

    def _contradiction(self, one: str, other: str) -> ConfigError:
        if "max_input_length" in (one, other):
            return ConfigError(
                "--max-input-tokens and --max-input-length are two names of one limit",
                "give the first only (or unset MAX_INPUT_LENGTH)",
            )
        names = " and ".join(self.source_of(name) for name in (one, other))
        if {"model", "model_id"} & {one, other}:
            cause = f"{self[one]!r} and {self[other]!r}: {names} name a model each"
            return ConfigError(cause, "give one of them")
        return ConfigError(f"{names} contradict each other", "give one of them")


def _parse_switch(variable: str) -> bool:
    try:
        return parse_bool(os.environ[variable])
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}") from error


def _origin(kind: str, setting: Setting, path: str, keys: tuple[str, ...]) -> Origin:
    if kind == "COMMANDLINE":
        return Origin("flag", "MODEL" if setting.argument else setting.flag)
    if kind == "ENVIRONMENT":
        return Origin("variable", next(n for n in setting.all_variables if os.environ.get(n)))
    if kind == "DEFAULT_MAP" and setting.name in keys:
        return Origin("file", str(path))
    return DEFAULT
