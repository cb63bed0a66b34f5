"""Which slot is taken next, and so which texts stay known."""

from __future__ import annotations

from transformers import PreTrainedModel

from speccompile import Speculator
from support.known_texts import MAX_BATCH, decoded, prompt, read_and_reused, shared_beginning, wrap
from support.tiny import greedy


def test_the_least_recently_used_text_is_given_up(spec: Speculator) -> None:
    texts = [prompt(20, seed) for seed in range(1, 6)]
    for text in texts[:3]:
        decoded(spec, text, 4)
    # The first one is used again, so the second one is the oldest.
    used = decoded(spec, [*texts[0], 9], 4)
    assert used.stats.reused_tokens == 20
    decoded(spec, texts[3], 4)
    assert [known(spec, text) for text in texts] == [20, 0, 20, 20, 0]
    decoded(spec, texts[4], 4)
    assert [known(spec, text) for text in texts] == [20, 0, 0, 20, 20]


def known(spec: Speculator, text: list[int]) -> int:
    """For how many tokens of ``text`` there is KV."""
    slots = spec.engine.slots
    assert not slots.owned
    return max(shared_beginning(text, held) for held in slots._free.values())


def test_unrelated_prompts_take_the_slots_in_turn(spec: Speculator) -> None:
    slots = [decoded(spec, prompt(10, seed), 3).slot for seed in range(1, 10)]
    assert slots == slots[:3] * 3 and sorted(slots[:3]) == [0, 1, 2]


def test_a_slot_without_a_text_is_taken_first(model: PreTrainedModel) -> None:
    spec = wrap(model)
    first = decoded(spec, prompt(20, seed=1), 4)
    other = decoded(spec, prompt(20, seed=2), 4)
    third = decoded(spec, prompt(20, seed=3), 4)
    assert sorted([first.slot, other.slot, third.slot]) == [0, 1, 2]


def test_a_system_prompt_that_all_share_stays_known(spec: Speculator, model: PreTrainedModel) -> None:
    """Whether they come one after another or all at once, and with others in between."""
    system = prompt(40, seed=1)
    decoded(spec, [*system, 5, 6], 6)
    for question in range(2 * MAX_BATCH):
        decoded(spec, prompt(15, seed=50 + question), 4)
        text = [*system, *prompt(7, seed=20 + question)]
        request = decoded(spec, text, 6)
        assert read_and_reused(request) == (7, 40)
        assert request.new_tokens == greedy(model, text, 6)
    requests = [
        spec.engine.submit([*system, *prompt(7, seed=30 + question)], max_new_tokens=6)
        for question in range(2 * MAX_BATCH)
    ]
    spec.engine.run()
    for request in requests:
        assert read_and_reused(request) == (7, 40)
        assert request.new_tokens == greedy(model, request.prompt, 6)
