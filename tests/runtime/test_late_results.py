"""Results that are read a step late: texts are the same, whatever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator, Tree
from speccompile.graph.arena import Arena
from speccompile.lowering.tier import Tier
from speccompile.runtime.outcomes import HostBuffer
from speccompile.runtime.request import Request
from speccompile.utils.devices import TRAITS
from support.engines import MAX_BATCH, MAX_LEN, VOCAB, greedy
from support.tiny import admitted, random_prompt


def wrap(model: LlamaForCausalLM, mode: str | list[str], **options: Any) -> Speculator:
    tiers = (0,) if mode == "none" else (0, 3)
    sizes = {"tiers": tiers, "max_batch": MAX_BATCH, "max_len": MAX_LEN, "policy": f"fixed:{max(tiers)}"}
    return speccompile.wrap(model, mode, backend="eager", **sizes | options)


class CancelsAt:
    """A streamer that cancels its request when it has got so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self.left = tokens
        self.request: Request | None = None
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        # The prompt comes first.
        if value.ndim == 1:
            self.left -= 1
            if self.left == 0:
                assert self.request is not None
                self.request.cancel()

    def end(self) -> None:
        self.ends += 1


def comings_and_goings(
    spec: Speculator, seed: int, asks: Callable[[list[int], int], dict[str, Any]] = lambda text, new: {}
) -> list[Request]:
    """Requests that come at random; some are cancelled between steps, some by their own streamer. ``asks`` has the
    options of a request, by its prompt and new tokens."""
    rng, engine = random.Random(seed), spec.engine
    to_come = [(random_prompt(rng.randint(1, 60), rng.randint(0, 9)), rng.randint(1, 40)) for _ in range(25)]
    requests: list[Request] = []
    patience: dict[Request, int] = {}
    streamers: dict[Request, CancelsAt] = {}
    step = 0
    while to_come or not engine.idle:
        # By the step, not by what has ended: that is seen later when results are read late.
        if to_come and step % 3 == 0:
            text, new = to_come.pop()
            streamer = CancelsAt(rng.randint(1, 20)) if rng.random() < 0.3 else None
            request = engine.submit(text, max_new_tokens=new, streamer=streamer, **asks(text, new))
            if streamer is not None:
                streamer.request, streamers[request] = request, streamer
            elif rng.random() < 0.4:
                patience[request] = rng.randint(0, 10)
            requests.append(request)
        for request, tokens in patience.items():
            if len(request.new_tokens) >= tokens:
                request.cancel()
        spec.set_tier(rng.choice(list(spec.tiers)))
        engine.step()
        step += 1
    for request, streamer in streamers.items():
        assert streamer.ends == 1
        if request.finish_reason == "cancelled":
            assert len(request.new_tokens) == streamer.tokens
        else:
            assert len(request.new_tokens) < streamer.tokens
    return requests


class Overtaken(HostBuffer):
    """What a run returned is gone from the arena when the host reads it: the next run has been there."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def fill(self, packed: torch.Tensor) -> None:
        super().fill(packed)
        for name in ("emitted", "accepted", "proposed"):
            self._arena[name].zero_()


TREE = Tree.dynamic(nodes=6, depth=3, branches=2)
#: Texts of three tokens repeat themselves, so that drafts are accepted.
FEW = {"suppress_tokens": [token for token in range(VOCAB) if token not in (5, 6, 7)]}
SAMPLED = {"do_sample": True, "temperature": 0.7, **FEW}
#: Mode, options of the wrap, options of requests.
READY: dict[str, tuple[str | list[str], dict[str, Any], dict[str, Any]]] = {
    "none": ("none", {}, {}),
    "early exit": ("early_exit", {}, {}),
    "ngram": ("ngram", {}, SAMPLED),
    "recycle": ("recycle", {"min_probability": 0.0}, {}),
    "composed": (["prediction", "suffix", "ngram"], {"max_depth": 6}, {}),
    "tree": ("ngram", {"tiers": (0, 3, TREE)}, FEW),
    "sampled tree": ("suffix", {"tiers": (0, TREE), "policy": "fixed:0", "max_depth": 6}, SAMPLED),
}


@pytest.mark.parametrize("case", READY)
def test_no_text_depends_on_when_proposals_are_known(
    model: LlamaForCausalLM, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is chosen before its drafts are known: it may be too small for them, or too large."""
    mode, of_wrap, of_request = READY[case]

    def asks(text: list[int], new: int) -> dict[str, Any]:
        predicted = {"prediction": greedy(model, text, new)} if "prediction" in mode else {}
        return {"seed": sum(text), **of_request, **predicted}

    early, late = (wrap(model, mode, **of_wrap) for _ in range(2))
    assert not early.engine.scheduler.late, "the host waits for a CPU in any case"
    late.engine.scheduler.late = True
    # Not another Outcomes for the scheduler alone: prompts must use the same buffers.
    monkeypatch.setattr(late.engine.scheduler.outcomes, "_create", partial(Overtaken, late.arena))
    expected, got = (comings_and_goings(spec, 0, asks) for spec in (early, late))
    for one, other in zip(expected, got, strict=True):
        assert other.error is None and one.prompt == other.prompt
        count = len(one.new_tokens)
        if "cancelled" in (one.finish_reason, other.finish_reason):
            count = min(count, len(other.new_tokens))
        else:
            assert one.finish_reason == other.finish_reason
        assert other.new_tokens[:count] == one.new_tokens[:count] and len(other.new_tokens) >= count
    # The likeliest tokens of a random model are rarely right.
    assert late.stats.accepted_tokens > 0 or mode in ("none", "early_exit", "recycle")
    assert late.stats.draft_tokens > 0 or mode == "none"
    reasons = [request.finish_reason for request in got]
    assert min(reasons.count("cancelled"), reasons.count("max_new_tokens")) > 3
    assert late.engine.capacity().free_slots == MAX_BATCH and not late.arena["alive"].any()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", ["ngram", "composed", "tree"])
