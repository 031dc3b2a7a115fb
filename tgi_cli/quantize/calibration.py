"""Calibration samples: text as token ids, on which the inputs of a model's layers are observed.

Samples are windows of one long stream of tokens, all of one length and without padding.
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
from tgi_cli.process.installation import install_command
from tgi_cli.quantize.options import QuantizeOptions
from tgi_cli.text.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateLimitError
from tgi_cli.text.conversation import adapt
from tgi_cli.text.template_traits import TemplateTraits
from tgi_cli.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEFAULT = "wikitext2"
"""Data set that is used by default, if it is available."""

BUNDLED = "the bundled text"
"""Source of samples from the text in this package."""

_MIN_SAMPLES = 16
"""Samples below which the default length is halved."""

_MIN_LENGTH = 128
"""Tokens below which the default length is not halved."""

_MAX_CHARACTERS = 1 << 25
"""Characters of text that are read at most."""

_TEXT_KEYS = ("text", "content", "prompt", "instruction", "question")
_ROLES = {"gpt": "assistant", "system": "system"}
"""Roles of conversations with ``from`` and ``value``."""

_DATASETS = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "c4": ("allenai/c4", "en"),
}
"""Data set and subset by the names that papers use."""

_EXTENSIONS = (".parquet", ".jsonl", ".jsonl.gz", ".json.gz", ".json", ".txt")
_HUB_TIMEOUT_SECONDS = 10
_OFFLINE_REMEDY = "give --calibration a file, or 'bundled'"

_Render = Callable[[list[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Samples and their source.

    Attributes:
        ids: int64 [samples, tokens].
        source: name of the text, for people.
        rest: int64 [windows, tokens], unused text of the same source; may be empty.
    """

    ids: Tensor
    source: str
    rest: Tensor

    @property
    def digest(self) -> str:
        """Hash of the samples."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def load_calibration(folder: Path, options: QuantizeOptions, *, context: int) -> Calibration:
    """Draw samples as ``calibration``, ``samples``, ``seq_len`` and ``seed`` of the options ask.

    The text is a file (.txt, .jsonl, .json, .parquet, .gz of these) or a data set on the hub.
    Default: wikitext2 if available, else the bundled text.

    Args:
        folder: the model's, for its tokenizer.
        context: the model's longest sequence.

    Raises:
        ConfigError: a file is missing or unreadable; a sample would be longer than the context,
            or than the whole text.
        HubError: the data set is unavailable.
        ModelError: the model has no tokenizer.
    """
    seq_len, count = options.seq_len, options.samples
    if seq_len is not None and seq_len > context:
        raise ConfigError(f"--seq-len {seq_len} is more than the model's context of {context}")
    tokenizer = Tokenizer.load(folder, options.trust_remote_code)
    text, source = _load_text(folder, tokenizer, options.calibration)
    stream = tokenizer.encode(text, add_special_tokens=False)
    length = seq_len or min(2048, context)
    while seq_len is None and length > _MIN_LENGTH and len(stream) < _MIN_SAMPLES * length:
        length //= 2
    windows = _split(stream, length)
    if not len(windows):
        raise ConfigError(
            f"{source} has {len(stream)} tokens: not one sample of {length}",
            "give a longer text, or a smaller --seq-len",
        )
    order = list(range(len(windows)))
    random.Random(options.seed).shuffle(order)
    if len(windows) < count:
        log.info("%s: only %d samples of %d tokens are available", source, len(windows), length)
    return Calibration(windows[order[:count]], source, windows[sorted(order[count:])])


def heldout_windows(folder: Path, length: int, trust_remote_code: bool = False) -> Tensor:
    """Windows of the bundled text that no calibration uses; int64 [windows, length]."""
    tokenizer = Tokenizer.load(folder, trust_remote_code)
    return _split(tokenizer.encode(_bundled_parts()[1], add_special_tokens=False), length)


def _split(stream: list[int], length: int) -> Tensor:
    whole = len(stream) // length * length
    return torch.tensor(stream[:whole], dtype=torch.int64).view(-1, length)


def _load_text(folder: Path, tokenizer: Tokenizer, requested: str | None) -> tuple[str, str]:
    """The text and its source."""

    def read(files: list[Path]) -> str:
        return _join(each for file in files for each in _documents(file, folder, tokenizer))

    if requested is None:
        try:
            return read(fetch_dataset(DEFAULT)), DEFAULT
        except (HubError, ConfigError) as error:
            log.info("calibrating with %s, not with %s: %s", BUNDLED, DEFAULT, error.cause)
            return _bundled_parts()[0], BUNDLED
    if requested == "bundled":
        return _bundled_parts()[0], BUNDLED
    path = Path(requested).expanduser()
    if path.is_file():
        return read([path]), path.name
    if path.suffix in (".txt", ".jsonl", ".json", ".parquet", ".gz") or requested.startswith(
        (".", "/")
    ):
        raise ConfigError(f"--calibration {requested}: there is no such file")
    return read(fetch_dataset(requested)), requested


def _bundled_parts() -> tuple[str, str]:
    """Three quarters of the bundled text for calibration, and the rest for evaluation."""
    parts = demo.heldout_text().split("\n\n")
    calibration = [part for index, part in enumerate(parts) if index % 64 < 48]
    evaluation = [part for index, part in enumerate(parts) if index % 64 >= 48]
    return "\n\n".join(calibration), "\n\n".join(evaluation)


def fetch_dataset(name: str) -> list[Path]:
    """Download a file of the training split of ``ORGANIZATION/NAME[:SUBSET]``, through the cache.

    Raises:
        OfflineError: the hub cannot be reached, or must not be.
        ModelNotFoundError: the data set does not exist.
        ConfigError: the data set has no files of text.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub = HubEnvironment.read()
    repository, subset = _DATASETS.get(name) or (*name.split(":", 1), "")[:2]
    if hub.offline:
        raise OfflineError(f"{name} is on the hub, and HF_HUB_OFFLINE is set")
    connection_errors: tuple[type[Exception], ...] = (*transport_errors(), OSError)
    api = HfApi(endpoint=hub.endpoint, token=hub.token or False)
    try:
        info: Any = api.dataset_info(repository, timeout=_HUB_TIMEOUT_SECONDS)
        chosen = choose_file([sibling.rfilename for sibling in info.siblings or ()], subset)
        if chosen is None:
            raise ConfigError(
                f"the data set {name} has no readable file of text",
                f"readable are {', '.join(_EXTENSIONS)}; a subset is NAME:SUBSET",
            )
        log.info("calibration: %s of %s", chosen, repository)
        path = hf_hub_download(
            repository,
            chosen,
            repo_type="dataset",
            revision=info.sha,
            cache_dir=hub.cache,
            endpoint=hub.endpoint,
            token=hub.token or False,
            etag_timeout=_HUB_TIMEOUT_SECONDS,
        )
        return [Path(path)]
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file and no data set {name!r}", "check the path, or its spelling"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"--calibration {name!r} is neither a file nor a data set") from error
    except LocalEntryNotFoundError as error:
        raise OfflineError(f"{hub.endpoint} cannot be reached", _OFFLINE_REMEDY) from error
    except HfHubHTTPError as error:
        raise HubError(f"{hub.endpoint} refuses the data set {name}: {error}") from error
    except connection_errors as error:
        raise OfflineError(
            f"{hub.endpoint} cannot be reached ({type(error).__name__})", _OFFLINE_REMEDY
        ) from error


