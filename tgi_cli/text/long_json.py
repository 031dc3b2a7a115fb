"""Long texts in JSON and in UTF-8.

``json.dumps`` holds the interpreter lock until it is done: 77 ms for a text of 32 MB, in which no
token of another request is sent, even if a thread calls it. Here a long text is escaped, or
decoded, a piece at a time.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

LONG = 1 << 20
"""Characters that are escaped in one call, in 2.5 ms; bytes that are decoded in one."""


def dumps(value: Any) -> str:
    """A JSON value as ``json.dumps`` writes it, unescaped: escapes take up to six bytes a byte.

    Raises:
        RecursionError: It is nested too deeply.
        TypeError, ValueError: It is no JSON value.
    """
    mark, texts = secrets.token_hex(16), list[str]()
    short = json.dumps(_shortened(value, mark, texts), ensure_ascii=False)
    first, *parts = re.split(rf'"{mark}\d+"', short)
    whole = [first]
    for text, following in zip(texts, parts, strict=True):
        whole.append('"')
        for start in range(0, len(text), LONG):
            whole.append(json.dumps(text[start : start + LONG], ensure_ascii=False)[1:-1])
        whole += ('"', following)
    return "".join(whole)


def decode(data: bytes | bytearray) -> str:
    """A text of UTF-8, with lone surrogates as they are. Raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    view = memoryview(data)
    pieces = [decoder.decode(view[start : start + LONG]) for start in range(0, len(view), LONG)]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def _shortened(value: Any, mark: str, texts: list[str]) -> Any:
    """The value with a mark in place of each long text; appends these to ``texts``, in order."""
    if isinstance(value, str):
        if len(value) <= LONG:
            return value
        texts.append(value)
        return f"{mark}{len(texts)}"
    if isinstance(value, Mapping):
        return {
            _shortened(key, mark, texts): _shortened(each, mark, texts)
            for key, each in value.items()
        }
    if isinstance(value, Sequence):
        return [_shortened(each, mark, texts) for each in value]
    return value