def test_the_host_reads_one_tensor_a_step(
    model: LlamaForCausalLM, case: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU every other one would wait for the step in flight."""
    mode, of_wrap, _ = READY[case]
    spec = wrap(model, mode, **of_wrap | {"policy": "cost"})
    engine, inside, read = spec.engine, [False], []
    engine.scheduler.late = late
    requests = [admitted(engine, random_prompt(4, seed) * 3, max_new_tokens=60) for seed in range(2)]
    run_target, tolist = Tier.run_target, torch.Tensor.tolist

    def run(tier: Tier) -> None:
        inside[0] = True
        run_target(tier)
        inside[0] = False

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *arguments: Any) -> Any:
            if not inside[0]:
                read.append(name)
            return real(tensor, *arguments)

        return call

    engine.step()
    monkeypatch.setattr(Tier, "run_target", run)
    for name in ("tolist", "item", "__int__", "__bool__", "__float__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    for _ in range(8):
        engine.step()
    monkeypatch.undo()
    assert torch.Tensor.tolist is tolist and not any(request.finished for request in requests)
    assert read == ["tolist"] * 8
    for request in requests:
        request.cancel()


@pytest.mark.parametrize(
    ("mode", "options", "late"),
    [
        ("none", {}, True),
        ("early_exit", {}, True),
        ("ngram", {}, True),
        ("suffix", {"max_depth": 6}, True),
        (["prediction", "ngram"], {}, True),
        ("ngram", {"tiers": (0, TREE), "policy": "fixed:0"}, True),
        # The host drafts from the newest tokens.
        ("user_provided", {"draft": lambda text, most: text[-1:], "host": True}, False),
        # What drafts leave after the sequence may have to be cleared.
        ("ngram", {"deterministic": True}, False),
    ],
)
def test_beside_a_device_that_runs_by_itself_results_are_late_unless_a_step_needs_them(
    model: LlamaForCausalLM,
    mode: str | list[str],
    options: dict[str, Any],
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asynchronous = replace(TRAITS["cpu"], asynchronous=True)
    monkeypatch.setattr("speccompile.runtime.engine.traits_of", lambda device: asynchronous)
    with wrap(model, mode, **options) as spec:
        assert spec.engine.scheduler.late == late
        assert ("one step late" if late else "when a step ends") in spec.explain()


def test_a_late_result_lags_by_one_step(model: LlamaForCausalLM) -> None:
    """What is tested above is not the same twice: a run's tokens are handed out when the next run has been launched."""
    spec = wrap(model, "none")
    engine = spec.engine
    engine.scheduler.late = True
    request = admitted(engine, random_prompt(10), max_new_tokens=20)
    assert len(request.new_tokens) == 1
    for step in range(1, 8):
        assert engine.step() == [request]
        assert int(spec.arena["length"][request.slot]) == 10 + 1 + step
        assert len(request.new_tokens) == step
    engine.run()
    assert request.new_tokens == greedy(model, random_prompt(10), 20)
    assert engine.idle
