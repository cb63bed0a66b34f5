"""Replay of drafters that only read tokens: step by step the run itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from speccompile import wrap
from speccompile.errors import DraftFailed, InvalidOption, UnknownMode
from speccompile.modes import ReadyMode, registry
from speccompile.policies.costs import CostTable, TierCost
from speccompile.traces import TokenTrace, read_token_trace, replay
from support.errors import raises
from support.tiny import tiny_llama

MODEL = tiny_llama(vocab=16, seed=3)
SHARED: dict[str, Any] = {"max_len": 96, "backend": "eager", "prefix_reuse": False}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9], [1] * 12, [3, 1, 4, 1, 5, 9, 2, 6]]
COSTS = CostTable({(1, 0): TierCost(10.0), (1, 3): TierCost(13.0, 0.01), (1, 7): TierCost(20.0)})


def host(tokens: list[int], draft_len: int) -> list[int] | None:
    """Draft the tokens that followed the newest one before; none after an odd token."""
    earlier = [place for place, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return tokens[earlier[-1] + 1 :][:draft_len] if earlier and tokens[-1] % 2 == 0 else None


def traced(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The newest token again, the third time as an id that the target does not have."""
    newest = tokens.gather(1, (length - 1)[:, None]).expand(-1, draft_len)
    known = torch.arange(draft_len) < 2
    return torch.where(known, newest, torch.full_like(newest, 99)), torch.full_like(length, draft_len)


@dataclass(frozen=True)
class Backwards(ReadyMode):
    name: ClassVar[str] = "backwards"

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = (length[:, None] - 2 - torch.arange(draft_len)).clamp(min=0)
        return tokens.gather(1, places), torch.minimum(length - 1, torch.full_like(length, draft_len))

    def explain(self) -> str:
        return "drafts the sequence backwards"


@pytest.fixture(scope="module", autouse=True)
def backwards() -> Any:
    before = dict(registry._modes)
    registry.register("backwards", Backwards)
    yield
    registry._modes.clear()
    registry._modes.update(before)


def recorded(path: Path, mode: str | Sequence[str], draft_len: int, *, submit: Any = (), **options: Any) -> TokenTrace:
    """A run of the mode, of which every prompt is a request."""
    tiers = (0, draft_len) if draft_len else (0,)
    policy = f"fixed:{draft_len}"
    with (
        wrap(MODEL, mode, tiers=tiers, policy=policy, **SHARED, **options) as spec,
        spec.record_trace(path, tokens=True, top=0),
    ):
        for index, prompt in enumerate(PROMPTS):
            spec.engine.submit(prompt, max_new_tokens=48, **{"seed": index, **dict(submit)}).result()
    return read_token_trace(path)


def steps_of(trace: TokenTrace) -> list[tuple[tuple[int, ...], ...]]:
    """Context, drafts, accepted and emitted tokens of each step, by request."""
    names = ("context", "proposed", "accepted", "emitted")
    own = [trace.steps["request"] == request.number for request in trace.requests]
    return [tuple(tuple(trace.steps[name][rows].tolist()) for name in names) for rows in own]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TokenTrace:
    return recorded(tmp_path_factory.mktemp("plain") / "t.jsonl", "none", 0)


CASES: list[tuple[str | list[str], int, dict[str, Any]]] = [
    ("ngram", 3, {}),
    ("ngram", 7, {"max_ngram": 2}),
    ("suffix", 3, {}),
    ("suffix", 7, {"min_probability": 0.0}),
    ("suffix", 3, {"remember": 512}),
    ("suffix", 3, {"corpus": [PROMPTS[0] * 3]}),
    (["suffix", "ngram"], 3, {}),
    ("backwards", 3, {}),
    ("user_provided", 3, {"draft": traced}),
    ("user_provided", 3, {"draft": host, "host": True}),
]


