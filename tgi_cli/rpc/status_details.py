"""What a status says of an error: short enough for a header, where gRPC carries it.

A longer one loses the whole status: the client reads "Stream removed".
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

_BYTES = 4000
"""Of the 8 KB that the headers of an answer may have."""
_ESCAPED = 3
"""Bytes of the wire for one that is not printable ASCII."""
_CUT = " ..."


def short(text: str) -> str:
    """The beginning of a text that is too long."""
    used = 0
    for index, letter in enumerate(text):
        used += 1 if " " <= letter <= "~" else _ESCAPED * len(letter.encode(errors="replace"))
        if used > _BYTES:
            return text[:index] + _CUT
    return text
