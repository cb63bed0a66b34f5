"""The choice of a step's tokens as ONE op: argmax of the scores, plus noise where a row draws.

On CUDA the noise is never written to memory and the scores are read once (``lowering/triton/choose.py``).
"""

from __future__ import annotations

import torch

_library = torch.library.Library("speccompile", "FRAGMENT")
_library.define(
    "choose_tokens(Tensor scores, Tensor? temperature=None, Tensor? seed=None, Tensor? positions=None, int stream=0, "
    "Tensor? start=None, bool forbids=False) -> Tensor"
)


def greatest(scores: torch.Tensor, *, forbids: bool) -> torch.Tensor:
    """The first id of the greatest score, int64 ``[B, T]``; -1 where a score of ``[B, T, V]`` is NaN.

    Args:
        forbids: -inf is what must not come, so that it is -1 too where there is nothing else.
    """
    token = scores.argmax(-1)
    # A NaN counts as greatest.
    chosen = scores.gather(-1, token[..., None])[..., 0]
    undecided = chosen.isnan() | (chosen == float("-inf")) if forbids else chosen.isnan()
    return torch.where(undecided, -1, token)


def reference(
    scores: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stream: int = 0,
    start: torch.Tensor | None = None,
    forbids: bool = False,
) -> torch.Tensor:
    """The definition; every kernel is held against it.

    Args:
        scores: ``[B, T, V]``, read only.
        temperature, seed, positions, stream, start: as ``speccompile.sampling.noise.add_gumbel`` has them; no
            temperature, no noise.
        forbids: as :func:`greatest` has it.

    Returns:
        int64 ``[B, T]``, -1 where no token can be chosen.
    """
    if temperature is not None:
        from speccompile.sampling.noise import add_gumbel

        assert seed is not None and positions is not None
        scores = scores.clone()
        add_gumbel(scores, temperature, seed, positions, stream, start)
    return greatest(scores, forbids=forbids)


def _on_cuda(*arguments, **options):  # type: ignore[no-untyped-def]
    from speccompile.lowering.triton.choose import choose

    return choose(*arguments, **options)


def _fake(scores, *rest, **options):  # type: ignore[no-untyped-def]
    return scores.new_empty(scores.shape[:2], dtype=torch.int64)


_library.impl("choose_tokens", reference, "CPU")
_library.impl("choose_tokens", _on_cuda, "CUDA")
torch.library.register_fake("speccompile::choose_tokens", _fake, lib=_library)
