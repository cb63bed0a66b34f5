"""A head learns from what is served: it drafts better, the text stays what it is, and nothing moves."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InsideStep, InvalidOption, TrainingDiverged
from speccompile.heads import Eagle3Head, load_eagle3
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.runtime.learning import WeightUpdate
from speccompile.training import OnlineTraining, online_learner
from speccompile.training.online_learner import LOOK_AGAIN, OnlineLearner
from speccompile.utils.weight_forms import WeightForm, WeightForms
from support.errors import raises
from support.tiny import greedy
from support.training_data import TAPS, VOCAB

K, NEW = 3, 29
SIZES: dict[str, Any] = {"tiers": (0, K), "max_len": 48, "max_batch": 2, "backend": "eager", "policy": f"fixed:{K}"}
#: A head that learns in seconds, in the calls alone.
LEARN: dict[str, Any] = {"share": 0.0, "learning_rate": 5e-3, "ring_tokens": 4096, "judge_tokens": 128, "unroll": K}


def random_head(model: LlamaForCausalLM) -> Eagle3Head:
    return Eagle3Head.random(model, taps=TAPS, draft_vocab_size=VOCAB)


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count, 3), generator=generator).tolist()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "speccompile-learn"]


def serve(spec: Speculator, model: LlamaForCausalLM, texts: list[list[int]]) -> float:
    """Acceptance length over these, whose text is checked."""
    requests = [spec.engine.submit(prompt, max_new_tokens=NEW) for prompt in texts]
    spec.engine.run()
    # Those of one call are of one length.
    ids: Any = torch.tensor(texts)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    assert [request.new_tokens for request in requests] == whole[:, ids.shape[1] :].tolist()
    emitted, steps = (sum(getattr(r.stats, name) for r in requests) for name in ("emitted_tokens", "row_steps"))
    return float(emitted / steps)


@pytest.fixture(scope="module", params=["eagle3_one_model", "eagle3"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def spec(mode: str, model: LlamaForCausalLM) -> Speculator:
    return wrap(model, mode, draft=random_head(model), learn=OnlineTraining(**LEARN), **SIZES)


@pytest.fixture(scope="module")
def trained(spec: Speculator, model: LlamaForCausalLM) -> tuple[float, Any, Any]:
    """Acceptance length before, what came of the training, and the arena's fingerprint before."""
    first = serve(spec, model, prompts(20, 1))
    fingerprint = spec.arena.fingerprint()
    return first, spec.learn(60), fingerprint


