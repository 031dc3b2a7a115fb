"""What a command was told: every setting's value, and where it came from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from tgi_cli.config.settings import Setting, settings_of, variable_notes
from tgi_cli.config.settings.values import truth
from tgi_cli.errors import ConfigError

log = logging.getLogger(__name__)

FILE = "tgi_cli.config_file"
"""Under this name a command's context keeps the path of its configuration file and its keys."""

REFUSAL = "no_"
"""Before a switch's name: the flag that says no to it, where that is a parameter of its own."""

SAGEMAKER_PORT = 8080


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from.

    Attributes:
        kind: ``flag``, ``variable``, ``file`` or ``default``.
        name: of the flag, the variable or the file.
    """

    kind: str
    name: str = ""

    @property
    def rank(self) -> int:
        """The higher beats the lower."""
        return ("default", "file", "variable", "flag").index(self.kind)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


DEFAULT = Origin("default")


class ParsedSettings(Mapping[str, Any]):
    """The settings of one run of a command, by name.

    Attributes:
        command: whose settings they are.
        settings: of that command.
        origins: where each value came from.
    """

    def __init__(self, command: str, values: Mapping[str, Any], origins: Mapping[str, Origin]):
        self.command = command
        self.settings = settings_of(command)
        self.origins = dict(origins)
        self._values = dict(values)
        self._unite("model_id", "model", "tokenizer_name")
        self._unite("max_input_tokens", "max_input_length")
        self._unite("engine_url", "master_shard_uds_path")
        if self._on_sagemaker() and "port" in self._values and not self.said("port"):
            self._values["port"] = SAGEMAKER_PORT
            self.origins["port"] = Origin("variable", "HF_MODEL_ID")

    @classmethod
    def read(
        cls, command: str, context: typer.Context, values: Mapping[str, Any]
    ) -> ParsedSettings:
        """What Typer found, with where it found it."""
        path, keys = context.meta.get(FILE, ("", ()))
        values, origins = dict(values), {}
        for setting in settings_of(command):
            source = context.get_parameter_source(setting.name)
            kind = "DEFAULT" if source is None else source.name
            origins[setting.name] = _origin(kind, setting, path, keys)
            if origins[setting.name].kind == "variable" and setting.kind.type is bool:
                # Some versions of click take any word for a yes.
                values[setting.name] = _truth_of(origins[setting.name].name)
            if values.pop(REFUSAL + setting.name, False):
                values[setting.name] = False
                origins[setting.name] = Origin("flag", f"--no-{setting.flag[2:]}")
        return cls(command, values, origins)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def said(self, name: str) -> bool:
        """Whether a flag, a variable or the file has set it."""
        return self.origins.get(name, DEFAULT).kind != "default"

    def fields_of(self, kind: type) -> dict[str, Any]:
        """The values of those settings that are fields of a dataclass."""
        return {name: self._values[name] for name in _fields(kind) if name in self._values}

    def called(self, name: str) -> str:
        """A setting in the words of whoever set it: the flag, the variable, the key of the file."""
        origin = self.origins[name]
        return f"{name} in {origin.name}" if origin.kind == "file" else origin.name

    def explain(self) -> None:
        """Log one line for each thing that was said and has no effect here.

        Raises:
            ConfigError: for what is refused.
        """
        if self._values.get("ngrok"):
            raise ConfigError(
                f"{self.called('ngrok')}: there is no tunnel through ngrok here",
                "leave it off, and run `ngrok http PORT` beside the server",
            )
        for setting in self.settings:
            if setting.idle(self.command) and self.said(setting.name):
                value = self._values[setting.name]
                if value is False or value == 0:
                    continue  # as it is anyway
                log.warning("%s: %s", self.called(setting.name), setting.note)
        if self.origins.get("port", DEFAULT).name == "HF_MODEL_ID":
            log.info("HF_MODEL_ID: listening on port %d, as SageMaker wants", SAGEMAKER_PORT)
        for name, note in variable_notes(os.environ):
            log.info("%s: %s", name, note)

    def export(self) -> None:
        """Put what libraries and child processes read from the environment there."""
        cache = self._values.get("huggingface_hub_cache")
        if cache is not None and self.origins["huggingface_hub_cache"].kind != "variable":
            os.environ["HF_HUB_CACHE"] = str(cache)
        weights = self._values.get("weights_cache_override")
        if weights is not None:
            os.environ["WEIGHTS_CACHE_OVERRIDE"] = str(weights)
        if self._values.get("disable_custom_kernels"):
            os.environ["DISABLE_CUSTOM_KERNELS"] = "true"

    def _on_sagemaker(self) -> bool:
        """Whether the model is named as SageMaker does, whose start script says the port too."""
        return self.origins["model_id"].name == "HF_MODEL_ID"

    def _unite(self, name: str, *others: str) -> None:
        """Make several names of one setting one: what was said last in the order counts.

        Raises:
            ConfigError: two of them say different things with the same right.
        """
        spoken = [n for n in (name, *others) if n in self._values and self._values[n] is not None]
        if not spoken or (spoken == [name]):
            return
        best = max(spoken, key=lambda n: self.origins[n].rank)
        for other in spoken:
            if other == best or self.origins[other].rank < self.origins[best].rank:
                continue
            same = self._values[other] == self._values[best] and name == "model_id"
            if self.origins[other].kind == "default" or same:
                continue
            raise _contradiction(self, other, best)
        value = self._values[best]
        if best == "master_shard_uds_path":
            value = f"unix:{value}"
        self._values[name], self.origins[name] = value, self.origins[best]


def _truth_of(variable: str) -> bool:
    try:
        return truth(os.environ[variable])
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


def _contradiction(given: ParsedSettings, one: str, other: str) -> ConfigError:
    if "max_input_length" in (one, other):
        return ConfigError(
            "--max-input-tokens and --max-input-length are two names of one limit",
            "give the first only (or unset MAX_INPUT_LENGTH)",
        )
    names = [given.called(name) for name in (one, other)]
    if "model" in (one, other) or "model_id" in (one, other):
        return ConfigError(
            f"{given[one]!r} and {given[other]!r}: {' and '.join(names)} name a model each",
            "give one of them",
        )
    return ConfigError(f"{' and '.join(names)} contradict each other", "give one of them")


def _fields(kind: type) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__)  # type: ignore[attr-defined]
