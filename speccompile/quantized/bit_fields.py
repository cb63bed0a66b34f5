"""Integers of few bits, packed into the words of an int32 tensor, the lowest bits first."""

from __future__ import annotations

import torch

#: Rows whose words are widened at a time. Each field needs at least 8 bytes meanwhile.
_ROWS = 256


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack unsigned fields, int16 ``[R, count]``, from words int32 ``[R, W]``.

    Source: AutoGPTQ's ``QuantLinear.pack``, and compressed-tensors' ``pack_to_int32``.
    """
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        # The lowest byte of a word comes first on all machines that this package has kernels for.
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        fields = (words.contiguous().view(torch.uint8)[..., None] >> shifts) & mask
        return fields.flatten(1)[:, :count].to(torch.int16)
    starts = torch.arange(count) * bits
    word, shift = starts // 32, starts % 32
    result = torch.empty((words.shape[0], count), dtype=torch.int16)
    for rows in range(0, words.shape[0], _ROWS):
        # A field may span two words: join both into one word of 64 bits.
        wide = torch.nn.functional.pad(words[rows : rows + _ROWS].to(torch.int64) & 0xFFFFFFFF, (0, 1))
        both = wide[:, word] | (wide[:, word + 1] << 32)
        result[rows : rows + _ROWS] = ((both >> shift) & mask).to(torch.int16)
    return result


def words_for(count: int, bits: int) -> int:
    """Number of words that ``count`` fields need."""
    return -(-count * bits // 32)
