"""GGUF files of a repository or folder: which of them a tag names.

A repository has a model once per quantization: ``ORG/REPO:Q4_K_M`` names one as in llama.cpp,
``ORG/REPO:FILE.gguf`` a file. Large models are split, and may have a folder per quantization.

https://github.com/ggml-org/llama.cpp/blob/master/common/download.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tgi_cli.errors import CheckpointError, ModelError, ModelNotFoundError
from tgi_cli.gguf.reader import MOST_SHARDS, SHARD
from tgi_cli.process.units import format_size

GGUF = ".gguf"

DEFAULT_TAG = "latest"
"""The tag that leaves the choice to the program, as no tag does."""

_PREFERRED = ("Q4_K_M", "Q8_0")
"""What is taken without a tag, as in llama.cpp; else the first file."""

_HOSTS = ("https://", "hf.co/", "huggingface.co/")
_OTHER_PARTS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of file names that mark image encoders, statistics and drafters."""

_QUANTIZATION = re.compile(
    r"(?:^|(?<=[-._/]))((?:UD-)?(?:I?Q[1-8]_[A-Z0-9]+(?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?"
    r"|NVFP4|BF16|FP?16|FP?32))(?=$|[-./])",
    re.IGNORECASE,
)
_MOST_SHOWN = 30


@dataclass(frozen=True, slots=True)
class GGUFVariant:
    """A model in one quantization.

    Attributes:
        tag: such as ``Q4_K_M``; for a file without one, its name.
        names: its files, by their paths; of a split one all parts that are there.
        missing: parts that are not.
    """

    tag: str
    names: tuple[str, ...]
    missing: tuple[str, ...] = ()


def split_tag(model_id: str) -> tuple[str, str | None]:
    """Split ``ORG/REPO:TAG`` into id and tag, which is None without one.

    The host that Ollama writes in front of ids is dropped.

    >>> split_tag("hf.co/org/repo:Q4_K_M")
    ('org/repo', 'Q4_K_M')
    >>> split_tag("org/repo/Q8_0/model.gguf")
    ('org/repo', 'Q8_0/model.gguf')
    """
    name = model_id
    for host in _HOSTS:
        name = name.removeprefix(host)
    name, colon, tag = name.partition(":")
    if colon:
        return name, tag
    parts = name.split("/")
    if name.lower().endswith(GGUF) and len(parts) > 2:
        return "/".join(parts[:2]), "/".join(parts[2:])
    return (name if name != model_id else model_id), None


def is_model_file(name: str) -> bool:
    """Whether a path is a GGUF file with a language model's weights, by its name."""
    base = name.rpartition("/")[2].lower()
    return base.endswith(GGUF) and not any(part in base for part in _OTHER_PARTS)


def image_encoders(names: Iterable[str]) -> list[str]:
    """The GGUF files with image encoders."""
    return sorted(
        name for name in names if name.lower().endswith(GGUF) and "mmproj" in name.lower()
    )


def gguf_variants(names: Iterable[str]) -> list[GGUFVariant]:
    """The models among the files of a repository, by path."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(filter(is_model_file, names)):
        folder, _, base = name.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        match = SHARD.fullmatch(base)
        count = int(match["count"]) if match else 0
        split = match is not None and count <= MOST_SHARDS
        key = (prefix + match["prefix"], count) if match and split else (name, 0)
        groups.setdefault(key, []).append(name)
    variants = []
    for (stem, count), found in groups.items():
        suffix = found[0][-len(GGUF) :]
        parts = [f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]
        missing = tuple(part for part in parts if part not in found)
        variants.append(GGUFVariant(_tag_of(stem), tuple(found), missing))
    return variants


def choose_variant(
    source: str,
    names: Iterable[str],
    tag: str | None,
    size_of: Callable[[str], int],
) -> GGUFVariant:
    """The model that a tag or a file name stands for; without one Q4_K_M, Q8_0 or the first.

    Args:
        source: the repository or folder, for messages.
        names: its files.
        size_of: bytes of a file.

    Raises:
        ModelNotFoundError: there is none; the message lists the tags with their sizes.
        ModelError: the tag stands for several.
        CheckpointError: parts of it are missing.
    """
    variants = gguf_variants(names)
    if not variants:
        raise ModelNotFoundError(
            f"{source} has no GGUF files with a language model", "name another repository"
        )
    if tag is None or tag.lower() == DEFAULT_TAG:
        found = next(filter(None, (_matching(variants, each) for each in _PREFERRED)), variants)[:1]
    else:
        found = _matching(variants, tag)
    if not found:
        raise ModelNotFoundError(
            f"{source} has no GGUF file for {tag!r:.100}", f"name one of {_list(variants, size_of)}"
        )
    if len(found) > 1:
        files = ", ".join(variant.names[0] for variant in found[:_MOST_SHOWN])
        raise ModelError(
            f"{source} has {len(found)} GGUF models for {tag!r:.100}",
            f"name a file after the colon: {files}",
        )
    (variant,) = found
    if variant.missing:
        shown = ", ".join(variant.missing[:5])
        more = len(variant.missing) - 5
        raise CheckpointError(
            f"{source} lacks {shown}" + (f" and {more} more" if more > 0 else ""),
            "copy or download the missing parts",
        )
    return variant


def _tag_of(stem: str) -> str:
    """The quantization in a path, without the numbers of parts; else the file's name."""
    stem = stem[: -len(GGUF)] if stem.lower().endswith(GGUF) else stem
    found = _QUANTIZATION.findall(stem)
    return found[-1] if found else stem.rpartition("/")[2]


def _matching(variants: Sequence[GGUFVariant], tag: str) -> list[GGUFVariant]:
    """The files that a tag names: by path, file name, quantization, or a part of a path."""
    wanted = tag.lower()
    file = wanted if wanted.endswith(GGUF) else wanted + GGUF
    part = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}[-./]")
    rules: tuple[Callable[[GGUFVariant], bool], ...] = (
        lambda variant: file in map(str.lower, variant.names),
        lambda variant: file in (name.lower().rpartition("/")[2] for name in variant.names),
        lambda variant: variant.tag.lower() == wanted,
        lambda variant: part.search(variant.names[0].lower()) is not None,
    )
    for rule in rules:
        found = [variant for variant in variants if rule(variant)]
        if found:
            depth = min(variant.names[0].count("/") for variant in found)
            return [variant for variant in found if variant.names[0].count("/") == depth]
    return []


def _list(variants: Sequence[GGUFVariant], size_of: Callable[[str], int]) -> str:
    """The tags with their sizes."""
    sizes: dict[str, int] = {}
    for variant in variants:
        sizes.setdefault(variant.tag, sum(map(size_of, variant.names)))
    shown = [f"{tag} ({format_size(size)})" for tag, size in [*sizes.items()][:_MOST_SHOWN]]
    return ", ".join(shown) + (", ..." if len(sizes) > _MOST_SHOWN else "")
