"""What a request reports: its result, its text, how long it took."""

from __future__ import annotations

import time

import pytest
from transformers import LlamaForCausalLM

from speccompile.runtime.engine import Engine
from support.engines import PATIENCE, Gate, Make, greedy, prompt, serving
from support.letters import tokenizer

pytestmark = pytest.mark.usefixtures("all_prompt_widths")


def test_a_result_has_text_reason_and_statistics(engine: Engine, model: LlamaForCausalLM) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    result = request.result()
    assert result.token_ids == greedy(model, prompt(5), 15)
    assert result.finish_reason == request.finish_reason == "max_new_tokens"
    assert result.stats is request.stats and result.stats.prompt_tokens == 5
    assert result.stats.new_tokens == 15
    # The drafter is the whole model: every step emits four, but the last, which is cut.
    assert result.acceptance_length == result.stats.acceptance_length == pytest.approx(14 / 4)
    assert result.text is None
    assert request.result().token_ids == result.token_ids
    # A list of the caller's own.
    result.token_ids.clear()
    assert request.result().token_ids == greedy(model, prompt(5), 15)


@pytest.mark.parametrize("timeout", [0, -1, 0.0])
def test_a_timeout_of_zero_returns_only_what_has_ended(engine: Engine, model: LlamaForCausalLM, timeout: float) -> None:
    request = engine.submit(prompt(5), max_new_tokens=15)
    with pytest.raises(TimeoutError, match=f"has not ended within {timeout} s"):
        request.result(timeout)
    assert request.new_tokens == [] and not request.finished
    request.result()
    assert request.result(timeout).token_ids == greedy(model, prompt(5), 15), "what has ended is there at once"


def test_time_runs_out_between_own_steps(make: Make, model: LlamaForCausalLM) -> None:
    class Slow:
        def choose(self, live_rows: int) -> int:
            time.sleep(0.03)
            return 3

    engine = make(policy=Slow()).engine
    request = engine.submit(prompt(5), max_new_tokens=100)
    # On a busy machine the prompt alone may need longer than the timeout.
    while not request.new_tokens:
        engine.step()
    with pytest.raises(TimeoutError, match=r"within 0.02 s"):
        request.result(timeout=0.02)
    assert not request.finished
    assert request.result().token_ids == greedy(model, prompt(5), 100)


def test_time_runs_out_while_another_thread_steps(make: Make, model: LlamaForCausalLM) -> None:
    gate = Gate()
    engine = make(policy=gate).engine
    with serving(engine):
        request = engine.submit(prompt(5), max_new_tokens=15)
        assert gate.reached.wait(PATIENCE)
        with pytest.raises(TimeoutError, match=r"within 0.05 s"):
            request.result(timeout=0.05)
        assert not request.finished
        gate.open()
        assert request.result(timeout=PATIENCE).token_ids == greedy(model, prompt(5), 15)


def test_the_text_is_decoded_by_the_requests_tokenizer(engine: Engine, model: LlamaForCausalLM) -> None:
    letters = tokenizer()
    result = engine.submit(prompt(5), max_new_tokens=15, tokenizer=letters).result()
    assert result.text == letters.decode(greedy(model, prompt(5), 15)) != ""


def test_text_leaves_special_tokens_out(engine: Engine, model: LlamaForCausalLM) -> None:
    letters, new = tokenizer(), greedy(model, prompt(5), 15)
    letters.add_special_tokens({"eos_token": letters.convert_ids_to_tokens(new[6])})
    result = engine.submit(prompt(5), max_new_tokens=15, tokenizer=letters, eos_token_id=new[6]).result()
    cut = new[: new.index(new[6]) + 1]
    assert result.token_ids == cut and result.finish_reason == "eos"
    assert result.text == letters.decode(cut[:-1])


def test_a_stop_string_is_part_of_the_text(engine: Engine, model: LlamaForCausalLM) -> None:
    letters = tokenizer()
    text = letters.decode(greedy(model, prompt(5), 15))
    result = engine.submit(prompt(5), max_new_tokens=15, tokenizer=letters, stop=text[9:12]).result()
    assert result.finish_reason == "stop"
    assert result.text is not None and text[9:12] in result.text and text.startswith(result.text)


# --- timings, and what is printed ---------------------------------------------------------------


def test_timings_come_one_after_another(engine: Engine) -> None:
    request = engine.submit(prompt(40), max_new_tokens=10)
    time.sleep(0.01)
    engine.step()
    assert request.new_tokens == []
    time.sleep(0.01)
    # Into how many steps the prompt is cut depends on what steps have taken.
    while not request.new_tokens:
        engine.step()
    time.sleep(0.01)
    timings = request.result().timings
    assert timings.queued is not None and timings.first_token is not None
    assert timings.queued >= 0.01
    assert timings.queued + 0.01 <= timings.first_token
    assert timings.first_token + 0.01 <= timings.total


def test_timings_of_one_that_never_had_a_slot(engine: Engine) -> None:
    request = engine.submit(prompt(5), max_new_tokens=10)
    request.cancel()
    timings = request.result().timings
    assert timings.queued is None and timings.first_token is None and timings.total >= 0


def test_timings_of_one_without_a_token(engine: Engine) -> None:
    request = engine.submit(prompt(40), max_new_tokens=10)
    engine.step()
    request.cancel()
    assert request.timings.queued is not None and request.timings.first_token is None


def test_timings_go_on_until_the_end(engine: Engine) -> None:
    request = engine.submit(prompt(5), max_new_tokens=10)
    before = request.timings
    time.sleep(0.001)
    assert request.timings.total > before.total
    request.result()
    at_end = request.timings
    time.sleep(0.001)
    assert request.timings == at_end


def test_repr_shows_length_and_state(engine: Engine) -> None:
    request = engine.submit(prompt(4), max_new_tokens=10)
    assert repr(request) == "<Request of 4 tokens, 0 new, waiting>"
    engine.step()
    assert repr(request) == f"<Request of 4 tokens, 1 new, in slot {request.slot}>"
    engine.run()
    assert repr(request) == "<Request of 4 tokens, 10 new, max_new_tokens>"
