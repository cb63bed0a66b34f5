"""CUDA implementations of the ops of processors, which ``speccompile.sampling`` defines.

No step may wait for the host. The kernels return at once for rows that do not use the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from speccompile.ops.on_cuda import in_triton, register_on_cuda

_library = torch.library.Library("speccompile", "FRAGMENT")

#: Arguments of a processor's op: scores, context, length, how many of these tokens are drafts, the processor's state.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Sequence[torch.Tensor]], None]


def _of_scores(path: str) -> Kernel:
    """A kernel of :func:`in_triton` that accepts scores and state."""
    kernel = in_triton(path)
    return lambda scores, context, length, drafted, state: kernel(scores, *state)


def _of_length(path: str, **options: bool) -> Kernel:
    """A kernel that accepts scores, length and state."""
    kernel = in_triton(path, **options)
    return lambda scores, context, length, drafted, state: kernel(scores, length, *state)


def _of_context(path: str, **options: str) -> Kernel:
    """A kernel that accepts scores, context, length and state."""
    kernel = in_triton(path, **options)
    return lambda scores, context, length, drafted, state: kernel(scores, context, length, *state)


def _filter(name: str) -> Kernel:
    def kernel(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
        from speccompile.ops.triton.draw import Filters, filter_scores

        filter_scores(scores, Filters(**{name: state[0]}))

    return kernel


def _min_new_tokens(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import forbid

    earliest, eos = state
    forbid(scores, length, eos, earliest)


_KERNELS: dict[str, Kernel] = {
    "temperature": _of_scores("token_lists.heat"),
    "top_k": _filter("top_k"),
    "top_p": _filter("top_p"),
    "min_p": _filter("min_p"),
    "typical_p": _of_scores("typical.mask_untypical_scores"),
    "cutoffs": _of_scores("cutoffs.mask_unlikely_scores"),
    "remove_invalid_values": _of_scores("normalization.remove_invalid"),
    "renormalize_logits": _of_scores("normalization.renormalize"),
    "logit_bias": _of_scores("token_lists.bias"),
    "suppress_tokens": _of_length("token_lists.forbid"),
    "begin_suppress_tokens": _of_length("token_lists.forbid", at=True),
    "min_new_tokens": _min_new_tokens,
    "forced_eos": _of_length("token_lists.force"),
    "allowed_tokens": _of_scores("token_lists.allow"),
    "repetition_penalty": _of_context("penalties.penalise_scores", kind="repetition"),
    "presence_penalty": _of_context("penalties.penalise_scores", kind="presence"),
    "frequency_penalty": _of_context("penalties.penalise_scores", kind="frequency"),
    "no_repeat_ngram": _of_context("sequences.forbid_repeated"),
    "sequence_bias": _of_context("sequences.add_sequence_bias"),
    "bad_words": _of_context("sequences.forbid_bad_words"),
}
for _name, _kernel in _KERNELS.items():
    register_on_cuda(_library, f"{_name}_", _kernel)
