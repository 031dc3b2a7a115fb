"""Text to token ids and back.

Based on the `tokenizers` library (https://huggingface.co/docs/tokenizers). transformers, which
imports torch, is needed only for folders without a ``tokenizer.json``, in a process of its own, and
not for all of these.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tgi_cli.byte_level import byte_level_bytes, fallback_byte
from tgi_cli.errors import LibraryPanicError, ModelError, no_panic
from tgi_cli.files import read_json as read_bounded
from tgi_cli.files import require_tokenizer
from tgi_cli.process.spawn import child_environment, module_command
from tgi_cli.text.spans import Spans
from tgi_cli.text.translation_tokenizers import translation_tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_CONVERT_SECONDS = 300
_CONVERTIBLE = ("*.model", "vocab*", "tekken.json", "*.tiktoken", "tokeni*.py")
"""Files of tokenizers that transformers can convert, or that have code of their own."""
_SPACE = "\u2581"
"""The space in SentencePiece vocabularies."""
_CACHED_IDS = 32_768
"""Ids whose texts and bytes are cached: reports of log-probabilities repeat them. 10 MB at most."""


class Tokenizer:
    """The tokenizer of one model, without torch.

    Attributes:
        backend: The compiled tokenizer.
        added_ids: Added tokens; no other token holds a part of their texts.
        special_ids: Special tokens, which are left out of generated text.
        bos_token: Its text in chat templates; empty if there is none.
        eos_token: Its text in chat templates; empty if there is none.
        vocab_size: Number of ids, including added tokens.
        adds_space: Whether it puts a space in front of a text, as SentencePiece does.
        surface: Text of a single token, including special tokens and leading spaces.
        token_bytes: The bytes that a token adds to the text, even if part of a character.
    """

    def __init__(self, backend: Backend, config: dict[str, Any] | None = None) -> None:
        config = config or {}
        backend.no_padding()
        backend.no_truncation()
        _add_missing(backend, config)
        self.backend = backend
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        special = {index for index, token in added.items() if token.special}
        for name in _NAMED:
            index = backend.token_to_id(_content(config.get(name)))
            if index is not None:
                special.add(index)
        self.special_ids = frozenset(special)
        first = backend.encode("a", add_special_tokens=False).tokens[:1]
        self.adds_space = bool(first) and first[0].startswith(_SPACE)
        self.surface = lru_cache(_CACHED_IDS)(self._surface)
        self.token_bytes = lru_cache(_CACHED_IDS)(self._token_bytes)
        decoder: Any = backend.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @classmethod
    def load(cls, model_path: Path, trust_remote_code: bool = False) -> Tokenizer:
        """Load the tokenizer of a model folder, which transformers converts if necessary.

        Those of Marian and M2M100 are converted here.

        Raises:
            ModelError: The folder has no tokenizer, or a file cannot be read.
        """
        config = read_json(model_path / "tokenizer_config.json")
        path = model_path / "tokenizer.json"
        if path.is_file():
            return cls(_read_backend(path), config)
        backend = translation_tokenizer(model_path, config)
        if backend is not None:
            return cls(backend, config)
        if not any(found for kind in _CONVERTIBLE for found in model_path.glob(kind)):
            raise ModelError(
                f"no tokenizer in {model_path}", "put the model's tokenizer.json into the folder"
            )
        with tempfile.TemporaryDirectory(prefix="tgi-tokenizer-") as folder:
            target = Path(folder) / "tokenizer.json"
            command = module_command("tgi_cli.text.convert", model_path, target)
            if trust_remote_code:
                command.append("--trust-remote-code")
            try:
                result = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=_CONVERT_SECONDS,
                    env=child_environment(),
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise ModelError(
                    f"converting the tokenizer of {model_path} took over {_CONVERT_SECONDS} s"
                ) from error
            if result.returncode != 0 or not target.is_file():
                lines = result.stderr.strip().splitlines() or ["unknown cause"]
                raise ModelError(
                    f"no tokenizer.json in {model_path} and its tokenizer cannot be converted: "
                    f"{lines[-1]}",
                    "put the model's tokenizer.json into the folder",
                )
            return cls(_read_backend(target), config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by default with the special tokens of the post-processor."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of several texts; see :meth:`encode`."""
        # The batch call releases the interpreter lock and computes no offsets.
        with _encoding():
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def spans(self, text: str, add_special_tokens: bool = True) -> Spans:
        """Token ids of a text, each with the start and the end of its characters."""
        # The batch call releases the interpreter lock.
        with _encoding():
            encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return Spans(encoding.ids, encoding.offsets)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def _surface(self, token_id: int) -> str:
        text = self.backend.decode([token_id], skip_special_tokens=False)
        if not self._byte_level and not text.startswith(" "):
            # Decoders drop the space that marks the first word of a text.
            token = self.backend.id_to_token(token_id) or ""
            return " " + text if token.startswith(_SPACE) else text
        return text

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return token.encode()
        if self._byte_level:
            exact = byte_level_bytes(token)
            if exact is not None:
                return exact
        else:
            byte = fallback_byte(token)
            if byte is not None:
                return byte
        return self.surface(token_id).encode()


@contextmanager
def _encoding() -> Iterator[None]:
    """Turn a panic of the library into a ModelError.

    Regular expressions in tokenizer.json may backtrack endlessly; the library panics after ten
    million steps (0.7 s). https://github.com/kkos/oniguruma, doc/API
    """
    try:
        with no_panic():
            yield
    except LibraryPanicError as error:
        raise ModelError(f"the model's tokenizer fails on a text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file. Raises ModelError."""
    try:
        content = read_bounded(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object", "download the model again")
    return content


def _read_backend(path: Path) -> Backend:
    try:
        require_tokenizer(path)
        with no_panic():
            return Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any unreadable file
        raise ModelError(f"{path} cannot be read: {error}", "download the model again") from error


def _content(token: Any) -> str:
    """Text of a token in tokenizer_config.json, which is a string, an object or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _add_missing(backend: Backend, config: dict[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json lists, in the order of their ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    missing: dict[str, AddedToken] = {}
    for index in sorted(listed, key=_id_of):
        entry = listed[index]
        content = _content(entry)
        if isinstance(entry, dict) and content and backend.token_to_id(content) is None:
            flags = {
                name: bool(entry.get(name, False))
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            missing.setdefault(content, AddedToken(content, **flags))
    if missing:  # in one call: each goes through all added tokens
        backend.add_tokens(list(missing.values()))


def _id_of(key: str) -> int:
    """The id in a key of ``added_tokens_decoder``; 0 if it is invalid."""
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else 0
