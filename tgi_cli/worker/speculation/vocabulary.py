"""Which tokens of a draft model are those of the target.

Vocabularies of one family agree: an id is the same token in both. Others are mapped by the bytes
that their tokens stand for. A token of the target that the draft model does not have is never
drafted; in its context the draft model is given the longest of its own tokens that the text ends
with. So a draft model of another family sees a text that lacks a few characters, which costs
acceptance alone (token-level intersection, https://arxiv.org/abs/2502.05202, restricts drafts in
the same way).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_cli.byte_level import byte_level_bytes, fallback_byte
from tgi_cli.errors import ModelError
from tgi_cli.files import TOKENIZER_BYTES, decode_json, read_bytes

_SPACE = "\u2581"
"""The space in SentencePiece vocabularies."""


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Tokens of a draft model by those of the target.

    Attributes:
        inputs: int64 [target's vocabulary], what the draft model is given for each token.
        outputs: int64 [target's vocabulary], the token that each is drafted by; -1 for none.
        shared: how many have one.
    """

    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]

    @property
    def shared(self) -> int:
        return int((self.outputs >= 0).sum())


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a tokenizer.json.

    Attributes:
        ids: by token, as the file writes them.
        added: those that were added to the vocabulary, such as markers of turns: texts that stand
            for themselves.
        byte_level: whether the characters of other tokens stand for bytes.
    """

    ids: Mapping[str, int]
    added: frozenset[str]
    byte_level: bool

    def texts(self) -> dict[bytes, int]:
        """Ids of the tokens that are parts of texts, by their bytes.

        Of several that stand for the same bytes it is one that does not merely fall back to a byte,
        and of these the first.
        """
        found: dict[bytes, int] = {}
        for falls_back in (False, True):
            for token, number in self.ids.items():
                if token not in self.added and (self._byte(token) is not None) is falls_back:
                    found.setdefault(self._bytes(token), number)
        return found

    def _bytes(self, token: str) -> bytes:
        if self.byte_level:
            exact = byte_level_bytes(token)
            if exact is not None:
                return exact
        byte = self._byte(token)
        if byte is not None:
            return byte
        return token.replace(_SPACE, " ").encode("utf-8", "surrogatepass")

    def _byte(self, token: str) -> bytes | None:
        return None if self.byte_level else fallback_byte(token)

    def parts(self) -> Iterator[tuple[bytes, int]]:
        """Bytes and id of every token that is a part of texts."""
        for token, number in self.ids.items():
            if token not in self.added:
                yield self._bytes(token), number


def compare(target: Path, draft: Path, sizes: tuple[int, int]) -> TokenMap | None:
    """How a draft model's tokens correspond to the target's.

    Args:
        target, draft: folders of the models. Without a tokenizer.json in each, only the sizes are
            compared.
        sizes: sizes of their vocabularies, padding included.

    Returns:
        None if an id is the same token in both; they may end differently: rows of padding, and
        tokens that were added to one of them.

    Raises:
        ModelError: they have no token in common, or the sizes differ and nothing else is known.
    """
    ours, theirs = read_vocabulary(target), read_vocabulary(draft)
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            raise ModelError(
                f"the vocabulary of the draft model {draft} has {sizes[1]} tokens, the model's "
                f"{sizes[0]}, and without a tokenizer.json of each they cannot be compared",
                "use a draft model of the same family",
            )
        return None
    if _same(ours, theirs):
        return None
    mapped = _mapped(ours, theirs, sizes)
    if not mapped.shared:
        raise ModelError(
            f"the draft model {draft} has no token in common with the model",
            "use another draft model",
        )
    return mapped


def _same(ours: Vocabulary, theirs: Vocabulary) -> bool:
    """Whether no id is another token in the other one, and no token has another id."""
    if any(theirs.ids.get(token, number) != number for token, number in ours.ids.items()):
        return False
    named = {number: token for token, number in ours.ids.items()}
    return all(named.get(number, token) == token for token, number in theirs.ids.items())


def _mapped(ours: Vocabulary, theirs: Vocabulary, sizes: tuple[int, int]) -> TokenMap:
    """Map each of our tokens to the same token of the other vocabulary."""
    known = {text: number for text, number in theirs.texts().items() if number < sizes[1]}
    inputs, outputs = np.zeros(sizes[0], np.int64), np.full(sizes[0], -1, np.int64)
    for text, number in ours.parts():
        if number < sizes[0]:
            inputs[number] = _longest_end(text, known)
    # A text has one token here: where several ids stand for it, only the usual one is drafted.
    for text, number in ours.texts().items():
        if number < sizes[0]:
            outputs[number] = known.get(text, -1)
    for token in ours.added & theirs.added:
        number, other = ours.ids[token], theirs.ids[token]
        if number < sizes[0] and other < sizes[1]:
            inputs[number] = outputs[number] = other
    return TokenMap(inputs, outputs)


def _longest_end(text: bytes, known: Mapping[bytes, int]) -> int:
    """The longest token that a text ends with; the first one of all where there is none."""
    ends = (known.get(text[begin:]) for begin in range(len(text)))
    return next((number for number in ends if number is not None), 0)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """The tokens of a folder's tokenizer.json; None if there is none.

    Raises:
        ModelError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = decode_json(read_bytes(path, TOKENIZER_BYTES), None)
        vocabulary: Any = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # with scores: the place of a token is its id
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        ids = dict(vocabulary)
        added = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
        if not all(map(_is_entry, (ids | added).items())):
            raise ValueError("an entry of the vocabulary is not a token with a number")
        # The library writes the kind of each part; a part of parts has its own.
        byte_level = _names_byte_level(content.get("decoder"))
        byte_level |= _names_byte_level(content.get("pre_tokenizer"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "download the model again") from error
    return Vocabulary(ids | added, frozenset(added), byte_level)


def _names_byte_level(part: Any) -> bool:
    """Whether a part of a tokenizer, or one that it consists of, is byte-level."""
    if not isinstance(part, dict):
        return False
    inner = [*(part.get("decoders") or ()), *(part.get("pretokenizers") or ())]
    return part.get("type") == "ByteLevel" or any(map(_names_byte_level, inner))


def _is_entry(entry: tuple[Any, Any]) -> bool:
    token, number = entry
    return isinstance(token, str) and type(number) is int and number >= 0