def test_it_drafts_better_and_nothing_else_changes(
    spec: Speculator, trained: tuple[float, Any, Any], mode: str, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    first, learnt, fingerprint = trained
    assert learnt.steps == 60 and learnt.taken and learnt.after.length(K) > learnt.before.length(K) + 0.5
    later = serve(spec, model, prompts(10, 2))
    assert first < 1.5 and later > 2.0
    assert spec.arena.fingerprint() == fingerprint
    # What was learnt is a checkpoint like any other, in half precision: a near tie may fall otherwise.
    spec.save_head(tmp_path)
    with wrap(model, mode, draft=str(tmp_path), **SIZES) as loaded:
        assert serve(loaded, model, prompts(10, 2)) > 2.0
    saved = dict(load_eagle3(tmp_path, model).named_parameters())
    for name, learnt_weight in spec.learner._live.named_parameters():  # type: ignore[attr-defined]
        if learnt_weight.requires_grad:
            assert saved[name].equal(learnt_weight.half().to(saved[name].dtype)), name


@pytest.mark.usefixtures("trained")
def test_kv_from_before_stays_in_use(spec: Speculator, model: LlamaForCausalLM) -> None:
    # In the middle of a text, and of a prompt that another request begins with.
    begun = spec.engine.submit(prompts(1, 3)[0], max_new_tokens=NEW)
    while len(begun.new_tokens) < 9:
        spec.engine.step()
    spec.learner.history.clear()  # type: ignore[attr-defined]
    reused = spec.stats.reused_tokens
    adopt(spec)
    spec.engine.run()
    assert begun.new_tokens == greedy(model, prompts(1, 3)[0], NEW)
    longer = prompts(1, 3)[0] + begun.new_tokens[:12]
    assert serve(spec, model, [longer]) > 1 and spec.stats.reused_tokens > reused


def adopt(spec: Speculator) -> None:
    """Other weights, whatever they are worth."""
    learner = spec.learner
    assert isinstance(learner, OnlineLearner)
    head = learner._trainable.head
    learner._trainable.adopt({name: value + 0.01 for name, value in head.named_parameters() if value.requires_grad})


@pytest.mark.usefixtures("trained")
def test_worse_weights_are_not_taken(spec: Speculator, model: LlamaForCausalLM) -> None:
    learner = spec.learner
    assert isinstance(learner, OnlineLearner)
    serve(spec, model, prompts(4, 5))
    before = [value.clone() for value in learner._trainable.head.parameters()]
    with torch.no_grad():
        learner._copy.lm_head.weight.copy_(learner._copy.lm_head.weight.flip(0))
    learnt = spec.learn(1)
    assert not learnt.taken and learnt.after is not None and learnt.before is not None
    assert learnt.after.length(K) < learnt.before.length(K)
    assert all(map(torch.equal, before, learner._trainable.head.parameters()))
    # The copy begins again from the head that drafts, and without the moments of what was lost.
    assert all(map(torch.equal, learner._copy.parameters(), learner._live.parameters()))
    again = spec.learn(1)
    assert again.after is not None and again.after.length(K) > again.before.length(K) - 0.3


def test_without_texts_there_is_nothing_to_learn(model: LlamaForCausalLM) -> None:
    with wrap(model, "eagle3_one_model", draft=random_head(model), learn=OnlineTraining(**LEARN), **SIZES) as spec:
        assert spec.learn(3).steps == 0
        serve(spec, model, prompts(1, 1))
        # The only text is one to be judged on.
        assert spec.learn(3).steps == 0


def test_a_loss_that_is_not_finite_leaves_the_head(model: LlamaForCausalLM) -> None:
    with wrap(model, "eagle3_one_model", draft=random_head(model), learn=OnlineTraining(**LEARN), **SIZES) as spec:
        # One by one: beside a prompt that is read, the time a step takes decides how much is drafted.
        lengths = [serve(spec, model, [prompt]) for prompt in prompts(8, 1)]
        learner = spec.learner
        assert isinstance(learner, OnlineLearner)
        with torch.no_grad():
            learner._copy.fc.weight.fill_(float("nan"))
        with raises(TrainingDiverged, step=1):
            spec.learn(3)
        assert [serve(spec, model, [prompt]) for prompt in prompts(8, 1)] == lengths and max(lengths) > 1.0
        assert spec.learn(1).steps == 1


# --- in its own thread ------------------------------------------------------------------------


def test_a_thread_learns_while_requests_run_and_ends_with_the_speculator(model: LlamaForCausalLM) -> None:
    learn = OnlineTraining(**LEARN | {"share": 0.5, "judge_every": 2})
    with wrap(model, "eagle3_one_model", draft=random_head(model), learn=learn, **SIZES) as spec:
        learner = spec.learner
        assert isinstance(learner, OnlineLearner)
        first = serve(spec, model, prompts(8, 1))
        until = time.monotonic() + 60
        while time.monotonic() < until and not sum(learnt.taken for learnt in learner.history) > 1:
            serve(spec, model, prompts(2, len(learner.history)))
        assert serve(spec, model, prompts(10, 2)) > first
        assert learner.error is None
    assert not threads()


def test_nothing_is_learnt_while_paused(model: LlamaForCausalLM) -> None:
    learn = OnlineTraining(**LEARN | {"share": 1.0, "judge_every": 1})
    with wrap(model, "eagle3_one_model", draft=random_head(model), learn=learn, **SIZES) as spec:
        learner = spec.learner
        assert isinstance(learner, OnlineLearner)
        with learner.paused():
            serve(spec, model, prompts(8, 1))
            time.sleep(0.2)
            assert not learner.history
        until = time.monotonic() + 60
        while time.monotonic() < until and not learner.history:
            time.sleep(0.05)
        assert learner.history


def test_whoever_pauses_may_learn_save_and_close(model: LlamaForCausalLM, tmp_path: Path) -> None:
    learn = OnlineTraining(**LEARN | {"share": 1.0, "judge_every": 1})
    spec = wrap(model, "eagle3_one_model", draft=random_head(model), learn=learn, **SIZES)
    learner = spec.learner
    assert isinstance(learner, OnlineLearner)
    serve(spec, model, prompts(8, 1))
    with learner.paused():
        known = len(learner.history)
        # The thread waits for its turn.
        time.sleep(3 * LOOK_AGAIN)
        assert spec.learn(2).steps == 2 and len(learner.history) == known + 1
        spec.save_head(tmp_path)
        spec.close()
    assert load_eagle3(tmp_path, model) and not threads()


def test_a_thread_rests_when_nothing_more_comes_of_it(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_learner, "PATIENCE", 3)
    learn = OnlineTraining(**LEARN | {"share": 1.0, "judge_every": 1, "learning_rate": 1e-9})
    with wrap(model, "eagle3_one_model", draft=random_head(model), learn=learn, **SIZES) as spec:
        learner = spec.learner
        assert isinstance(learner, OnlineLearner)
        rested = []
        for seed in (1, 2):
            serve(spec, model, prompts(8, seed))
            rested.append(steps_at_rest(learner, after=rested[-1] if rested else 0))
        assert 3 <= rested[0] < rested[1] < 200


def steps_at_rest(learner: OnlineLearner, after: int) -> int:
    """Steps that were made, more than ``after``, once there are no more."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with learner.paused():
            if learner._steps > after and learner._in_vain >= online_learner.PATIENCE and not learner._arrived:
                return learner._steps
        time.sleep(LOOK_AGAIN)
    raise AssertionError("it does not rest")


def test_a_callback_may_close_and_not_learn(model: LlamaForCausalLM) -> None:
    learn = OnlineTraining(**LEARN | {"share": 1.0, "judge_every": 1})
    spec = wrap(model, "eagle3_one_model", draft=random_head(model), learn=learn, **SIZES)
    serve(spec, model, prompts(8, 1))
    refused: list[BaseException] = []

    def end(*_: Any) -> bool:
        try:
            spec.learn(1)
        except InsideStep as error:
            refused.append(error)
        spec.close()
        return True

    # Whatever its thread waits for, the step ends.
    spec.generate(torch.tensor(prompts(1, 1)), max_new_tokens=2, stopping_criteria=[end])
    assert refused and spec.closed


def test_a_dropped_speculator_ends_its_thread(model: LlamaForCausalLM) -> None:
    spec = wrap(model, "eagle3_one_model", draft=random_head(model), learn=OnlineTraining(), **SIZES)
    del spec
    until = time.monotonic() + 10
    while time.monotonic() < until and threads():
        time.sleep(0.05)
    assert not threads()


def test_other_threads_keep_their_number_of_threads(model: LlamaForCausalLM) -> None:
    before = torch.get_num_threads()
    with wrap(model, "eagle3_one_model", draft=random_head(model), learn=OnlineTraining(), **SIZES):
        assert torch.get_num_threads() == before
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [before]


# --- copies of weights that executables read ------------------------------------------------------


@pytest.mark.parametrize("form", ["same", "int8", "int4"])
def test_packed_weights_follow_what_is_adopted(model: LlamaForCausalLM, form: WeightForm) -> None:
    packs, linear, other = (
        WeightPacks(WeightForms(form)),
        torch.nn.Linear(64, 40, bias=False),
        torch.nn.Linear(64, 40, bias=False),
    )
    packed = [packs.of(name, module.weight.detach()).tensors for name, module in (("a", linear), ("b", other))]
    kept = [tensor.clone() for tensor in packed[1]]
    with wrap(model, "none", max_len=16, backend="eager") as spec:
        adoption = WeightUpdate(linear, packs, spec._open()[1], spec.engine.loop)
        value = torch.randn(40, 64)
        adoption({"weight": value})
    expected = WeightPacks(WeightForms(form)).of("a", value).tensors
    assert torch.equal(linear.weight, value) and all(map(torch.equal, packed[0], expected))
    assert all(map(torch.equal, packed[1], kept))


# --- what cannot learn -----------------------------------------------------------------------------


@pytest.mark.parametrize("learn", ["yes", OnlineTraining])
def test_what_is_no_training_is_refused(model: LlamaForCausalLM, learn: Any) -> None:
    with raises(InvalidOption, where="wrap", name="learn", value=learn, reason=re.compile(r"an OnlineTraining\(")):
        wrap(model, "eagle3_one_model", draft=random_head(model), learn=learn, **SIZES)


def test_heads_that_are_no_chain_are_refused(model: LlamaForCausalLM) -> None:
    head = Eagle3Head.random(model, taps=TAPS, draft_vocab_size=VOCAB, mask_token_id=5)
    with raises(InvalidOption, name="learn", reason=re.compile("no head that can be trained")):
        wrap(model, "eagle3_one_model", draft=head, learn=OnlineTraining(), **SIZES)


def test_without_it_there_is_none(model: LlamaForCausalLM) -> None:
    with wrap(model, "none", max_len=16, backend="eager") as spec, raises(InvalidOption, name="learn"):
        spec.learn(1)
