"""The alphabet of byte-level vocabularies, in which each byte is a printable character.

Printable Latin-1 characters are themselves; the other bytes follow from U+0100 on, in order
(GPT-2, Radford et al. 2019).
"""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table


BYTE_OF_CHARACTER = _alphabet()
"""The byte of each of the 256 characters."""


def byte_level_bytes(token: str) -> bytes | None:
    """The bytes of a token of such a vocabulary; None if it has other characters."""
    if all(character in BYTE_OF_CHARACTER for character in token):
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    return None


def fallback_byte(token: str) -> bytes | None:
    """The byte that a token such as ``<0x0A>`` stands for where texts fall back to bytes."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None