def choose_file(files: list[str], subset: str) -> str | None:
    """The first file of the training split, of ``subset`` unless it is empty."""
    inside = [file for file in files if f"{subset}/" in f"{file}/" or not subset]
    for extension in _EXTENSIONS:
        found = sorted(file for file in inside if file.endswith(extension))
        training = [file for file in found if "train" in file.lower()]
        if found:
            return (training or found)[0]
    return None


def _join(documents: Iterator[str]) -> str:
    found: list[str] = []
    size = 0
    for document in documents:
        found.append(document)
        size += len(document)
        if size > _MAX_CHARACTERS:
            break
    return "\n\n".join(found)


def _documents(path: Path, folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Iterate over the texts of a file; ConfigError if it is unreadable or has none."""
    extension = Path(path.name.removesuffix(".gz")).suffix
    try:
        if extension == ".parquet":
            rows = _parquet_rows(path)
        elif extension in (".jsonl", ".json"):
            rows = _json_rows(path)
        else:
            yield _read(path)
            return
        render = _conversation_renderer(folder, tokenizer)
        for row in rows:
            yield _row_text(row, path, render)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read(path: Path) -> str:
    require_file(path, WORKLOAD_BYTES)
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read(_MAX_CHARACTERS)
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_CHARACTERS)


def _json_rows(path: Path) -> Iterator[Any]:
    text = _read(path)
    if text.lstrip().startswith("["):
        yield from decode_json(text.encode(), None)
        return
    lines = text.splitlines()
    if len(text) == _MAX_CHARACTERS:
        lines.pop()  # cut off in the middle
    yield from (decode_json(line.encode()) for line in lines if line.strip())


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            "reading parquet files requires pyarrow", install_command("quantize")
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _conversation_renderer(folder: Path, tokenizer: Tokenizer) -> _Render:
    """A function that applies the model's chat template, or joins the messages without one."""
    template = ChatTemplate.load(folder, tokenizer)
    traits = TemplateTraits() if template is None else template.traits(False)

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
                    adapt(messages, traits),
                    continue_final_message=False,
                    add_generation_prompt=False,
                )
            except ChatTemplateLimitError as error:  # it would recur for each of thousands
                raise ModelError(str(error), "correct the model's chat template") from error
            except ChatTemplateError as error:
                log.debug("a conversation does not fit the model's chat template: %s", error)
        return "\n".join(message["content"] for message in messages)

    return render


def _row_text(row: Any, path: Path, render: _Render) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        for key in ("messages", "conversations", "conversation"):
            turns = row.get(key)
            if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
                return render(turns)
        for key in _TEXT_KEYS:
            if isinstance(row.get(key), str):
                return str(row[key])
        strings = [value for value in row.values() if isinstance(value, str)]
        if strings:
            return max(strings, key=len)
    raise ConfigError(
        f"{path.name} has a row without text", "rows need a field 'text', or 'messages'"
    )
