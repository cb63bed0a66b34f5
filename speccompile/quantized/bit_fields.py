"""Integers of few bits, packed into the words of an int32 tensor from the lowest bit on."""

from __future__ import annotations

import torch

#: Rows whose words are widened at a time: that takes 8 bytes and more for each field.
_ROWS = 256


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Fields without a sign, int16 ``[R, count]``, of int32 ``[R, W]``.

    Source: AutoGPTQ's ``QuantLinear.pack``, and compressed-tensors' ``pack_to_int32``.
    """
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        # A word's bytes begin with the lowest, on the machines that this package has kernels for.
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        fields = (words.contiguous().view(torch.uint8)[..., None] >> shifts) & mask
        return fields.flatten(1)[:, :count].to(torch.int16)
    places = torch.arange(count) * bits
    word, shift = places // 32, places % 32
    result = torch.empty((words.shape[0], count), dtype=torch.int16)
    for rows in range(0, words.shape[0], _ROWS):
        # A field may lie in two words: take both as one of 64 bits.
        wide = torch.nn.functional.pad(words[rows : rows + _ROWS].to(torch.int64) & 0xFFFFFFFF, (0, 1))
        both = wide[:, word] | (wide[:, word + 1] << 32)
        result[rows : rows + _ROWS] = ((both >> shift) & mask).to(torch.int16)
    return result


def words_for(count: int, bits: int) -> int:
    """Words that ``count`` fields take."""
    return -(-count * bits // 32)
