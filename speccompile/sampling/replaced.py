"""A request's processors in the places of built-in ones: transformers' ``_merge_criteria_processor_list``."""

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

#: What transformers builds of an option, and a processor of exactly this type replaces. It is none of these for
#: ``min_new_tokens``: transformers sets ``min_length`` too there, so that holds beside the processor.
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
    """Options in force, without those that one of ``logits_processor`` replaces.

    The first processor of a built-in one's type takes its place in transformers. Here all of them are called after the
    options, so those that replace go first, and what would come between them and the options that stay is refused.

    Args:
        where: what was called, for messages.
        values: options in force by name, with ``logits_processor`` as a tuple.
        order: names of the options in the order in which they are applied, those before ``logits_processor``.

    Raises:
        InvalidOption: an option that stays comes after one that is replaced.
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
            f"logits_processor has a {type(replacing[first]).__name__}, which takes its place in transformers, before "
            f"{later[0]}, and would be called after it here; leave out {first} (the processor is then "
            "called after it in transformers too), or the processor"
        )
        raise InvalidOption(where=where, name=first, value=values[first], reason=reason)
    called = [replacing[name] for name in replaced]
    called += [processor for processor in processors if not any(processor is item for item in called)]
    kept = {name: value for name, value in values.items() if name not in replacing}
    return kept | {"logits_processor": tuple(called)}
