"""What cannot be had over a target with recurrent state is refused by name."""

from __future__ import annotations

import speccompile
from speccompile import Speculator, Tree
from speccompile.errors import InvalidOption, InvalidTiers, UnsupportedModel
from support.errors import raises
from support.families import model_of
from support.tiny import tiny_llama


def wrap(mode: str, **options: object) -> Speculator:
    return speccompile.wrap(model_of("lfm2"), mode, max_batch=1, max_len=40, backend="eager", **options)  # type: ignore


def test_trees_are_refused() -> None:
    tiers = (0, Tree.static([(0,), (1,)]))
    with raises(
        InvalidTiers, reason="there are trees, and the model keeps a recurrent state, which follows one path alone"
    ):
        wrap("ngram", tiers=tiers)


def test_drafting_with_the_targets_own_layers_is_refused() -> None:
    reason = "it drafts with the model's own layers, which keep a recurrent state: drafts would advance it"
    with raises(InvalidOption, where="wrap", name="mode", value="early_exit", reason=reason):
        wrap("early_exit", tiers=(0, 2))
    wrap("early_exit", tiers=(0,)).close()


def test_a_drafter_with_recurrent_state_is_refused() -> None:
    reason = (
        "it has a recurrent state, and rejected drafts cannot be removed from a drafter's recurrent state; "
        "use a draft model with attention layers only"
    )
    with raises(UnsupportedModel, model="Lfm2ForCausalLM", reason=reason):
        wrap("draft_target", draft=model_of("lfm2"), tiers=(0, 2))


def test_checkpoints_of_a_target_without_recurrent_state_are_refused() -> None:
    reason = "the model keeps no recurrent state: it reuses prefixes of any length without checkpoints"
    with raises(InvalidOption, where="wrap", name="state_checkpoints", value=8, reason=reason):
        speccompile.wrap(tiny_llama(), "none", tiers=(0,), max_len=40, backend="eager", state_checkpoints=8)
