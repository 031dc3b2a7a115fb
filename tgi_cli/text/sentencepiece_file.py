"""Reads the files of SentencePiece models, without SentencePiece.

They are protocol buffers:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tgi_cli.errors import ModelError
from tgi_cli.files import TOKENIZER_BYTES, read_bytes


class ModelType(IntEnum):
    """How a text is cut into pieces (``TrainerSpec.ModelType``)."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class PieceType(IntEnum):
    """What a piece is (``SentencePiece.Type``)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class VocabularyEntry:
    """An entry of the vocabulary; its score is a log-probability, or a negative rank (BPE)."""

    text: str
    score: float = 0.0
    type: int = PieceType.NORMAL


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """A SentencePiece model.

    Attributes:
        pieces: in the order of their ids.
        model_type: one of :class:`ModelType`.
        charsmap: rules of normalization in compiled form; may be empty.
        adds_prefix: whether a space is put in front of a text.
        removes_spaces: whether spaces at both ends, and repeated ones, are removed.
    """

    pieces: tuple[VocabularyEntry, ...]
    model_type: int = ModelType.UNIGRAM
    charsmap: bytes = b""
    adds_prefix: bool = True
    removes_spaces: bool = True

    @classmethod
    def read(cls, path: Path) -> SentencePieceFile:
        """Read a file.

        Raises:
            ModelError: it cannot be read, or is none.
        """
        try:
            return cls.parse(read_bytes(path, TOKENIZER_BYTES))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path} cannot be read: {error}", "download the model again"
            ) from error

    @classmethod
    def parse(cls, data: bytes) -> SentencePieceFile:
        """Parse the content of a file. Raises ValueError."""
        pieces: list[VocabularyEntry] = []
        trainer: dict[int, int | bytes] = {}
        normalizer: dict[int, int | bytes] = {}
        for number, value in _fields(data):
            if number == 1:
                pieces.append(_piece(_message(value)))
            elif number == 2:
                trainer.update(_fields(_message(value)))
            elif number == 3:
                normalizer.update(_fields(_message(value)))
        if not pieces:
            raise ValueError("it is no SentencePiece model")
        return cls(
            pieces=tuple(pieces),
            model_type=_integer(trainer.get(3, ModelType.UNIGRAM)),
            charsmap=_message(normalizer.get(2, b"")),
            adds_prefix=bool(normalizer.get(3, True)),
            removes_spaces=bool(normalizer.get(4, True)),
        )


def _piece(data: bytes) -> VocabularyEntry:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _message(fields.get(2, bytes(4))))
    text = _message(fields.get(1, b"")).decode()
    return VocabularyEntry(text, score, _integer(fields.get(3, PieceType.NORMAL)))


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("it is no SentencePiece model")
    return value


def _integer(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("it is no SentencePiece model")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message by number: integers, or the bytes of anything else.

    https://protobuf.dev/programming-guides/encoding/
    """
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("it is no SentencePiece model")
        if at + size > end:
            raise ValueError("it is cut off")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer in groups of seven bits, and where the next field begins."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("it is cut off")
