"""Checksums of objects that were uploaded to S3 in parts.

Their ETag is the MD5 sum of the MD5 sums of the parts, a hyphen, and the number of parts
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html). How long the
parts were is not in it, but few lengths are usual, and fewer give that number of parts.
"""

from __future__ import annotations

import hashlib
import re

_MIB, _MB = 1 << 20, 10**6
LENGTHS = (
    # First the defaults of clients: AWS's CLI and boto3, then others; all parts but the last.
    *(n * _MIB for n in (8, 16, 5, 64, 10, 15, 32, 50, 128, 100, 256, 512, 1024)),
    *(n * _MB for n in (8, 16, 5, 64, 10, 15, 32, 50, 128, 100, 256, 512, 1000)),
    *(n * _MIB for n in (6, 7, 12, 20, 24, 25, 40, 48, 200, 250, 500, 1000, 2048, 4096, 5120)),
)
"""Usual lengths of parts, in bytes."""
MOST_LENGTHS = 4
"""Limit of the part sizes that are tried: each costs a pass of MD5 over the object."""

_ETAG = re.compile(r'"?([0-9a-f]{32}-[1-9]\d{0,4})"?')


def parts_etag(etag: str) -> str:
    """The checksum in an ETag, without quotes; empty if it is none of parts."""
    found = _ETAG.fullmatch(etag)
    return found[1] if found else ""


class PartsDigest:
    """A running checksum for each length of parts that an object may have been uploaded with.

    Args:
        size: size of the object in bytes.
        expected: its checksum, by :func:`parts_etag`.
    """

    def __init__(self, size: int, expected: str) -> None:
        self._expected = expected
        count = int(expected.partition("-")[2])
        lengths = [length for length in LENGTHS if (count - 1) * length < size <= count * length]
        self._running = [
            _PartSums(length) for length in lengths[: MOST_LENGTHS if count > 1 else 1]
        ]

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the object."""
        for each in self._running:
            each.update(data)

    def hexdigest(self) -> str:
        """The expected checksum if the object has it, or else an empty string."""
        found = {each.checksum() for each in self._running}
        return self._expected if self._expected in found else ""


class _PartSums:
    """The MD5 sums of parts of one length."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._sums = b""
        self._part = hashlib.md5(usedforsecurity=False)
        self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            piece = rest[: self._length - self._filled]
            self._part.update(piece)
            self._filled += len(piece)
            rest = rest[len(piece) :]
            if self._filled == self._length:
                self._end_part()

    def checksum(self) -> str:
        if self._filled:
            self._end_part()
        count = len(self._sums) // self._part.digest_size
        return f"{hashlib.md5(self._sums, usedforsecurity=False).hexdigest()}-{count}"

    def _end_part(self) -> None:
        self._sums += self._part.digest()
        self._part, self._filled = hashlib.md5(usedforsecurity=False), 0
