"""Writes the folder that a GGUF file is served from: links to it, and the files it replaces."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgi_cli import files
from tgi_cli.errors import CorruptFileError, ModelError, no_panic
from tgi_cli.gguf.chat_template import as_config, chat_templates
from tgi_cli.gguf.model_config import model_config
from tgi_cli.gguf.reader import GGUFFile
from tgi_cli.gguf.special_tokens import GGUFTokens, TokenType
from tgi_cli.gguf.tokenizer import read_tokenizer, tokenizer_config

logger = logging.getLogger(__name__)

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"

_VOCABULARIES = (TOKENIZER_JSON, "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""Files that a tokenizer can be made from."""

_COMPANIONS = frozenset(
    {
        *_VOCABULARIES,
        *(TOKENIZER_CONFIG, TEMPLATE, "chat_template.json", "merges.txt"),
        *("special_tokens_map.json", "added_tokens.json"),
    }
)

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Names in generation_config.json by keys of ``general.sampling``."""

_COMPARED = 2000
"""Number of tokens by which a tokenizer.json is recognized as the model's."""


def companion_names(folder: Path) -> list[str]:
    """The files of a folder that belong to a tokenizer, or to how a model is used."""
    wanted = _COMPANIONS | {GENERATION_CONFIG}
    return sorted(path.name for path in folder.iterdir() if path.name in wanted and path.is_file())


def write_model_folder(
    file: GGUFFile, target: Path, companions: Path | None = None, tokenizer: Path | None = None
) -> None:
    """Write the folder's files.

    Args:
        file: file of the model.
        target: an empty folder.
        companions: a folder whose tokenizer, chat template and generation_config.json take
            precedence over the metadata.
        tokenizer: a folder with the tokenizer to use instead of both.

    Raises:
        ModelError: the model cannot be served, or has no tokenizer that can be read.
        CorruptFileError: the metadata contradict each other, or the tokenizer of ``companions`` is
            another model's.
        OSError: a file cannot be written.
    """
    for shard in file.shards:
        (target / shard.with_suffix(".gguf").name).symlink_to(shard.resolve())
    config_json = model_config(file)
    _require_rows(file, config_json["vocab_size"])
    _write_json(target / "config.json", config_json)
    source = tokenizer or companions
    given = set(companion_names(source)) if source is not None else set()
    if tokenizer is not None and not given & set(_VOCABULARIES):
        raise ModelError(
            f"there is no tokenizer in {tokenizer}", "name another by --tokenizer-name"
        )
    for name in given - {GENERATION_CONFIG, TOKENIZER_CONFIG}:
        assert source is not None
        (target / name).symlink_to((source / name).resolve())
    config = {} if source is None else _read_json(source / TOKENIZER_CONFIG)
    if given & set(_VOCABULARIES):
        if tokenizer is None and TOKENIZER_JSON in given:
            _require_same_vocabulary(file, target / TOKENIZER_JSON)
    else:
        (target / TOKENIZER_JSON).write_text(read_tokenizer(file).to_str())
        config = tokenizer_config(file) | config
    templates = chat_templates(file)
    own_template = given & {TEMPLATE, "chat_template.json"} or config.get("chat_template")
    if templates and not own_template:
        config = dict(config) | {"chat_template": as_config(templates)}
    _write_json(target / TOKENIZER_CONFIG, config)
    own = {} if companions is None else _read_json(companions / GENERATION_CONFIG)
    _write_json(target / GENERATION_CONFIG, generation_config(file) | own)


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of generation_config.json: tokens that end an answer, and sampling parameters.

    Raises:
        CorruptFileError: a key has another type than its own.
    """
    config: dict[str, Any] = {}
    try:
        tokens = GGUFTokens.read(file)
    except ModelError:  # the tokenizer is another folder's, and so are the tokens
        tokens = None
    if tokens is not None:
        if tokens.ends:
            config["eos_token_id"] = list(tokens.ends)
        config |= {
            name: index
            for name, index in (("bos_token_id", tokens.bos), ("pad_token_id", tokens.padding))
            if index is not None
        }
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if math.isfinite(value):
            config[name] = value
    return config


def _require_rows(file: GGUFFile, rows: int) -> None:
    """Require an embedding for each token: ids beyond it could not be served."""
    count = len(file.values("tokenizer.ggml.tokens", str))
    if count > rows:
        raise CorruptFileError(
            f"{file.path} has {count} tokens, and embeddings of {rows}",
            "download another file of the model",
        )


def _require_same_vocabulary(file: GGUFFile, path: Path) -> None:
    """Require a tokenizer.json to have the file's tokens, as far as it names any."""
    from tokenizers import Tokenizer

    try:
        tokens = GGUFTokens.read(file)
    except ModelError:
        return
    try:
        files.require_tokenizer(path)
        with no_panic():
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any unreadable file
        raise ModelError(f"{path.resolve()} cannot be read: {error}", "fetch it again") from error
    step = max(1, len(tokens.texts) // _COMPARED)
    for index in range(0, len(tokens.texts), step):
        found = tokenizer.id_to_token(index)
        if tokens.types[index] == TokenType.NORMAL and found != tokens.texts[index]:
            raise CorruptFileError(
                f"{path.resolve()} is another model's than {file.path}: token {index} is "
                f"{found!r:.60} and {tokens.texts[index]!r:.60}",
                "move it away, or name the tokenizer by --tokenizer-name",
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = files.read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "fetch it again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object", "fetch it again")
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
