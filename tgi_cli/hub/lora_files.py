"""Resolves LoRA adapters to folders that the engine can load.

The forms are those of TGI's ``--lora-adapters``: ``id``, ``id@revision``, ``name=path`` and
``name=id@revision``. An adapter is PEFT's folder of ``adapter_config.json`` and weights:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tgi_cli.config.model_names import BASE_NAME
from tgi_cli.errors import ConfigError, ModelError, ModelNotFoundError, OfflineError
from tgi_cli.hub import child_process, model_files
from tgi_cli.hub.cache import RepoCache
from tgi_cli.hub.client import HubEnvironment
from tgi_cli.hub.download import download, download_progress
from tgi_cli.hub.repository import fetch_repository
from tgi_cli.process.progress import ProgressReporter

logger = logging.getLogger(__name__)

_FORMS = "the forms are: id, id@revision, name=path, name=id@revision"
NAME_CHARACTERS = 256
_NAME = re.compile(rf"[^\s=@,]{{1,{NAME_CHARACTERS}}}")


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """A complete and verified folder of an adapter, and its name in requests."""

    name: str
    path: Path

    def __str__(self) -> str:
        """The form that ``--lora-adapters`` accepts."""
        return f"{self.name}={self.path}"


def resolve_adapters(
    items: Sequence[str], model_id: str, progress: ProgressReporter | None = None
) -> tuple[LocalAdapter, ...]:
    """Resolve adapters to folders; download them if necessary.

    Args:
        items: in the forms of ``--lora-adapters``.
        model_id: the base model, whose name no adapter may have.
        progress: progress of the downloads.

    Raises:
        ConfigError: an item is malformed, or a name is used twice.
        HubError: an adapter is unavailable.
        ModelError: a folder or repository is not an adapter.
    """
    requests = [_parse(item) for item in items]
    names = [name for name, _, _ in requests]
    for name in names:
        check_name(name, model_id)
        if names.count(name) > 1:
            raise ConfigError(
                f"--lora-adapters names {name!r} twice", "give each its own name: name=id or path"
            )
    found = []
    for name, source, revision in requests:
        path = resolve_adapter(source, revision, progress=progress)
        if "," in str(path):
            raise ConfigError(
                f"the path of the adapter {name} has a comma in it: {path}",
                "commas separate adapters: make a link to it without one",
            )
        found.append(LocalAdapter(name, path))
    return tuple(found)


def _parse(item: str) -> tuple[str, str, str | None]:
    """Name, source and revision. Raises ConfigError."""
    name, given, source = item.partition("=")
    if not given:
        source = name
    folder = bool(given) and Path(source).expanduser().is_dir()  # an @ may be part of its name
    source, at, revision = (source, "", "") if folder else source.partition("@")
    if not given:
        name = source
    if not (name and source) or (at and not revision):
        raise ConfigError(f"--lora-adapters: {item!r} is not an adapter", _FORMS)
    return name.strip(), source.strip(), revision or None


def check_name(name: str, model_id: str) -> None:
    """Raise ConfigError for a name that requests could not use."""
    if name in (model_id, BASE_NAME):
        raise ConfigError(
            f"{name!r} is the name of the base model", "give the adapter another: name=id or path"
        )
    if len(name) > NAME_CHARACTERS:
        raise ConfigError(
            f"an adapter's name has {len(name)} characters, and may have {NAME_CHARACTERS}",
            "give it a shorter one: name=id or path",
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of an adapter",
            f"at most {NAME_CHARACTERS} characters, without spaces, commas, = and @",
        )


def resolve_adapter(
    source: str,
    revision: str | None = None,
    *,
    absolute: bool = False,
    progress: ProgressReporter | None = None,
) -> Path:
    """Resolve one adapter to a folder with safetensors weights.

    Args:
        source: a folder or an id on the hub.
        revision: branch, tag, commit or ``refs/pr/N`` of a repository.
        absolute: accept only absolute paths as folders, for callers in other working directories.
        progress: progress of the download.

    Raises:
        HubError: the adapter is unavailable.
        ModelError: the folder or repository is not an adapter.
    """
    folder = Path(source).expanduser() if not absolute else Path(source)
    if folder.is_absolute() or (not absolute and folder.exists()):
        if not folder.is_dir():
            raise ModelNotFoundError(
                f"there is no folder {source}", "name a folder with adapter_config.json, or an id"
            )
        try:
            if not (folder / model_files.ADAPTER_CONFIG).is_file():  # do not list the folder
                raise _not_an_adapter_error(source)
            return _with_safetensors(folder.resolve())
        except OSError as error:
            raise ModelError(f"{error.filename or source}: {error.strerror or error}") from error
    if source.startswith((".", "~", "\\")) or source.endswith("/"):
        raise ModelNotFoundError(
            f"there is no folder {source}", "name a folder by its absolute path, or an id"
        )
    return _with_safetensors(_from_hub(source, revision, progress or download_progress(quiet=True)))


def split_revision(source: str) -> tuple[str, str | None]:
    """Split ``id@revision``; an absolute path is returned whole."""
    if source.startswith("/"):
        return source, None
    source, _, revision = source.partition("@")
    return source, revision or None


def base_model_of(folder: Path) -> str:
    """The base model in an adapter's config, or an empty string."""
    base = model_files.read_json(folder / model_files.ADAPTER_CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) else ""


def is_same_base(base: str, model_id: str) -> bool:
    """Whether an adapter's base has the served model's name, organizations and paths aside.

    >>> is_same_base("org/Model", "/data/model/")
    True
    """

    def last(name: str) -> str:
        return Path(name).name.lower()

    return not base or last(base) == last(model_id)


def _from_hub(model_id: str, revision: str | None, progress: ProgressReporter) -> Path:
    hub = HubEnvironment.read()
    try:
        repository = fetch_repository(model_id, revision, hub)
    except OfflineError as error:
        cache = RepoCache(hub.cache, model_id)
        commit = cache.commit_of(revision)
        if commit is None or not cache.snapshot(commit).is_dir():
            raise error
        folder = cache.snapshot(commit)
        if not (folder / model_files.ADAPTER_CONFIG).is_file():
            raise _not_an_adapter_error(model_id) from error
        model_files.check_adapter(folder)
        return folder
    if model_files.ADAPTER_CONFIG not in repository.files:
        raise _not_an_adapter_error(model_id)
    chosen = model_files.select_adapter_files(repository.files)
    return download(repository, (chosen.small, chosen.weights), hub, progress)


def _not_an_adapter_error(source: str) -> ModelError:
    return ModelError(
        f"{source} is not an adapter: it has no {model_files.ADAPTER_CONFIG}",
        "name a folder or repository that PEFT's save_pretrained wrote",
    )


def _with_safetensors(folder: Path) -> Path:
    """Check ``folder``, and convert its weights there if they are a pickle."""
    weights = model_files.check_adapter(folder)
    if weights.suffix == ".bin":
        if not os.access(folder, os.W_OK):
            raise ModelError(
                f"{weights} is a pickle, and its folder is read-only",
                "copy the adapter to a folder of your own",
            )
        logger.info("converting %s to safetensors", weights)
        child_process.run("tgi_cli.hub.convert", folder, folder)
        model_files.check_adapter(folder)
    return folder
