"""Processors of a request that replace built-in ones: transformers' ``_merge_criteria_processor_list``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.generation import (
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from speccompile.errors import InvalidOption

#: The option from which transformers builds a processor, by its type: a request's processor of exactly this type
#: replaces it. ``min_new_tokens`` is not among them: transformers also sets ``min_length`` for it, which still applies.
_BUILT_IN: dict[type, str] = {
    SequenceBiasLogitsProcessor: "sequence_bias",
    RepetitionPenaltyLogitsProcessor: "repetition_penalty",
    NoRepeatNGramLogitsProcessor: "no_repeat_ngram_size",
    NoBadWordsLogitsProcessor: "bad_words_ids",
    PrefixConstrainedLogitsProcessor: "prefix_allowed_tokens_fn",
    ForcedEOSTokenLogitsProcessor: "forced_eos_token_id",
    InfNanRemoveLogitsProcessor: "remove_invalid_values",
    SuppressTokensLogitsProcessor: "suppress_tokens",
    SuppressTokensAtBeginLogitsProcessor: "begin_suppress_tokens",
}


def replace_built_in(where: str, values: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return the options in force, without those that a processor of ``logits_processor`` replaces.

    In transformers the first processor of a built-in one's type runs instead of it, at its position. Here all
    processors of ``logits_processor`` are called after the options. The processors that replace others are therefore
    called first, and an option that comes after them in transformers is refused.

    Args:
        where: the called function, for messages.
        values: options in force by name, with ``logits_processor`` as a tuple.
        order: names of the options before ``logits_processor``, in the order in which they are applied.

    Raises:
        InvalidOption: an option that is not replaced is applied after one that is replaced.
    """
    processors = values["logits_processor"]
    least = [name for name in ("min_length", "min_new_tokens") if name in values]
    if least and any(type(processor) is MinLengthLogitsProcessor for processor in processors):
        reason = (
            "logits_processor has a MinLengthLogitsProcessor, which replaces min_length and not min_new_tokens in "
            "transformers; give one of the three"
        )
        raise InvalidOption(where=where, name=least[0], value=values[least[0]], reason=reason)
    replacing: dict[str, Any] = {}
    for processor in processors:
        name = _BUILT_IN.get(type(processor))
        if name is not None and name in values:
            replacing.setdefault(name, processor)
    if not replacing:
        return dict(values)
    replaced = [name for name in order if name in replacing]
    first = replaced[0]
    later = [name for name in order[order.index(first) :] if name in values and name not in replacing]
    if later:
        reason = (
            f"logits_processor has a {type(replacing[first]).__name__}, which replaces it in transformers, before "
            f"{later[0]}, and would be called after {later[0]} here; leave out {first} (the processor is then "
            f"called after {later[0]} in transformers too), or the processor"
        )
        raise InvalidOption(where=where, name=first, value=values[first], reason=reason)
    called = [replacing[name] for name in replaced]
    called += [processor for processor in processors if not any(processor is item for item in called)]
    kept = {name: value for name, value in values.items() if name not in replacing}
    return kept | {"logits_processor": tuple(called)}
