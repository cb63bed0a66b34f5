"""Of a request that does not end by itself: what was read stays known if it was cancelled, nothing if it failed."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from speccompile import Speculator
from speccompile.errors import RequestFailed
from support.engines import Breaks
from support.known_texts import assert_taken_over, decoded, prompt, read_and_reused, wrap
from support.tiny import admitted, greedy

pytestmark = pytest.mark.usefixtures("all_prompt_widths")


def test_cancelled_while_its_prompt_is_read_it_leaves_what_was_read(spec: Speculator, model: PreTrainedModel) -> None:
    text = prompt(220, seed=1)
    cancelled = spec.engine.submit(text, max_new_tokens=5)
    spec.engine.step()
    assert cancelled.stats.prefill_tokens == 128
    cancelled.cancel()
    spec.engine.run()
    for again, known in (([*text[:100], 3], 100), ([*text[:150], 3, 4], 128), (text, 150)):
        request = decoded(spec, again, 5)
        assert_taken_over(request, known)
        assert request.new_tokens == greedy(model, again, 5)


def test_cancelled_before_a_chunk_was_read_it_leaves_nothing(spec: Speculator, model: PreTrainedModel) -> None:
    running = admitted(spec.engine, prompt(20, seed=2), max_new_tokens=50)
    # The budget goes to the first one: the second has a slot already, or none; of it nothing was read.
    for request in [spec.engine.submit(prompt(64, seed), max_new_tokens=5) for seed in (3, 4)]:
        spec.engine.step()
        request.cancel()
    spec.engine.run()
    for seed in (3, 4):
        request = decoded(spec, prompt(64, seed), 5)
        assert request.new_tokens == greedy(model, prompt(64, seed), 5)
    assert running.new_tokens == greedy(model, running.prompt, 50)


def test_cancelled_while_it_runs_it_leaves_its_text(model: PreTrainedModel) -> None:
    spec = wrap(model, "early_exit", exit_layer=2)
    cancelled = admitted(spec.engine, prompt(20, seed=1), max_new_tokens=50)
    for _ in range(4):
        spec.engine.step()
    cancelled.cancel()
    text = [*cancelled.prompt, *cancelled.new_tokens]
    assert len(text) == 20 + 1 + 4 * 4
    request = decoded(spec, [*text, 5], 9)
    assert read_and_reused(request) == (2, len(text) - 1)
    assert request.new_tokens == greedy(model, [*text, 5], 9)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_of_a_request_that_failed_nothing_stays(spec: Speculator, model: PreTrainedModel, at: int) -> None:
    """Neither in the arena nor known; who had a copy goes on with that."""
    text = prompt(30, seed=1)
    failing = spec.engine.submit(text, max_new_tokens=20, streamer=Breaks(at))
    follower = spec.engine.submit([*text, 4, 5], max_new_tokens=20)
    spec.engine.run()
    with pytest.raises(RequestFailed):
        failing.result()
    for name, tensor in spec.arena.layout.tensors.items():
        if tensor.follows_text:
            assert not spec.arena[name][failing.slot].any() or failing.slot == follower.slot, name
    # What was read before it failed was lent to the other, if both ran at a time.
    assert read_and_reused(follower) == ((2, 30) if at == 5 else (32, 0))
    assert follower.new_tokens == greedy(model, follower.prompt, 20)
    other = decoded(spec, [*text[:-1], 9, 9], 20)
    assert other.stats.reused_tokens == 29, "known by the follower alone"
    assert other.new_tokens == greedy(model, other.prompt, 20)
