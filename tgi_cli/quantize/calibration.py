"""Samples of text, as token ids, that say what inputs a model's layers will see.

Samples are windows of one long stream of tokens, all of one length and none of them padded.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgi_cli import demo
from tgi_cli.errors import ConfigError, HubError, ModelError, ModelNotFoundError, OfflineError
from tgi_cli.files import WORKLOAD_BYTES, decode_json, require_file
from tgi_cli.hub.client import HubEnvironment, transport_errors
from tgi_cli.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimitError
from tgi_cli.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEFAULT = "wikitext2"
"""What is used, if it can be had, where nothing is asked for."""

_ENOUGH = 16
"""Samples that there should be before they are made shorter."""

_SHORTEST = 128
_TEXT_KEYS = ("text", "content", "prompt", "instruction", "question")
_ROLES = {"gpt": "assistant", "system": "system"}
"""Of conversations with ``from`` and ``value``."""

_CHARACTERS = 1 << 25
"""Of text that is read at most."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Samples, and where they come from.

    Attributes:
        ids: int64 [samples, tokens].
        source: for people.
        rest: int64 [windows, tokens], text of the same kind that is in no sample; perhaps none.
    """

    ids: Tensor
    source: str
    rest: Tensor

    @property
    def digest(self) -> str:
        """Differs where the samples do."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def load_calibration(
    folder: Path,
    asked: str | None,
    *,
    samples: int,
    seq_len: int | None,
    seed: int,
    context: int,
    trust_remote_code: bool = False,
) -> Calibration:
    """Draw samples.

    Args:
        folder: of the model, for its tokenizer.
        asked: a file (.txt, .jsonl, .json, .parquet, .gz of these), or a data set of the hub;
            None: wikitext2 if it can be had, else the text that comes with this package.
        samples: as many, or all that there are.
        seq_len: tokens of each; None: 2048, less for a short text or context.
        seed: chooses among the windows.
        context: the model's.

    Raises:
        ConfigError: a file that is not there or cannot be read; a sequence that is longer than
            the context, or than the whole text.
        HubError: the data set cannot be had.
        ModelError: the model has no tokenizer.
    """
    if seq_len is not None and seq_len > context:
        raise ConfigError(f"--seq-len {seq_len} is more than the model's context of {context}")
    tokenizer = Tokenizer.load(folder, trust_remote_code)
    text, source = _text(folder, tokenizer, asked)
    stream = tokenizer.encode(text, add_special_tokens=False)
    length = seq_len or min(2048, context)
    while seq_len is None and length > _SHORTEST and len(stream) < _ENOUGH * length:
        length //= 2
    windows = [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]
    if not windows:
        raise ConfigError(
            f"{source} has {len(stream)} tokens: not one sample of {length}",
            "give a longer text, or a smaller --seq-len",
        )
    order = list(range(len(windows)))
    random.Random(seed).shuffle(order)
    chosen, others = order[:samples], sorted(order[samples:])
    if len(chosen) < samples:
        log.info("%s: %d samples of %d tokens are all there are", source, len(chosen), length)
    return Calibration(
        torch.tensor([windows[index] for index in chosen]),
        source,
        torch.tensor([windows[index] for index in others]).view(-1, length),
    )


def heldout_windows(folder: Path, length: int, trust_remote_code: bool = False) -> Tensor:
    """Windows of the bundled text that none is calibrated with; int64 [windows, length]."""
    tokenizer = Tokenizer.load(folder, trust_remote_code)
    stream = tokenizer.encode(_bundled()[1], add_special_tokens=False)
    windows = [stream[at : at + length] for at in range(0, len(stream) - length + 1, length)]
    return torch.tensor(windows).view(-1, length)


def _text(folder: Path, tokenizer: Tokenizer, asked: str | None) -> tuple[str, str]:
    if asked is None:
        try:
            return _of_hub(folder, tokenizer, DEFAULT), DEFAULT
        except (HubError, ConfigError) as error:
            log.info("calibrating with the bundled text, not with %s: %s", DEFAULT, error.cause)
            return _bundled()[0], "the bundled text"
    path = Path(asked).expanduser()
    if asked == "bundled":
        return _bundled()[0], "the bundled text"
    if path.is_file():
        return _join(_documents(path, folder, tokenizer)), path.name
    if path.suffix in (".txt", ".jsonl", ".json", ".parquet", ".gz") or asked.startswith(
        (".", "/")
    ):
        raise ConfigError(f"--calibration {asked}: there is no such file")
    return _of_hub(folder, tokenizer, asked), asked


def _bundled() -> tuple[str, str]:
    """The text that comes with this package: three quarters of it, and the rest."""
    text = demo.heldout_text()
    parts = text.split("\n\n")
    first = [part for index, part in enumerate(parts) if index % 64 < 48]
    return "\n\n".join(first), "\n\n".join(
        part for index, part in enumerate(parts) if index % 64 >= 48
    )


def _of_hub(folder: Path, tokenizer: Tokenizer, name: str) -> str:
    return _join(
        each for file in fetch_dataset(name) for each in _documents(file, folder, tokenizer)
    )


def _join(documents: Iterator[str]) -> str:
    found: list[str] = []
    size = 0
    for document in documents:
        found.append(document)
        size += len(document)
        if size > _CHARACTERS:
            break
    return "\n\n".join(found)


