"""Drafts from a predicted text, as one op, in C++ on a CPU (``ops/cpu/csrc/base/kernels/prediction.cpp``)."""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

#: The op.
NAME = "match_prediction"
_SCHEMA = (
    "(Tensor slots, Tensor tokens, Tensor length, Tensor prompt_length, Tensor prediction, Tensor prediction_length, "
    "int longest) -> (Tensor, Tensor, Tensor)"
)
#: Most tokens of a match that are compared.
LONGEST_MATCH = 8

Drafts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    prompt_length: torch.Tensor,
    prediction: torch.Tensor,
    prediction_length: torch.Tensor,
    longest: int,
) -> Drafts:
    """Propose the tokens that follow the newest tokens in the predicted text.

    The new tokens of a row, without its prompt, end like the prediction's first ``j`` tokens. The longest match wins,
    up to :data:`LONGEST_MATCH` tokens. A row whose new tokens all match the first tokens of the prediction has the
    longest match, also before its first new token. Of equal matches the one that has as many tokens before it as the
    row has new ones wins, or the nearest to that.

    Args:
        slots: int64 ``[B]``.
        tokens: int64 ``[B, S]``, the rows' sequences; length: int64 ``[B]``, their committed tokens.
        prompt_length: int64 ``[N]``.
        prediction: int64 ``[N, P]``; prediction_length: int64 ``[N]``, its valid tokens, 0 for none.
        longest: most drafts.

    Returns:
        Draft tokens, int64 ``[B, longest]``, 0 after the last; their number, int64 ``[B]``; and the probability that a
        draft and all before it are right, float32 ``[B, longest]``: after a match of m tokens each draft is right
        with m / (m + 1), the rule of succession for m right tokens in a row.
    """
    text, count = prediction[slots], prediction_length[slots]
    new = (length - prompt_length[slots])[:, None]
    places, device = text.shape[1], text.device
    ends = torch.arange(places + 1, device=device)
    back = torch.arange(LONGEST_MATCH, device=device)
    newest = tokens.gather(1, (length[:, None] - 1 - back).clamp(min=0))
    equal = text[:, (ends[:, None] - 1 - back).clamp(min=0)] == newest[:, None]
    equal &= (back < new[:, :, None]) & (back < ends[:, None])
    matched = equal.long().cumprod(2).sum(2)
    matched = torch.where((ends == new) & (matched == new), LONGEST_MATCH, matched)
    matched = torch.where(ends < count[:, None], matched, 0)
    # Keys are distinct: the maximum does not depend on the order of the search.
    apart = tokens.shape[1] + places
    key = (matched * apart + apart - 1 - (ends - new).abs()) * 2 + (ends >= new)
    end = torch.where(matched > 0, key, -1).argmax(1, keepdim=True)
    match = matched.gather(1, end)
    lens = torch.where(match > 0, (count[:, None] - end).clamp(max=longest), 0)
    offsets = torch.arange(longest, device=device)
    drafts = text.gather(1, (end + offsets).clamp(max=places - 1))
    valid = offsets < lens
    # In float64, as the C++ form multiplies.
    chance = match.double() / (match + 1).double()
    chances = chance.expand(-1, longest).cumprod(1).float()
    return torch.where(valid, drafts, 0), lens[:, 0], torch.where(valid, chances, 0.0)


def _fake(slots, tokens, length, prompt_length, prediction, prediction_length, longest):  # type: ignore[no-untyped-def]
    drafts = tokens.new_empty((slots.shape[0], longest))
    return drafts, torch.empty_like(slots), drafts.new_empty(drafts.shape, dtype=torch.float32)


define(NAME + _SCHEMA, _fake, reference, cpp=BASE)
