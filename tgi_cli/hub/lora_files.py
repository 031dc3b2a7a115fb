"""LoRA adapters by name: from what the user wrote to folders that an engine can read.

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

from tgi_cli.errors import ConfigError, ModelError, ModelNotFoundError, OfflineError
from tgi_cli.hub import child_process, model_files
from tgi_cli.hub.cache import RepoCache
from tgi_cli.hub.client import HubEnvironment, offline_mode_error
from tgi_cli.hub.download import download
from tgi_cli.hub.progress import Progress
from tgi_cli.hub.repository import fetch_repository

logger = logging.getLogger(__name__)

_FORMS = "the forms are: id, id@revision, name=path, name=id@revision"
NAME_CHARACTERS = 256
_NAME = re.compile(rf"[^\s=@,]{{1,{NAME_CHARACTERS}}}")
BASE_NAME = "tgi"
"""What TGI's clients call the served model, whatever it is."""


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """An adapter's folder, complete and checked, and the name that requests use for it."""

    name: str
    path: Path

    def __str__(self) -> str:
        """As ``--lora-adapters`` takes it."""
        return f"{self.name}={self.path}"


@dataclass(frozen=True, slots=True)
class _AdapterRequest:
    name: str
    source: str
    revision: str | None


def resolve_adapters(
    items: Sequence[str], model_id: str, progress: Progress | None = None
) -> tuple[LocalAdapter, ...]:
    """The folders of the adapters that the user named, downloaded where that is needed.

    Args:
        items: in the forms of ``--lora-adapters``.
        model_id: of the base, whose name no adapter may have.

    Raises:
        ConfigError: an item in no known form, or a name that is used twice.
        HubError: one cannot be had.
        ModelError: what a name stands for is no adapter.
    """
    wanted = [_parse(item) for item in items]
    names = [one.name for one in wanted]
    for name in names:
        check_name(name, model_id)
        if names.count(name) > 1:
            raise ConfigError(
                f"--lora-adapters names {name!r} twice", "give each its own name: name=id or path"
            )
    found = []
    for one in wanted:
        path = resolve_adapter(one.source, one.revision, progress=progress)
        if "," in str(path):
            raise ConfigError(
                f"the path of the adapter {one.name} has a comma in it: {path}",
                "commas separate adapters: make a link to it without one",
            )
        found.append(LocalAdapter(one.name, path))
    return tuple(found)


def _parse(item: str) -> _AdapterRequest:
    name, given, source = item.partition("=")
    if not given:
        source = name
    folder = bool(given) and Path(source).expanduser().is_dir()  # an @ may be part of its name
    source, at, revision = (source, "", "") if folder else source.partition("@")
    if not given:
        name = source
    if not (name and source) or (at and not revision):
        raise ConfigError(f"--lora-adapters: {item!r} is not an adapter", _FORMS)
    return _AdapterRequest(name.strip(), source.strip(), revision or None)


def check_name(name: str, model_id: str) -> None:
    """Refuse a name that requests could not use. Raises ConfigError."""
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
    progress: Progress | None = None,
) -> Path:
    """The folder of one adapter, with safetensors weights.

    Args:
        source: a folder or an id on the hub.
        revision: branch, tag, commit or ``refs/pr/N`` of the latter.
        absolute: take only absolute paths for folders: whoever asks does not know our own.

    Raises:
        HubError: it cannot be had.
        ModelError: it is not an adapter.
    """
    folder = Path(source).expanduser() if not absolute else Path(source)
    if folder.is_absolute() or (not absolute and folder.exists()):
        if not folder.is_dir():
            raise ModelNotFoundError(
                f"there is no folder {source}", "name a folder with adapter_config.json, or an id"
            )
        try:
            _require_config(folder, source)
            return _with_safetensors(folder.resolve())
        except OSError as error:
            raise ModelError(f"{error.filename or source}: {error.strerror or error}") from error
    if source.startswith((".", "~", "\\")) or source.endswith("/"):
        raise ModelNotFoundError(
            f"there is no folder {source}", "name a folder by its absolute path, or an id"
        )
    return _with_safetensors(_from_hub(source, revision, progress or Progress()))


def split_revision(source: str) -> tuple[str, str | None]:
    """``id@revision`` in two; an absolute path is left whole."""
    if source.startswith("/"):
        return source, None
    source, _, revision = source.partition("@")
    return source, revision or None


def base_model_of(folder: Path) -> str:
    """The model that an adapter says it was trained on; empty if it does not say."""
    said = model_files.read_json(folder / model_files.ADAPTER_CONFIG).get("base_model_name_or_path")
    return said if isinstance(said, str) else ""


def is_same_base(said: str, model_id: str) -> bool:
    """Whether an adapter's base is the served model, as far as their last names tell.

    >>> is_same_base("org/Model", "/data/model/")
    True
    """

    def last(name: str) -> str:
        return Path(name).name.lower()

    return not said or last(said) == last(model_id)


def _from_hub(model_id: str, revision: str | None, progress: Progress) -> Path:
    hub = HubEnvironment.read()
    try:
        if hub.offline:
            raise offline_mode_error()
        repository = fetch_repository(model_id, revision, hub)
    except OfflineError as error:
        cache = RepoCache(hub.cache, model_id)
        commit = cache.commit_of(revision)
        if commit is None or not cache.snapshot(commit).is_dir():
            raise error
        folder = cache.snapshot(commit)
        _require_adapter(model_files.file_names(folder), model_id)
        model_files.check_adapter(folder)
        return folder
    _require_adapter(list(repository.files), model_id)
    chosen = model_files.select_adapter_files(repository.files)
    return download(repository, (chosen.small, chosen.weights), hub, progress)


def _require_config(folder: Path, what: str) -> None:
    """Refuse a folder without the file that makes an adapter; others are not looked at."""
    _require_adapter(
        [model_files.ADAPTER_CONFIG] * (folder / model_files.ADAPTER_CONFIG).is_file(), what
    )


def _require_adapter(names: Sequence[str], what: str) -> None:
    if model_files.ADAPTER_CONFIG not in names:
        raise ModelError(
            f"{what} is not an adapter: it has no {model_files.ADAPTER_CONFIG}",
            "name a folder or repository that PEFT's save_pretrained wrote",
        )


def _with_safetensors(folder: Path) -> Path:
    """``folder``, checked; weights that are a pickle only are converted beside it."""
    weights = model_files.check_adapter(folder)
    if weights.suffix == ".bin":
        if not os.access(folder, os.W_OK):
            raise ModelError(
                f"{weights} is a pickle, and there is no writing beside it",
                "copy the adapter to a folder of your own",
            )
        logger.info("converting %s to safetensors", weights)
        child_process.run("tgi_cli.hub.convert", folder, folder)
        model_files.check_adapter(folder)
    return folder
