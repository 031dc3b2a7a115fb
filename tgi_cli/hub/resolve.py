"""Resolves a model id, or a folder, to a folder that can be served."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tgi_cli.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    ModelNotFoundError,
    OfflineError,
)
from tgi_cli.hub import child_process, gguf_model, model_files
from tgi_cli.hub.cache import RepoCache, require_space
from tgi_cli.hub.client import HubEnvironment
from tgi_cli.hub.derived_folders import beside_cache, create_once
from tgi_cli.hub.derived_models import (
    OVERRIDE,
    SAFETENSORS,
    check_complete,
    combine,
    convert_folder,
)
from tgi_cli.hub.download import download, download_progress
from tgi_cli.hub.gguf_files import GGUF, is_model_file, split_tag
from tgi_cli.hub.model_urls import is_remote, without_scheme
from tgi_cli.hub.remote_model import fetch_remote
from tgi_cli.hub.repository import Repository, fetch_repository
from tgi_cli.hub.streamed_model import stream_model
from tgi_cli.process.progress import ProgressReporter

logger = logging.getLogger(__name__)

_VERSION = re.compile("[0-9a-f]{40}")
"""A version of what a URL has: the revision of a model that was resolved before."""


@dataclass(frozen=True)
class LocalModel:
    """A complete and verified folder of a model.

    Attributes:
        path: the folder.
        model_id: as the user gave it.
        revision: the downloaded commit; empty for a local folder.
    """

    path: Path
    model_id: str
    revision: str


@dataclass(frozen=True)
class _ResolveOptions:
    trust_remote_code: bool
    extension: str
    auto_convert: bool
    merge_lora: bool
    weights: bool
    progress: ProgressReporter
    tokenizer: Path | None


def resolve_model(
    model_id: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    extension: str = SAFETENSORS,
    auto_convert: bool = True,
    merge_lora: bool = False,
    weights: bool = True,
    overridable: bool = True,
    stream: bool = False,
    gguf: str | None = None,
    tokenizer: str | None = None,
    progress: ProgressReporter | None = None,
) -> LocalModel:
    """Resolve ``model_id`` to a folder; download, convert or merge first if necessary.

    A complete local folder is used as it is. From a repository the files that serving needs are
    downloaded. If the hub cannot be reached, a complete snapshot in the cache is used. If
    :data:`OVERRIDE` names a folder, its weights replace the model's.

    A GGUF file is served from a folder with a link to it and with the files that its metadata stand
    for. Of a repository or a folder with several, ``model_id:TAG`` names one.

    Args:
        model_id: a folder, a GGUF file, an id on the hub, also after ``hf://``, or the URL of a
            folder or a GGUF file (``s3://``, ``gs://``, ``az://``, ``https://``).
        revision: branch, tag, commit or ``refs/pr/N``. Default: main.
        trust_remote_code: download code, too.
        extension: extension of the weights.
        auto_convert: convert pickled weights to safetensors if there are no others.
        merge_lora: merge a PEFT adapter into its base instead of returning its folder.
        weights: require weights, not only the configuration and the tokenizer.
        overridable: let :data:`OVERRIDE` replace the weights, which it does for the served model.
        stream: leave the weights where they are, to be read as they are loaded; for URLs.
        gguf: a GGUF file, named as by ``model_id``, which then names its tokenizer if not empty.
        tokenizer: a folder or an id, whose tokenizer replaces that of a GGUF file.
        progress: progress of the download.

    Raises:
        HubError: the model is unavailable; its subclasses have the reasons.
        ModelError: the model cannot be served.
    """
    model_id, revision = without_scheme(model_id, revision)
    override = os.environ.get(OVERRIDE, "")
    if override and weights and overridable:
        model = resolve_model(
            model_id,
            revision=revision,
            trust_remote_code=trust_remote_code,
            weights=False,
            progress=progress,
        )
        return replace(model, path=combine(model.path, Path(override).expanduser()))
    progress = progress or download_progress(quiet=True)
    if gguf is not None:
        if stream:
            raise ConfigError("--load-format stream is not for GGUF files", "leave it off")
        model = resolve_model(
            gguf, revision=revision, tokenizer=tokenizer or model_id or None, progress=progress
        )
        return replace(model, model_id=model_id or gguf)
    options = _ResolveOptions(
        trust_remote_code,
        extension if extension.startswith(".") else f".{extension}",
        auto_convert,
        merge_lora,
        weights,
        progress,
        _tokenizer_folder(tokenizer, trust_remote_code, progress),
    )
    if is_remote(model_id):
        return _from_url(model_id, revision, options, stream)
    if stream:
        raise ConfigError(
            f"--load-format stream reads weights from a URL, and {model_id} is not one",
            "leave it off",
        )
    folder = Path(model_id).expanduser()
    try:
        if folder.exists():
            return LocalModel(_from_folder(folder, model_id, options), model_id, "")
    except OSError as error:
        raise ModelError(f"{error.filename or model_id:.200}: {error.strerror or error}") from error
    kind = "file" if model_id.lower().endswith(GGUF) else "folder"
    here = kind == "file" and ":" not in model_id and folder.parent.is_dir()
    name, tag = split_tag(model_id)
    if tag is not None and not here and Path(name).expanduser().is_dir():
        path = gguf_model.from_folder(Path(name).expanduser(), tag, options.tokenizer)
        return LocalModel(path, model_id, "")
    if here or model_id.startswith((".", "/", "~", "\\")) or model_id.endswith("/"):
        raise ModelNotFoundError(f"there is no {kind} {model_id}", "check the path")
    if not model_id.strip():
        raise ModelNotFoundError("the model id is empty", "name a model or a folder")
    return _from_hub(model_id, revision, options)


def _from_url(url: str, revision: str | None, options: _ResolveOptions, stream: bool) -> LocalModel:
    if revision is not None and not _VERSION.fullmatch(revision):
        raise ConfigError(f"--revision applies to models of the hub, not to {url}", "leave it out")
    if options.extension not in (SAFETENSORS, GGUF):
        raise ConfigError(
            f"--extension {options.extension}: only safetensors and GGUF files are taken from URLs",
            "leave it out",
        )
    if stream:
        path, version = stream_model(url, options.trust_remote_code, options.progress)
        return LocalModel(path, url, version)
    path, version = fetch_remote(
        url,
        trust_remote_code=options.trust_remote_code,
        weights=options.weights,
        tokenizer=options.tokenizer,
        progress=options.progress,
    )
    names = model_files.file_names(path)
    if not _is_gguf(names, options):
        _require_no_tokenizer(url, options)
    if options.weights and model_files.is_adapter(names):
        name = url.rstrip("/").rpartition("/")[2]
        return LocalModel(_adapter(path, name, version, options), url, version)
    if options.weights and not any(name.endswith(GGUF) for name in names):
        model_files.check_model(path, SAFETENSORS)
    return LocalModel(path, url, version)


def _tokenizer_folder(
    name: str | None, trust_remote_code: bool, progress: ProgressReporter
) -> Path | None:
    if name is None:
        return None
    with suppress(OSError):  # a name that is too long
        if (folder := Path(name).expanduser()).is_dir():
            return folder
    return resolve_model(
        name, trust_remote_code=trust_remote_code, weights=False, progress=progress
    ).path


def _from_folder(folder: Path, model_id: str, options: _ResolveOptions) -> Path:
    if not folder.is_dir():
        if folder.name.lower().endswith(GGUF):
            return gguf_model.from_file(folder, options.tokenizer)
        raise ModelError(
            f"{model_id} is a file", "name the folder that holds config.json, or a GGUF file"
        )
    names = model_files.file_names(folder)
    if not names:
        raise ModelError(
            f"the folder {model_id} is empty",
            "name a folder with config.json and weights; if you mean a model on the hub, "
            "run this elsewhere or move the folder away",
        )
    if _is_gguf(names, options) and not model_files.is_adapter(names):
        return gguf_model.from_folder(folder, None, options.tokenizer)
    _require_no_tokenizer(model_id, options)
    if not options.weights:
        model_files.read_json(folder / "config.json")
        return folder
    if model_files.is_adapter(names):
        with model_files.check_adapter(folder).open("rb") as file:
            commit = hashlib.file_digest(file, "sha256").hexdigest()
        return _adapter(folder, folder.resolve().name, commit, options)
    if (
        options.extension == SAFETENSORS
        and not model_files.has_weights(folder, SAFETENSORS)
        and model_files.has_weights(folder, ".bin")
    ):
        model_files.check_model(folder, ".bin")
        _require_conversion(model_id, options)
        return convert_folder(folder)
    model_files.check_model(folder, options.extension)
    return folder


def _is_gguf(names: Sequence[str], options: _ResolveOptions) -> bool:
    """Whether the weights are GGUF files, and no others are there."""
    extensions = {SAFETENSORS, ".bin", options.extension}
    others = any(model_files.weight_files(names, extension)[0] for extension in extensions - {GGUF})
    return not others and any(map(is_model_file, names))


def _require_no_tokenizer(model_id: str, options: _ResolveOptions) -> None:
    if options.tokenizer is not None:
        raise ConfigError(
            f"--tokenizer-name applies to GGUF files, and {model_id} is a checkpoint of another "
            "format",
            "leave it out",
        )


def _from_hub(named: str, revision: str | None, options: _ResolveOptions) -> LocalModel:
    hub = HubEnvironment.read()
    model_id, tag = split_tag(named)
    try:
        repository = fetch_repository(model_id, revision, hub)
    except OfflineError as error:
        found = _from_cache(model_id, tag, revision, hub, options, error)
        return replace(found, model_id=named)
    names = list(repository.files)
    if tag is not None or (_is_gguf(names, options) and not model_files.is_adapter(names)):

        def fetch(groups: tuple[tuple[str, ...], ...]) -> Path:
            return download(repository, groups, hub, options.progress)

        path = gguf_model.from_repository(repository, tag, fetch, options.tokenizer)
        return LocalModel(path, named, repository.commit)
    _require_no_tokenizer(named, options)
    if model_files.is_adapter(names):
        chosen = model_files.select_adapter_files(names)
        folder = _download(repository, chosen, hub, options)
        model_files.check_adapter(folder)
        path = _adapter(folder, model_id, repository.commit, options)
        return LocalModel(path, model_id, repository.commit)
    return LocalModel(_model(repository, hub, options), model_id, repository.commit)


def _model(repository: Repository, hub: HubEnvironment, options: _ResolveOptions) -> Path:
    """Download a model, and convert its weights if they are pickles only."""
    names = list(repository.files)
    chosen = model_files.select_files(names, options.extension, options.trust_remote_code)
    if not options.weights:
        return _download(repository, replace(chosen, weights=()), hub, options)
    if chosen.weights:
        folder = _download(repository, chosen, hub, options)
        model_files.check_model(folder, options.extension)
        return folder
    pickles = model_files.select_files(names, ".bin", options.trust_remote_code)
    if options.extension != SAFETENSORS or not pickles.weights:
        raise model_files.missing_weights_error(repository.model_id, options.extension, names)
    _require_conversion(repository.model_id, options)
    snapshot = RepoCache(hub.cache, repository.model_id).snapshot(repository.commit)
    if model_files.is_complete(snapshot, SAFETENSORS):
        logger.info("%s: converted earlier", repository.model_id)
        _download(repository, chosen, hub, options)
        return snapshot
    return convert_folder(_download(repository, pickles, hub, options))


def _download(
    repository: Repository,
    chosen: model_files.FileSelection,
    hub: HubEnvironment,
    options: _ResolveOptions,
) -> Path:
    for name, why in sorted(chosen.skipped.items()):
        logger.debug("%s: skipped, %s", name, why)
    return download(repository, (chosen.small, chosen.weights), hub, options.progress)


def _from_cache(
    model_id: str,
    tag: str | None,
    revision: str | None,
    hub: HubEnvironment,
    options: _ResolveOptions,
    error: OfflineError,
) -> LocalModel:
    """Use an earlier download if it is complete; else raise ``error``."""
    cache = RepoCache(hub.cache, model_id)
    commit = cache.commit_of(revision)
    folder = cache.snapshot(commit) if commit else None
    if commit is None or folder is None or not folder.is_dir():
        raise OfflineError(error.cause, f"{error.remedy}; a folder is ./{model_id}") from error
    if hub.offline:
        logger.info("%s: offline, using the cached snapshot %s", model_id, commit)
    else:
        logger.warning("%s; using the cached snapshot %s of %s", error.cause, commit, model_id)
    names = model_files.file_names(folder)
    gguf_names = gguf_model.names_of(folder)
    if tag is not None or _is_gguf([*names, *gguf_names], options):
        try:
            path = gguf_model.from_folder(folder, tag, options.tokenizer)
        except (ModelNotFoundError, CheckpointError):  # of the repository, not all files are here
            raise error from None
        return LocalModel(path, model_id, commit)
    if model_files.is_adapter(names):
        return LocalModel(_adapter(folder, model_id, commit, options), model_id, commit)
    if model_files.is_complete(folder, options.extension) or (
        not options.weights and "config.json" in names
    ):
        return LocalModel(folder, model_id, commit)
    if (
        options.extension == SAFETENSORS
        and options.auto_convert
        and not model_files.has_weights(folder, SAFETENSORS)
        and model_files.is_complete(folder, ".bin")
    ):
        return LocalModel(convert_folder(folder), model_id, commit)
    raise error


def _require_conversion(model_id: str, options: _ResolveOptions) -> None:
    if not options.auto_convert:
        raise ModelError(
            f"{model_id} has .bin weights only, and --no-auto-convert forbids converting them",
            "drop --no-auto-convert, or name a revision with .safetensors weights",
        )


def _adapter(folder: Path, name: str, commit: str, options: _ResolveOptions) -> Path:
    """Merge a PEFT adapter into its base if requested, else return its folder."""
    model_files.check_adapter(folder)
    config = model_files.read_json(folder / model_files.ADAPTER_CONFIG)
    base_id, base_revision = config.get("base_model_name_or_path"), config.get("revision")
    if not options.merge_lora:
        logger.info("%s is an adapter for %s (--merge-lora would merge it)", name, base_id)
        return folder
    if not isinstance(base_id, str) or not base_id:
        raise ModelError(f"{name} does not name its base model (base_model_name_or_path)")
    if is_remote(base_id):  # files do not choose which hosts are asked
        raise ModelError(f"{name} names a URL as its base model, which is refused: {base_id:.200}")
    logger.info("%s is an adapter: its base %s is needed too", name, base_id)
    base = resolve_model(
        base_id,
        revision=base_revision or None,
        trust_remote_code=options.trust_remote_code,
        progress=options.progress,
    )
    key = base.revision[:12] or hashlib.sha256(str(base.path.resolve()).encode()).hexdigest()[:12]
    target = beside_cache("tgi-merged") / name.replace("/", "--") / f"{commit[:12]}-{key}"

    def fill(scratch: Path) -> None:
        size = sum(path.stat().st_size for path in model_files.check_model(base.path, SAFETENSORS))
        require_space(scratch, size, f"merging {name}")
        logger.info("merging %s into %s", name, base_id)
        child_process.run("tgi_cli.hub.merge_lora", folder, base.path, scratch)

    return create_once(target, fill, check_complete)
