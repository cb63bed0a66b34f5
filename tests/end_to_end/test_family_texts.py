"""Every family that is promised by name gives the text of transformers' greedy ``generate``, whatever the tiers do."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import speccompile
from speccompile.utils.transformers_version import FROM_5_24
from support.dice import Dice
from support.families import SIZES, TIERS, assert_texts, model_of, periodic

# By the attention op, unless it says otherwise.
ROUTES = {
    "llama": "attention",
    "qwen2": "attention",
    "qwen3": "attention",
    "mistral": "attention",
    "gemma2": "attention",
    "gemma3_text": "attention",
    "phi3": "attention",
    "gpt2": "attention",
    "opt": "attention",
    "gpt_neox": "attention",
    "gpt_oss": "attention",
    "mixtral": "attention",
    "qwen3_moe": "attention",
    "deepseek_v3": "eager",
    "glm4": "attention",
    "smollm3": "attention",
    "bloom": "eager",
    "falcon": "eager",
}
# Not promised by name.
OTHER_ROUTES = {
    # Chunked attention, sines stored in a table, ALiBi without positions, shared KV.
    "llama4_text": "attention",
    "gptj": "attention" if FROM_5_24 else "eager",
    "mpt": "eager",
    "gemma3n_text": "attention",
    "gemma4_text": "attention",
    # Recurrent layers: beside attention, beside latent attention, with limits of the time step, with experts.
    "qwen3_5_text": "attention",
    "kimi_linear": "eager",
    "nemotron_h": "attention",
    "zamba2": "attention",
    # Lightning attention, whose cache has its own interface.
    "minimax": "attention",
    # Sparse attention by an index; loops over experts whose sizes come from data.
    "deepseek_v32": "eager",
    "dbrx": "attention",
    "jetmoe": "eager",
}
# One with windows and a soft cap, one with experts, one with attention of its own.
DIFFERENT = ("gemma2", "mixtral", "bloom")


def batches(seed: int) -> Iterator[list[list[int]]]:
    """Ragged batches of 2 and 3 rows. Texts outgrow the windows; a small alphabet makes the drafter propose."""
    rng = random.Random(seed)
    for rows in (2, 3):
        alphabets = [rng.sample(range(5, 120), rng.choice([3, 6, 60])) for _ in range(rows)]
        yield [rng.choices(alphabet, k=rng.choice([1, 2, 9, 17, 33, 38])) for alphabet in alphabets]


@pytest.mark.parametrize("name", [*ROUTES, *(pytest.param(name, marks=pytest.mark.deep) for name in OTHER_ROUTES)])
def test_ragged_batches_with_random_swaps_have_the_text_of_transformers(name: str) -> None:
    tiers = (0, 1, 3) if name in DIFFERENT else TIERS
    route = (ROUTES | OTHER_ROUTES)[name]
    # Steps with a row that is not alive differ by what attends; else the third row waits for a slot.
    sizes = SIZES if name in DIFFERENT or route == "eager" else SIZES | {"max_batch": 2}
    model, dice = model_of(name), Dice(tiers)
    with speccompile.wrap(model, "ngram", tiers=tiers, **sizes, policy=dice) as spec:  # type: ignore[arg-type]
        assert spec.route == route
        assert (spec.route_reason == "") == (spec.route == "attention")
        for prompts in batches(seed=1):
            assert_texts(spec, model, prompts)
        assert_texts(spec, model, [periodic(seed=2)[:38]])
        # Not by luck: drafts were accepted, drafts were rejected, and every tier took part.
        assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens
        assert set(dice.asked) == set(tiers)


@pytest.mark.parametrize("name", [*DIFFERENT, "qwen3_next"])
def test_compiled_by_inductor_it_is_the_same_text(name: str) -> None:
    model, sizes = model_of(name), SIZES | {"backend": "inductor", "max_batch": 2}
    with speccompile.wrap(model, "ngram", tiers=TIERS, **sizes, policy=Dice(TIERS)) as spec:  # type: ignore[arg-type]
        for prompts in ([periodic(seed=2)[:38]], [periodic(seed=3)[:17], [7] * 33]):
            assert_texts(spec, model, prompts)


@pytest.mark.parametrize("name", [*DIFFERENT, "deepseek_v3"])
def test_the_models_own_first_layers_draft_in_other_families_too(name: str) -> None:
    model = model_of(name)
    layers = model.config.num_hidden_layers
    sizes = SIZES | {"max_batch": 1}
    with speccompile.wrap(
        model,
        "early_exit",
        tiers=TIERS,
        **sizes,  # type: ignore[arg-type]
        exit_layer=layers,
        policy="fixed:3",
    ) as spec:
        assert_texts(spec, model, [periodic(seed=2)[:38]])
        # The whole model drafts for itself: everything is accepted.
        assert spec.stats.accepted_tokens == spec.stats.draft_tokens > 0
