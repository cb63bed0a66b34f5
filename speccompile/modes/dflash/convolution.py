"""Convolutions over the tokens of a block, of DFlash2's layers.

Source: z-lab's DFlash2 (``dflash/model.py``); ``GroupedDynamicCausalConv`` of speculators'
``models/dflash2/model_definitions.py``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class BlockConvolution(nn.Module):
    """Two causal convolutions: of the input of a part of a layer, and of its output. Their kernels are learnt vectors
    plus a projection of the input, one number for each group of channels.

    Args:
        size: taps of a kernel; group: channels that share a projected number.
    """

    def __init__(self, hidden_size: int, size: int, group: int) -> None:
        super().__init__()
        self.size, self.group = size, group
        self.base_kernel = nn.Parameter(torch.zeros(2, size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * size * (hidden_size // group), bias=False)

    def before(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolved input ``[B, T, M]`` of a part, and the projected kernel of its output, ``[B, T, size,
        groups]``."""
        kernels = self.kernel_projection(hidden).unflatten(-1, (2, self.size, -1))
        return self._convolve(hidden, kernels[..., 0, :, :], self.base_kernel[0]), kernels[..., 1, :, :]

    def after(self, hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """The convolved output ``[B, T, M]`` of a part; ``kernel``: of :meth:`before`."""
        return self._convolve(hidden, kernel, self.base_kernel[1])

    def _convolve(self, hidden: torch.Tensor, kernel: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(hidden)
        for tap in range(self.size):
            # The first tokens of the block have none before them.
            earlier = F.pad(hidden, (0, 0, tap, 0))[:, : hidden.shape[1]]
            found = found + earlier * (base[tap] + kernel[:, :, tap].repeat_interleave(self.group, -1))
        return found
