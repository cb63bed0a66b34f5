"""CUDA implementations of the ops of processors and guides, which ``speccompile.sampling`` defines.

No step may wait for the host. The kernels return at once for rows that do not use the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from speccompile.ops.on_cuda import register_on_cuda

_library = torch.library.Library("speccompile", "FRAGMENT")

#: Arguments of a processor's op: scores, context, length, how many of these tokens are drafts, the processor's state.
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Sequence[torch.Tensor]], None]


def on_cuda(name: str) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as the op of the processor ``name`` on CUDA. Its first call imports triton."""

    def register(kernel: Kernel) -> Kernel:
        register_on_cuda(_library, f"{name}_", kernel)
        return kernel

    return register


@on_cuda("temperature")
def _temperature(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import heat

    heat(scores, *state)


@on_cuda("top_k")
def _top_k(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.draw import Filters, filter_scores

    filter_scores(scores, Filters(top_k=state[0]))


@on_cuda("top_p")
def _top_p(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.draw import Filters, filter_scores

    filter_scores(scores, Filters(top_p=state[0]))


@on_cuda("min_p")
def _min_p(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.draw import Filters, filter_scores

    filter_scores(scores, Filters(min_p=state[0]))


@on_cuda("typical_p")
def _typical_p(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.typical import mask_untypical_scores

    mask_untypical_scores(scores, *state)


@on_cuda("cutoffs")
def _cutoffs(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.cutoffs import mask_unlikely_scores

    mask_unlikely_scores(scores, *state)


@on_cuda("remove_invalid_values")
def _remove_invalid_values(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.normalization import remove_invalid

    remove_invalid(scores, *state)


@on_cuda("renormalize_logits")
def _renormalize_logits(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.normalization import renormalize

    renormalize(scores, *state)


@on_cuda("logit_bias")
def _logit_bias(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import bias

    bias(scores, *state)


@on_cuda("suppress_tokens")
def _suppress_tokens(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import forbid

    forbid(scores, length, *state)


@on_cuda("begin_suppress_tokens")
def _begin_suppress_tokens(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import forbid

    forbid(scores, length, *state, at=True)


@on_cuda("min_new_tokens")
def _min_new_tokens(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import forbid

    earliest, eos = state
    forbid(scores, length, eos, earliest)


@on_cuda("forced_eos")
def _forced_eos(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import force

    force(scores, length, *state)


@on_cuda("allowed_tokens")
def _allowed_tokens(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.token_lists import allow

    allow(scores, *state)


@on_cuda("repetition_penalty")
def _repetition_penalty(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.penalties import penalise_scores

    penalise_scores(scores, context, length, "repetition", *state)


@on_cuda("presence_penalty")
def _presence_penalty(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.penalties import penalise_scores

    penalise_scores(scores, context, length, "presence", *state)


@on_cuda("frequency_penalty")
def _frequency_penalty(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.penalties import penalise_scores

    penalise_scores(scores, context, length, "frequency", *state)


@on_cuda("no_repeat_ngram")
def _no_repeat_ngram(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.sequences import forbid_repeated

    forbid_repeated(scores, context, length, *state)


@on_cuda("sequence_bias")
def _sequence_bias(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.sequences import add_sequence_bias

    add_sequence_bias(scores, context, length, *state)


@on_cuda("bad_words")
def _bad_words(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.sequences import forbid_bad_words

    forbid_bad_words(scores, context, length, *state)


def _advance_guide(states, slots, tokens, length, emitted, most, tables):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.automata import advance_guide

    advance_guide(states, slots, tokens, length, emitted, most, tables)


def _truncate_drafts(lens, slots, drafts, states, tables):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.automata import truncate_drafts

    truncate_drafts(lens, slots, drafts, states, tables)


# On CUDA no drafter proposes trees at the end of a step, so no kernel truncates trees.
register_on_cuda(_library, "advance_guide_", _advance_guide)
register_on_cuda(_library, "truncate_drafts_", _truncate_drafts)


@on_cuda("guide")
def _guide(scores, context, length, drafted, state):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.automata import follow_guide

    follow_guide(scores, context, length, drafted, state)
