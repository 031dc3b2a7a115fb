"""Packing of small integers into 32-bit words, as in checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""Words in which every number of the given bits is 1."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack words int32 [n, w] to numbers uint8 [n, w * 32 / bits].

    The lowest bits of a row's first word are its first number. Numbers of 3 bits span words: 32 of
    them take three words.
    """
    if bits in (2, 4):
        numbers = words.contiguous().view(torch.uint8)[..., None]
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        return (numbers >> shifts).bitwise_and_(2**bits - 1).flatten(-2)
    if bits == 8:
        return words.contiguous().view(torch.uint8)
    low, middle, high = (words.long() & 0xFFFFFFFF).view(*words.shape[:-1], -1, 3).unbind(-1)
    # The 96 bits as two pieces of 48, with 16 numbers each.
    pieces = torch.stack((low | (middle & 0xFFFF) << 32, middle >> 16 | high << 16), dim=-1)
    shifts = torch.arange(0, 48, 3, device=words.device)
    return (pieces[..., None] >> shifts).bitwise_and_(7).to(torch.uint8).flatten(-3)


def unpack_minus_one(words: Tensor, bits: int) -> Tensor:
    """Unpack numbers that are stored minus 1.

    1 was subtracted in whole words, not numbers, unless these span words: a 0 borrowed from the
    next number, which the sum of words reverts.
    """
    if bits == 3:
        return (unpack(words, bits) + 1).bitwise_and_(7)
    sums = (words.long() + _ONES[bits]) & 0xFFFFFFFF
    return unpack(torch.where(sums < 2**31, sums, sums - 2**32).int(), bits)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers uint8 [n, k], below 2^bits, into words [n, k * bits / 32]: reverts unpack.

    Rows fill whole words, for 3 bits three at a time.
    """
    if bits == 3:
        shifts = torch.arange(0, 48, 3, device=numbers.device)
        pieces = (numbers.reshape(len(numbers), -1, 2, 16).long() << shifts).sum(-1)
        first, last = pieces.unbind(-1)
        words = torch.stack((first, first >> 32 | (last & 0xFFFF) << 16, last >> 16), dim=-1)
        words = words.bitwise_and_(0xFFFFFFFF).flatten(1)
        return torch.where(words < 2**31, words, words - 2**32).int()
    packed = numbers[:, :: 8 // bits].contiguous()
    for position in range(1, 8 // bits):
        packed |= numbers[:, position :: 8 // bits] << position * bits
    return packed.flatten().view(torch.int32).view(len(numbers), -1)
