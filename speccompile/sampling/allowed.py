"""The request's own function, called on the host, that returns the allowed next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from speccompile.errors import InvalidInput
from speccompile.graph.state import K, N, StateSpec, V
from speccompile.ops.keep_allowed import BYTE
from speccompile.sampling.base import Option, Processor, token_problem
from speccompile.utils.numbers import python_numbers

#: Tokens of a word of a mask in state.
WORD = 32

#: A mask of tokens: uint8 ``[ceil(V / 8)]``, a bit for each token, from the lowest one of a byte on.
Bits = npt.NDArray[np.uint8]

#: (row of the batch, sequence so far int64 [P + new]) -> ids of the tokens that may come next.
AllowedTokensFunction = Callable[[int, torch.Tensor], Iterable[int]]


def _problem(value: Any, vocab: int) -> str | None:
    return None if callable(value) else "it must be a function (batch_id, input_ids) -> token ids"


class AllowedTokens(Processor):
    """transformers' ``PrefixConstrainedLogitsProcessor``, and guides where steps cannot call the host.

    The engine calls the function before every step. The row has no drafts, since the function was not called for the
    positions after them. A guide's masks are written for all positions of a step whose drafts are known before it.
    """

    name = "allowed_tokens"
    options: ClassVar = (Option("prefix_allowed_tokens_fn", _problem),)
    state: ClassVar = (
        StateSpec("asks_host", (N,), torch.bool),
        # After each draft, and before them: a bit for each token, from the lowest one of a word on.
        StateSpec("allowed_tokens", (N, K + 1, (V + WORD - 1) // WORD), torch.int32, fill=-1),
    )

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        return {"asks_host": True}

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        asks, allowed = state
        ids = torch.arange(scores.shape[-1], device=scores.device)
        bits = allowed[:, : scores.shape[1], ids // WORD] >> (ids % WORD)
        scores.masked_fill_(asks[:, None, None] & (bits & 1 == 0), float("-inf"))


def packed(mask: npt.NDArray[np.bool_]) -> Bits:
    """A mask of bool ``[V]`` as bits."""
    return np.packbits(mask, bitorder="little")


def unpacked(mask: Bits, vocab: int) -> torch.Tensor:
    """A mask as bool ``[V]``."""
    return torch.from_numpy(np.unpackbits(mask, count=vocab, bitorder="little").astype(np.bool_))


def as_words(masks: Sequence[Bits]) -> torch.Tensor:
    """The state ``allowed_tokens`` of a slot, int32 ``[P, ceil(V / 32)]``: of the masks of P positions."""
    bits = np.stack(masks)
    whole = np.pad(bits, ((0, 0), (0, -bits.shape[1] % (WORD // BYTE))))
    return torch.from_numpy(whole.view(np.int32))


def ask(function: AllowedTokensFunction, row: int, text: list[int], logits: int, vocab: int) -> Bits:
    """Call ``function``, and return the tokens that it allows after ``text``.

    Args:
        logits: of these first tokens the function decides. Later ones, up to ``vocab``, remain allowed.

    Raises:
        InvalidInput: the function returned no token, or values that are not token ids.
    """
    returned = function(row, torch.tensor(text))
    if not isinstance(returned, Iterable):
        raise InvalidInput(
            name="prefix_allowed_tokens_fn", reason=f"it must return a list of token ids, got {returned!r}"
        )
    ids = returned.tolist() if isinstance(returned, torch.Tensor | np.ndarray) else list(returned)
    ids = ids if isinstance(ids, list) else [ids]
    ids = [
        item.item() if isinstance(item, torch.Tensor) and item.numel() == 1 else python_numbers(item) for item in ids
    ]
    if not ids:
        raise InvalidInput(name="prefix_allowed_tokens_fn", reason="it must return at least one token id, got none")
    if wrong := next((problem for item in ids if (problem := token_problem(item, logits))), None):
        raise InvalidInput(name="prefix_allowed_tokens_fn", reason=f"it must return token ids: {wrong}")
    mask = np.arange(vocab) >= logits
    mask[ids] = True
    return packed(mask)
