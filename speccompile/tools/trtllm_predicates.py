"""What TensorRT-LLM's ``SpeculativeDecodingMode`` says of its modes, derived from what ours declare.

``python -m speccompile.tools.trtllm_predicates`` prints the table of docs/modes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from speccompile.modes.auto import Auto
from speccompile.modes.base import Mode
from speccompile.modes.registry import BUILT_IN

Predicate = Callable[[Mode], bool]

#: TensorRT-LLM's modes, with the options by which ours of that name are like them.
MODES: Mapping[str, Mapping[str, Any]] = {
    "mtp": {},
    "mtp_eagle": {},
    "mtp_eagle_one_model": {},
    "eagle3": {},
    "eagle3_one_model": {},
    "ngram": {},
    # Its draft models have their own engine.
    "draft_target": {"fused": False},
    "user_provided": {},
    "save_hidden_states": {},
    "none": {},
    "auto": {},
}


def _named(*names: str) -> Predicate:
    return lambda mode: mode.name in names


def _always(mode: Mode) -> bool:
    return True


def _never(mode: Mode) -> bool:
    return False


def _one_engine(mode: Mode) -> bool:
    """A network drafts inside of the target's step."""
    return mode.weights_from != "nowhere" and not mode.split


def _proposes(mode: Mode) -> bool:
    """When a step ends, drafts wait in the arena for the next one; those of a split drafter are made after that."""
    return not mode.split and any(spec.name == "draft_tokens" for spec in mode.state())


#: By TensorRT-LLM's names. Those with arguments are asked of the target of a chain, with an attention backend that is
#: not TensorRT-LLM's own.
PREDICATES: Mapping[str, Predicate] = {
    "is_mtp_one_model": lambda mode: mode.weights_from == "target" and not mode.split,
    "is_mtp_eagle_one_model": _named("mtp_eagle_one_model"),
    "is_mtp_vanilla": _named("mtp"),
    "is_mtp_eagle": _named("mtp_eagle"),
    "is_eagle3": _named("eagle3"),
    "is_eagle3_one_model": _named("eagle3_one_model"),
    "is_ngram": _named("ngram"),
    "is_user_provided": _named("user_provided"),
    "is_none": _named("none"),
    "is_draft_target": _named("draft_target"),
    "is_save_hidden_states": _named("save_hidden_states"),
    "use_one_engine": _one_engine,
    # Sampling and acceptance are part of every step.
    "without_logits": _always,
    # A step that accepts less leaves a smaller ``length``, and what lies after it is dead.
    "needs_kv_cache_rewind": _never,
    # Which tier comes next depends on what was proposed.
    "support_overlap_scheduler": lambda mode: not _proposes(mode),
    # An automaton masks the scores inside of every step.
    "support_guided_decoder": _always,
    "support_capturable_guided_decoder": _always,
    "has_draft_model": lambda mode: mode.weights_from != "nowhere" and mode.split,
    # Rows of drafts were computed from what the drafter carries on, and again from what the target has.
    "needs_kv_cache_recompute": lambda mode: mode.drafts_from_hidden and mode.split,
    "need_load_draft_weights": lambda mode: mode.weights_from == "drafter" and not mode.split,
    "has_spec_decoder": lambda mode: mode.drafts_from_hidden,
    "has_spec_drafter": lambda mode: mode.split or _proposes(mode),
    # One attention op reads steps and prompts of any width.
    "extend_ctx": _always,
    "attention_need_spec_dec_mode": _never,
}


@dataclass(frozen=True)
class Difference:
    """That a predicate is meant to be another one of ``modes`` than TensorRT-LLM's."""

    predicate: str
    modes: frozenset[str]
    reason: str


_ONE_MODEL = frozenset({"mtp", "mtp_eagle_one_model", "eagle3_one_model"})
_DECODING = MODES.keys() - {Auto.name}

DIFFERENCES = (
    Difference(
        "without_logits",
        frozenset(_DECODING - _ONE_MODEL),
        "sampling and acceptance are part of every step, so the host never sees logits",
    ),
    Difference(
        "needs_kv_cache_rewind",
        _ONE_MODEL | {"ngram"},
        "no rewind is needed: a step leaves a smaller `length`, and KV after that is dead",
    ),
    Difference(
        "support_overlap_scheduler",
        frozenset({"none", "save_hidden_states"}),
        "plain decoding is asked as well, and waits for nothing of the step before; TensorRT-LLM overlaps it without "
        "asking, and saves on the host",
    ),
    Difference(
        "support_guided_decoder",
        _ONE_MODEL,
        "guides mask inside of every step; TensorRT-LLM's one-model modes have only the other predicate",
    ),
    Difference(
        "support_capturable_guided_decoder",
        frozenset(_DECODING - _ONE_MODEL),
        "guides mask inside of every step, and are captured with it",
    ),
    Difference(
        "has_spec_drafter",
        frozenset({"save_hidden_states"}),
        "hidden states are saved by a pass, beside any drafter or none",
    ),
    Difference(
        "extend_ctx",
        _ONE_MODEL,
        "one attention op reads steps and prompts of any width, whichever mode drafts",
    ),
    Difference(
        "extend_ctx",
        frozenset({"auto"}),
        "`auto` is not a mode here: it chooses one, which has its own predicates",
    ),
    Difference(
        "attention_need_spec_dec_mode",
        frozenset({"eagle3_one_model"}),
        "the attention op has no mode for several queries: it always takes T",
    ),
)


def holds(predicate: str, mode: Mode | None) -> bool:
    """Whether it does of ``mode``; of None, which stands for ``auto``, none does."""
    return mode is not None and PREDICATES[predicate](mode)


def built_in() -> dict[str, Mode | None]:
    """Our modes of TensorRT-LLM's names, as they are there; None is ``auto``."""
    types = {mode.name: mode for mode in BUILT_IN}
    configs = {name: types[name](**options) for name, options in MODES.items() if name in types}
    return {**configs, Auto.name: None}


def table() -> str:
    """Markdown: a line for each predicate that is not a name alone, with the modes of which it holds."""
    modes = built_in()
    rows = ["| predicate | holds for | other than in TensorRT-LLM for |", "| --- | --- | --- |"]
    reasons = []
    for predicate in PREDICATES:
        if predicate.startswith("is_"):
            continue
        cells = [_names([name for name, mode in modes.items() if holds(predicate, mode)], len(modes) - 1)]
        differing = []
        for difference in DIFFERENCES:
            if difference.predicate == predicate:
                reasons.append(difference.reason)
                names = [name for name in modes if name in difference.modes]
                differing.append(f"{_names(names, len(modes))} ({len(reasons)})")
        rows.append(f"| `{predicate}` | {cells[0]} | {'; '.join(differing)} |")
    return "\n".join([*rows, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


def _names(names: list[str], most: int) -> str:
    if not names:
        return "none of them"
    return "all" if len(names) == most else ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(table())
