"""Which files of a repository serving needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

CONFIG_FILES = frozenset({"config.json", "generation_config.json"})
TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
PROCESSOR_FILES = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
QUANTIZATION_FILES = frozenset({"quantize_config.json", "quant_config.json"})
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_SMALL = CONFIG_FILES | TOKENIZER_FILES | PROCESSOR_FILES | QUANTIZATION_FILES
_NOT_WEIGHTS = ("arguments", "args", "training")
"""Parts of names that TGI takes for leftovers of training, not weights."""

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<rest>\..+)$")


@dataclass(frozen=True)
class Selection:
    """The files to have, in the order to fetch them: ``small`` ones first, then ``weights``.

    ``skipped`` says of every other file why it stays where it is.
    """

    small: tuple[str, ...]
    weights: tuple[str, ...]
    skipped: dict[str, str]


def shard_family(name: str) -> tuple[str, int] | None:
    """(name with the number taken out, number of shards) of ``x-00001-of-00002.y``, else None."""
    if match := _SHARD.match(name):
        return f"{match['stem']}-of-{match['count']}{match['rest']}", int(match["count"])
    return None


def _stem(extension: str) -> str:
    return "pytorch_model" if extension == ".bin" else "model"


def index_of(extension: str) -> str:
    """The name of the index of sharded weights with this extension."""
    return f"{_stem(extension)}{extension}.index.json"


def is_weight_file(name: str, extension: str) -> bool:
    """Whether a name is a model's weights: in the repository's root and no leftover of training.

    >>> is_weight_file("model.safetensors", ".safetensors")
    True
    >>> is_weight_file("training_args.bin", ".bin")
    False
    """
    return (
        name.endswith(extension)
        and "/" not in name
        and not any(word in name for word in _NOT_WEIGHTS)
        and not name.startswith(("adapter_model", "optimizer", "scheduler"))
    )


def weight_files(names: Iterable[str], extension: str) -> tuple[list[str], dict[str, str]]:
    """The weights among ``names``, and for every other file with the extension why it is none.

    A repository may hold the same weights several times: as Mistral's ``consolidated*``, as a
    variant (``model.fp16.safetensors``), or both whole and in shards. One copy is taken.
    """
    candidates = [name for name in names if is_weight_file(name, extension)]
    skipped = {
        name: "not the model's weights"
        for name in names
        if name.endswith(extension) and name not in candidates
    }
    stem = re.escape(_stem(extension))
    shard = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}{re.escape(extension)}")
    variant = re.compile(rf"{stem}(\.|-\d{{5}}-of-\d{{5}}\.)")
    whole = _stem(extension) + extension
    plain = {name for name in candidates if name == whole or shard.fullmatch(name)}
    kept = []
    for name in candidates:
        if plain and name.startswith("consolidated"):
            skipped[name] = "the same weights once more"
        elif plain and name not in plain and variant.match(name):
            skipped[name] = "a variant of the same weights"
        elif whole in plain and name in plain and name != whole:
            skipped[name] = f"the same weights as {whole}"
        else:
            kept.append(name)
    return sorted(kept), skipped


def select(names: Iterable[str], extension: str, trust_remote_code: bool) -> Selection:
    """Choose from a repository's file names; weights with ``extension`` may be none at all."""
    names = list(names)
    weights, skipped = weight_files(names, extension)
    small = []
    for name in names:
        if name in weights or name in skipped:
            continue
        if name.endswith(".py"):
            if trust_remote_code:
                small.append(name)
            else:
                skipped[name] = "code, and --trust-remote-code was not given"
        elif (
            name in _SMALL
            or name == index_of(extension)
            or name == ADAPTER_CONFIG
            or (name.endswith((".model", ".tiktoken")) and "/" not in name)
            or (name.startswith("additional_chat_templates/") and name.endswith(".jinja"))
        ):
            small.append(name)
        else:
            skipped[name] = "not needed to serve"
    return Selection(tuple(sorted(small)), tuple(weights), skipped)


def select_adapter(names: Iterable[str]) -> Selection:
    """Choose the files of a PEFT adapter's repository: its weights, its tokenizer, no base."""
    names = list(names)
    weights = [name for name in ADAPTER_WEIGHTS if name in names][:1]
    small = [name for name in names if name in _SMALL or name == ADAPTER_CONFIG]
    small += [name for name in names if name.endswith(".model") and "/" not in name]
    taken = {*weights, *small}
    skipped = {name: "not needed to serve" for name in names if name not in taken}
    return Selection(tuple(sorted(small)), tuple(weights), skipped)


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a repository or folder is a PEFT adapter: its weights and no model beside them."""
    names = set(names)
    return ADAPTER_CONFIG in names and not any(
        is_weight_file(name, extension) for name in names for extension in (".safetensors", ".bin")
    )