def _documents(path: Path, folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """The texts of a file.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    try:
        if kind == ".parquet":
            rows = _parquet(path)
        elif kind in (".jsonl", ".json"):
            rows = _json(path)
        else:
            yield _read(path)
            return
        chat = _chat(folder, tokenizer)
        for row in rows:
            yield _of_row(row, path, chat)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> str:
    require_file(path, WORKLOAD_BYTES)
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read(_CHARACTERS)
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_CHARACTERS)


def _json(path: Path) -> Iterator[Any]:
    text = _read(path)
    if text.lstrip().startswith("["):
        yield from decode_json(text.encode(), None)
        return
    lines = text.splitlines()
    if len(text) == _CHARACTERS:
        lines.pop()  # cut in the middle
    yield from (decode_json(line.encode()) for line in lines if line.strip())


def _parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            "a parquet file takes pyarrow to be read", "pip install 'tgi-cli[quantize]'"
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _chat(folder: Path, tokenizer: Tokenizer) -> Callable[[list[Mapping[str, Any]]], str]:
    """Renders a conversation as the model's template does, else its turns one after the other."""
    template = ChatTemplate.load(folder, tokenizer)

    def render(turns: list[Mapping[str, Any]]) -> str:
        messages = [
            {
                "role": turn.get("role") or _ROLES.get(str(turn.get("from")), "user"),
                "content": str(turn.get("content", turn.get("value", ""))),
            }
            for turn in turns
        ]
        if template is not None:
            try:
                return template.render(
                    messages, continue_final_message=False, add_generation_prompt=False
                )
            except ChatTemplateLimitError as error:  # it would again, for each of thousands
                raise ModelError(str(error), "mend the model's chat template") from error
            except ChatTemplateError as error:
                log.debug("a conversation does not fit the model's chat template: %s", error)
        return "\n".join(message["content"] for message in messages)

    return render


def _of_row(row: Any, path: Path, chat: Callable[[list[Mapping[str, Any]]], str]) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        for key in ("messages", "conversations", "conversation"):
            turns = row.get(key)
            if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
                return chat(turns)
        for key in _TEXT_KEYS:
            if isinstance(row.get(key), str):
                return str(row[key])
        strings = [value for value in row.values() if isinstance(value, str)]
        if strings:
            return max(strings, key=len)
    raise ConfigError(
        f"{path.name} has a row without text", "rows want a field 'text', or 'messages'"
    )


log = logging.getLogger(__name__)

_KNOWN = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "c4": ("allenai/c4", "en"),
}
"""Names that papers use: data set and subset."""

_KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".json.gz", ".json", ".txt")
_SECONDS = 10
_INSTEAD = "give --calibration a file, or 'bundled'"


def fetch_dataset(name: str) -> list[Path]:
    """One file of the training split of ``ORGANIZATION/NAME`` or ``ORGANIZATION/NAME:SUBSET``.

    It comes from the hub's cache where it is there.

    Raises:
        OfflineError: the hub cannot be reached, or may not be.
        ModelNotFoundError: no such data set.
        ConfigError: it has no files that can be read as text.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub = HubEnvironment.read()
    repository, subset = _KNOWN.get(name) or (*name.split(":", 1), "")[:2]
    if hub.offline:
        raise OfflineError(f"{name} is on the hub, and HF_HUB_OFFLINE is set")
    lost: tuple[type[Exception], ...] = (*transport_errors(), OSError)
    api = HfApi(endpoint=hub.endpoint, token=hub.token or False)
    try:
        info: Any = api.dataset_info(repository, timeout=_SECONDS)
        files = [sibling.rfilename for sibling in info.siblings or ()]
        chosen = choose_file(files, subset)
        if chosen is None:
            raise ConfigError(
                f"the data set {name} has no file of text that could be read",
                f"kinds that can be: {', '.join(_KINDS)}; a subset is NAME:SUBSET",
            )
        log.info("calibration: %s of %s", chosen, repository)
        return [
            Path(
                hf_hub_download(
                    repository,
                    chosen,
                    repo_type="dataset",
                    revision=info.sha,
                    cache_dir=hub.cache,
                    endpoint=hub.endpoint,
                    token=hub.token or False,
                    etag_timeout=_SECONDS,
                )
            )
        ]
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file and no data set {name!r}", "check the path, or its spelling"
        ) from error
    except HFValidationError as error:
        raise ConfigError(
            f"--calibration {name!r} is no file, and no name of a data set"
        ) from error
    except LocalEntryNotFoundError as error:
        raise OfflineError(f"{hub.endpoint} cannot be reached", _INSTEAD) from error
    except HfHubHTTPError as error:
        raise HubError(f"{hub.endpoint} refuses the data set {name}: {error}") from error
    except lost as error:
        raise OfflineError(
            f"{hub.endpoint} cannot be reached ({type(error).__name__})", _INSTEAD
        ) from error


def choose_file(files: list[str], subset: str) -> str | None:
    """Of the subset where one is named: the first file of the training split, else of all."""
    inside = [file for file in files if f"{subset}/" in f"{file}/" or not subset]
    for kind in _KINDS:
        found = sorted(file for file in inside if file.endswith(kind))
        training = [file for file in found if "train" in file.lower()]
        if found:
            return (training or found)[0]
    return None
