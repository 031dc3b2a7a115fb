"""Errors as gRPC statuses."""

from __future__ import annotations

import grpc

from tgi_cli.rpc.interface import AdapterFault

ADAPTER_STATUSES = {
    AdapterFault.UNUSABLE: grpc.StatusCode.INVALID_ARGUMENT,
    AdapterFault.TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    AdapterFault.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    AdapterFault.OFF: grpc.StatusCode.FAILED_PRECONDITION,
    AdapterFault.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_MAX_BYTES = 4000
"""Length of a status's text: half of the 8 KB that the headers of an answer may have."""
_ESCAPED_BYTES = 3
"""Length on the wire of a byte that is not printable ASCII."""
_ELLIPSIS = " ..."


def shorten(text: str) -> str:
    """Cut a text that is too long for the header in which gRPC sends it.

    A longer one loses the whole status: the client reads "Stream removed".
    https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
    """
    used = 0
    for index, letter in enumerate(text):
        printable = " " <= letter <= "~"
        used += 1 if printable else _ESCAPED_BYTES * len(letter.encode(errors="replace"))
        if used > _MAX_BYTES:
            return text[:index] + _ELLIPSIS
    return text
