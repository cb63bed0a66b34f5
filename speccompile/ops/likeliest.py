"""The likeliest tokens of each place, with their log-probabilities: what a draft tree branches into.

With noise they are those of log p plus the noise of the place, which the target adds to its own: the first of them is
the token that ``speccompile::choose`` draws.
"""

from __future__ import annotations

import torch

from speccompile.ops import noise
from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

SCHEMA = (
    "(Tensor scores, int count, Tensor? temperature=None, Tensor? seed=None, Tensor? positions=None) -> "
    "(Tensor, Tensor)"
)


def likeliest(
    scores: torch.Tensor,
    count: int,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, which the tests hold the C++ op against.

    Args:
        scores: ``[B, T, V]``, read only.
        count: at most V.
        temperature, seed, positions: as :func:`speccompile.ops.choose.reference` has them.

    Returns:
        Tokens int64 ``[B, T, count]``, the greatest first and of equal ones the first id, -1 where none is left that
        can come; and float32 ``[B, T, count]``, the logarithms of their shares in the softmax over all scores, noise
        included, -inf where there is no token. A place with a score of NaN or +inf has no tokens.
    """
    scores = scores.to(torch.float32, copy=True)
    if temperature is not None:
        assert seed is not None and positions is not None
        noise.add_gumbel(scores, temperature, seed, positions, noise.TOKENS)
    total = scores.logsumexp(-1)
    tokens, logprobs = [], []
    for _ in range(count):
        token = scores.argmax(-1, keepdim=True)
        best = scores.gather(-1, token)[..., 0]
        comes = (best > float("-inf")) & total.isfinite()
        tokens.append(torch.where(comes, token[..., 0], -1))
        logprobs.append(torch.where(comes, best - total, float("-inf")))
        scores.scatter_(-1, token, float("-inf"))
    return torch.stack(tokens, -1), torch.stack(logprobs, -1)


def _fake(scores, count, *rest):  # type: ignore[no-untyped-def]
    sizes = (*scores.shape[:2], count)
    return scores.new_empty(sizes, dtype=torch.int64), scores.new_empty(sizes, dtype=torch.float32)


define("likeliest" + SCHEMA, _fake, likeliest, cpp=BASE, recorded=True)