@pytest.mark.parametrize(("mode", "draft_len", "options"), CASES)
def test_a_replay_without_drafts_is_the_run(
    plain: TokenTrace, tmp_path: Path, mode: str, draft_len: int, options: dict[str, Any]
) -> None:
    real = recorded(tmp_path / "t.jsonl", mode, draft_len, **options)
    # Only host drafters receive the request's limit.
    for trace in (plain, real):
        found = replay(trace, mode, draft_len=draft_len, **options)
        steps = [(own.contexts, own.proposed, own.accepted, own.emitted) for own in found.requests]
        assert steps == steps_of(real)
    assert real.steps["accepted"].sum() > 0 or "draft" in options
    assert found.acceptance_length == found.tokens / found.steps


def test_predictions_are_replayed(tmp_path: Path) -> None:
    expected = [5, 6, 7, 8] * 8
    real = recorded(tmp_path / "t.jsonl", "prediction", 3, submit={"prediction": expected})
    found = replay(real, "prediction", draft_len=3)
    assert [own.accepted for own in found.requests] == [own[2] for own in steps_of(real)]


def test_eos_and_limits_of_requests_are_replayed(plain: TokenTrace, tmp_path: Path) -> None:
    # A token of the first text, in its second half.
    eos = plain.requests[0].tokens[30]
    for submit in ({"eos_token_id": eos}, {"num_draft_tokens": 2}):
        real = recorded(tmp_path / "t.jsonl", "ngram", 3, submit=submit)
        found = replay(real, "ngram", draft_len=3)
        assert [(own.proposed, own.accepted, own.emitted) for own in found.requests] == [
            own[1:] for own in steps_of(real)
        ]


def test_drawn_tokens_of_the_rule_exact_are_replayed(tmp_path: Path) -> None:
    drawn = {"do_sample": True, "temperature": 0.6}
    real = recorded(tmp_path / "a.jsonl", "ngram", 3, submit=drawn)
    assert not any(request.greedy for request in real.requests)
    found = replay(recorded(tmp_path / "b.jsonl", "none", 0, submit=drawn), "ngram", draft_len=3)
    assert [own.accepted for own in found.requests] == [own[2] for own in steps_of(real)]
    other = recorded(tmp_path / "c.jsonl", "ngram", 3, submit=drawn, acceptance="rejection")
    with raises(InvalidOption, where="replay", name="trace", reason=re.compile("lets them depend on drafts")):
        replay(other, "ngram", draft_len=3)


def test_costs_predict_a_speed(plain: TokenTrace) -> None:
    found = replay(plain, "ngram", draft_len=3, costs=COSTS)
    expected = sum(
        13.0 + 0.01 * context if proposed else 10.0
        for own in found.requests
        for context, proposed in zip(own.contexts, own.proposed, strict=True)
    )
    assert found.milliseconds == pytest.approx(expected)
    assert found.tokens_per_second == pytest.approx(1e3 * found.tokens / expected)
    assert replay(plain, "ngram", draft_len=3).tokens_per_second is None
    with raises(InvalidOption, where="replay", name="costs", reason=re.compile("K=0 and K=5, and have K=0, 3, 7")):
        replay(plain, "ngram", draft_len=5, costs=COSTS)


@pytest.mark.parametrize("mode", ["none", "recycle", "early_exit"])
def test_a_drafter_that_reads_more_than_tokens_is_refused(plain: TokenTrace, mode: str) -> None:
    options = {"exit_layer": 1} if mode == "early_exit" else {}
    with raises(InvalidOption, where="replay", name="mode", value=mode, reason=re.compile("drafts from more than tok")):
        replay(plain, mode, draft_len=3, **options)


def test_invalid_arguments_are_refused(plain: TokenTrace) -> None:
    with raises(InvalidOption, where="replay", name="draft_len", value=0):
        replay(plain, "ngram", draft_len=0)
    with raises(InvalidOption, where="replay", name="mode", value="auto"):
        replay(plain, "auto", draft_len=3)
    with raises(InvalidOption, where="replay", name="options"):
        replay(plain, Backwards(), draft_len=3, max_ngram=2)
    with raises(UnknownMode):
        replay(plain, "telepathy", draft_len=3)
    assert replay(plain, Backwards(), draft_len=3).tokens == 4 * 47

    def broken(tokens: list[int], draft_len: int) -> list[int]:
        raise KeyError(3)

    with raises(DraftFailed, reason="KeyError: 3"):
        replay(plain, "user_provided", draft_len=3, draft=broken, host=True)
