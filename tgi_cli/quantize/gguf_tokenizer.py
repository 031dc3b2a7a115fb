"""Metadata of GGUF for a tokenizer of the `tokenizers` library, verified by reading it back."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.pre_tokenizers import PRE_TOKENIZATIONS
from tgi_cli.gguf.reader import GGUFFile
from tgi_cli.gguf.special_tokens import TokenType
from tgi_cli.gguf.tokenizer import make_pre_tokenizer, read_tokenizer
from tgi_cli.gguf.values import Value
from tgi_cli.text.template_files import sources_of
from tgi_cli.text.tokenizer import Tokenizer, read_json

log = logging.getLogger(__name__)

_PREFERRED = ("llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2", "smollm", "dbrx")
"""Names that are tried first, of those with the same patterns."""

_PROBES = (
    "",
    "Hello, world! It's 1234567 o'clock, ISN'T it? We'LL see.",
    "  two  spaces   and\ttabs \n\n\n lines\r\n end  ",
    "ünïcödé Cafe\u0301 naïve Ελληνικά русский العربية हिन्दी ไทย 日本語 中文字 한국어",
    "🤖🏳️‍🌈 ½ ² ٣٤ ⅷ ©™ … — «quoted» “text” !!!??? #$%^&*()_+={}[]|\\:;<>,./~`",
    "def f(x):\n    return x**2 + 3.14e-10  # comment\n\n\nclass A_b:\n\tpass\n",
    "don't'd've 'S 'Re camelCaseWord HTTPServer a1b2c3 \u3000 \u00a0x\u200b",
)


def tokenizer_metadata(folder: Path, num_rows: int) -> dict[str, Value]:
    """The keys ``tokenizer.*`` for the tokenizer and the chat templates of a model folder.

    Args:
        num_rows: rows of the embedding; those without a token get names of their own.

    Raises:
        UnsupportedModelError: GGUF has no form for the tokenizer, or llama.cpp no name for its
            pre-tokenizer.
        ModelError: the folder has no tokenizer, or a file cannot be read.
    """
    tokenizer = Tokenizer.load(folder)
    config = read_json(folder / "tokenizer_config.json")
    backend = json.loads(tokenizer.backend.to_str())
    if backend["model"].get("type") != "BPE":
        raise _unsupported(f"is {backend['model'].get('type')}, not BPE")
    texts = _texts(tokenizer, num_rows)
    byte_level = "ByteLevel" in json.dumps(backend.get("decoder"))
    keys: dict[str, Value] = {"model": "gpt2" if byte_level else "llama"}
    merges = [tuple(_pair(merge)) for merge in backend["model"]["merges"]]
    if byte_level:
        keys["pre"] = _pre_name(tokenizer, bool(backend["model"].get("ignore_merges")))
        keys["merges"] = [" ".join(merge) for merge in merges]
    else:
        ranks = {left + right: -float(rank) for rank, (left, right) in [*enumerate(merges)][::-1]}
        keys["pre"] = "default"
        keys["scores"] = [ranks.get(text, -float(len(merges) + 1)) for text in texts]
        keys["add_space_prefix"] = tokenizer.adds_space
    keys["tokens"] = texts
    keys["token_type"] = [*map(int, _types(tokenizer, backend["model"], texts))]
    keys |= _special(tokenizer, folder, config, texts)
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    _verify(tokenizer, metadata)
    for name, source in sources_of(folder, config).items():
        suffix = "" if name == "default" else f".{name}"
        metadata[f"tokenizer.chat_template{suffix}"] = source
    return metadata


def _texts(tokenizer: Tokenizer, num_rows: int) -> list[str]:
    if tokenizer.vocab_size > num_rows:
        raise _unsupported(f"has {tokenizer.vocab_size} tokens, and the embedding {num_rows}")
    found = (tokenizer.backend.id_to_token(index) for index in range(num_rows))
    return [f"[PAD{index}]" if text is None else text for index, text in enumerate(found)]


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _types(tokenizer: Tokenizer, model: Mapping[str, Any], texts: list[str]) -> Iterator[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    vocabulary = model["vocab"]
    for index, text in enumerate(texts):
        if text == model.get("unk_token"):
            yield TokenType.UNKNOWN
        elif index in added:
            yield TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED
        elif model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
            yield TokenType.BYTE
        else:
            yield TokenType.NORMAL if text in vocabulary else TokenType.UNUSED


def _special(
    tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any], texts: list[str]
) -> dict[str, Value]:
    """Ids of special tokens, and which of them are added to a text."""
    ids = {text: index for index, text in enumerate(texts)}
    keys: dict[str, Value] = {}
    for name, key in (("unk_token", "unknown"), ("pad_token", "padding")):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            keys[f"{key}_token_id"] = ids[token]
    generation = read_json(folder / "generation_config.json")
    model = read_json(folder / "config.json")
    ends: list[int] = [ids[tokenizer.eos_token]] if tokenizer.eos_token in ids else []
    for source in (generation, model):
        stated = source.get("eos_token_id")
        ends += [stated] if isinstance(stated, int) else stated or []
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    keys |= dict(zip(names, dict.fromkeys(ends), strict=False))
    bos = ids.get(tokenizer.bos_token, model.get("bos_token_id"))
    around = tokenizer.encode("a")
    if isinstance(bos, int):
        keys["bos_token_id"] = bos
    keys["add_bos_token"] = bool(around) and around[0] == bos
    keys["add_eos_token"] = bool(around) and bool(ends) and around[-1] == ends[0]
    return keys


def _pre_name(tokenizer: Tokenizer, ignores_merges: bool) -> str:
    """llama.cpp's name of what splits texts: the first one that splits probes alike."""
    backend = tokenizer.backend
    normalized = [_normalized(tokenizer, probe) for probe in _PROBES]
    nfc = normalized != [*_PROBES]
    as_known = normalized == [unicodedata.normalize("NFC", probe) for probe in _PROBES] or not nfc
    if backend.pre_tokenizer is not None and as_known:
        expected = [backend.pre_tokenizer.pre_tokenize_str(probe) for probe in _PROBES]
        for name in dict.fromkeys((*_PREFERRED, *PRE_TOKENIZATIONS)):
            known = PRE_TOKENIZATIONS[name]
            if (known.ignores_merges, known.nfc) == (ignores_merges, nfc):
                split = make_pre_tokenizer(known).pre_tokenize_str
                if [split(probe) for probe in _PROBES] == expected:
                    return name
    raise _unsupported("splits texts in a way that llama.cpp has no name for")


def _verify(tokenizer: Tokenizer, metadata: Mapping[str, Value]) -> None:
    """Require the metadata to give the same ids."""
    made = read_tokenizer(GGUFFile(Path("the new file"), metadata, {}, (), 0))
    added = tokenizer.backend.get_added_tokens_decoder().values()
    special = "a ".join(token.content for token in added)[:10_000]
    for probe in (*_PROBES, special):
        if made.encode(probe).ids != tokenizer.backend.encode(probe).ids:
            if probe != special:
                raise _unsupported(f"gives other ids when it is read from GGUF: {probe[:40]!r}")
            log.warning("texts after special tokens get other ids in GGUF: spaces differ")


def _normalized(tokenizer: Tokenizer, text: str) -> str:
    normalizer = tokenizer.backend.normalizer
    return text if normalizer is None else str(normalizer.normalize_str(text))


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model's tokenizer {what}", "choose another --format, which keeps its tokenizer.json"
    )
