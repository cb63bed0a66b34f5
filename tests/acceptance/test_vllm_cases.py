"""The cases of vLLM's tests of its rejection sampler (tests/v1/sample/test_rejection_sampler.py), by their names."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from speccompile.sampling.top_k import TopK
from speccompile.sampling.top_p import TopP
from support.rules import LOSSY, RULES

VOCAB = 100
ALL = RULES | LOSSY
#: ``relaxed`` is for greedy requests alone.
DRAWING = [name for name in ALL if name != "relaxed"]
RULES_AND_TEMPERATURES = [(name, t) for name in ALL for t in (0.0, 1.0) if t == 0 or name in DRAWING]


@dataclass(frozen=True)
class Batch:
    """Rows of drafts, and what the target chooses after each of them, certainly."""

    drafts: list[list[int]]
    chosen: list[list[int]]
    emitted: list[list[int]]


CASES = {
    "perfect_match": Batch([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    "early_mismatch": Batch([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
    "mismatch_at_once": Batch([[1, 2, 3]], [[9, 2, 3, 4]], [[9]]),
    "mismatch_at_the_end": Batch([[1, 2, 3]], [[1, 2, 9, 4]], [[1, 2, 9]]),
    "multiple_sequences": Batch([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
    "single_token_sequence": Batch([[1]], [[1, 2]], [[1, 2]]),
    "empty_sequence": Batch([[]], [[5]], [[5]]),
    "multiple_mismatches": Batch(
        [[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]
    ),
    "mismatch_twice_in_a_row": Batch([[1, 2, 3]], [[7, 2, 8, 4]], [[7]]),
    "ragged_batch": Batch(
        [[1, 2, 3], [], [4], [5, 6]], [[1, 2, 3, 9], [8], [7, 9], [5, 6, 9]], [[1, 2, 3, 9], [8], [7], [5, 6, 9]]
    ),
    "same_token_again": Batch([[2, 2, 2]], [[2, 2, 2, 2]], [[2, 2, 2, 2]]),
    "bonus_token": Batch([[1, 2]], [[1, 2, 99]], [[1, 2, 99]]),
}  # fmt: skip


def padded(drafts: list[list[int]], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[B, width]``, -1 after a row's own, and their number ``[B]``."""
    rows = [row + [-1] * (width - len(row)) for row in drafts]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width), torch.tensor([len(row) for row in drafts])


def certain_scores(chosen: list[list[int]], width: int) -> torch.Tensor:
    """Scores that leave no doubt; after a row's last place they say nothing."""
    scores = torch.full((len(chosen), width + 1, VOCAB), -100.0)
    for row, tokens in enumerate(chosen):
        for place, token in enumerate(tokens):
            scores[row, place, token] = 100.0
    return scores


def run(
    rule: str,
    scores: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    seed: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
) -> list[list[int]]:
    """What each row emits."""
    rows = len(lens)
    heat = torch.full((rows,), temperature) if isinstance(temperature, float) else temperature
    seed = torch.arange(rows) if seed is None else seed
    length = torch.full((rows,), 7)
    tokens, accepted = ALL[rule](scores, drafts, lens, length, heat, seed, draft_probs)
    return [row[: a + 1] for row, a in zip(tokens.tolist(), accepted.tolist(), strict=True)]


def random_step(rows: int, count: int, vocab: int = VOCAB, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Scores, drafts that were drawn from the probabilities that come with them, and draft lengths."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, count + 1, vocab, generator=rng)
    probs = (scores[:, :count] + 0.5 * torch.randn(rows, count, vocab, generator=rng)).softmax(-1)
    drafts = torch.multinomial(probs.reshape(-1, vocab), 1, generator=rng).reshape(rows, count)
    return scores, drafts, torch.full((rows,), count), probs


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("rule", "temperature"), RULES_AND_TEMPERATURES)
def test_a_certain_target_emits_what_vllm_expects(rule: str, temperature: float, case: str, with_probs: bool) -> None:
    """Of a target that is certain, whatever the drafter's probabilities were."""
    batch = CASES[case]
    width = max(len(row) for row in batch.drafts)
    drafts, lens = padded(batch.drafts, width)
    probs = torch.full((len(lens), width, VOCAB), 1 / VOCAB) if with_probs else None
    scores = certain_scores(batch.chosen, width)
    assert run(rule, scores, drafts, lens, temperature, draft_probs=probs) == batch.emitted


@pytest.mark.parametrize(("rule", "temperature"), RULES_AND_TEMPERATURES)
def test_a_ragged_batch_is_its_rows_alone(rule: str, temperature: float) -> None:
    scores, drafts, _, _ = random_step(6, 4)
    lens = torch.tensor([4, 0, 2, 1, 3, 4])
    drafts = torch.where(torch.arange(4) < lens[:, None], drafts, -1)
    together = run(rule, scores, drafts, lens, temperature)
    for row, count in enumerate(lens.tolist()):
        here = slice(row, row + 1)
        narrow = (scores[here, : count + 1], drafts[here, :count], lens[here])
        assert run(rule, *narrow, temperature, torch.tensor([row])) == [together[row]]


@pytest.mark.parametrize("rule", DRAWING)
def test_the_bonus_token_is_drawn_from_the_target(rule: str) -> None:
    """After drafts that all stay: about as often as the target says, whatever the drafter said."""
    rows = 4000
    scores = certain_scores([[1, 2]] * rows, 2)
    likely = torch.tensor([0.6, 0.3, 0.1])
    scores[:, 2] = float("-inf")
    scores[:, 2, 10:13] = likely.log()
    drafts, lens = padded([[1, 2]] * rows, 2)
    got = run(rule, scores, drafts, lens)
    assert all(row[:2] == [1, 2] and len(row) == 3 for row in got)
    share = torch.bincount(torch.tensor([row[2] - 10 for row in got]), minlength=3) / rows
    assert ((share - likely).abs() < 4 * (likely * (1 - likely) / rows).sqrt()).all()


@pytest.mark.parametrize("option", ["top_k", "top_p"])
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("rule", DRAWING)
def test_emitted_tokens_are_the_targets_support(rule: str, with_probs: bool, option: str) -> None:
    """What is emitted is in the target's support, also where drafts are not; and nothing in it is out of reach."""
    rows, count = 600, 3
    scores, drafts, lens, probs = random_step(rows, count, vocab=12)
    # One context for all rows, so that its whole support comes up.
    scores = scores[:1].expand(rows, -1, -1).contiguous()
    nothing = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, dtype=torch.int64)
    if option == "top_k":
        TopK().apply(scores, *nothing, torch.full((rows,), 3))
    else:
        TopP().apply(scores, *nothing, torch.full((rows,), 0.5))
    inside = scores > float("-inf")
    assert (inside.sum(-1) < 12).all()
    got = run(rule, scores, drafts, lens, draft_probs=probs if with_probs else None)
    for row, tokens in enumerate(got):
        assert all(inside[row, place, token] for place, token in enumerate(tokens))
    assert {tokens[0] for tokens in got} == set(inside[0, 0].nonzero()[:, 0].tolist())


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("seeded", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rule", DRAWING)
def test_deterministic_when_seeded(rule: str, seeded: float, count: int) -> None:
    """Rows of the same seed emit the same in every run, whatever seeds the others have; others do not."""
    rows = 20
    scores, drafts, lens, probs = random_step(rows, count)
    fixed = torch.arange(rows) < seeded * rows
    runs = []
    for repeat in range(5):
        seed = torch.where(fixed, torch.arange(rows), 1000 * (repeat + 1) + torch.arange(rows))
        runs.append(run(rule, scores, drafts, lens, seed=seed, draft_probs=probs))
    for row in range(rows):
        if fixed[row]:
            assert all(again[row] == runs[0][row] for again in runs)
    if seeded < 1:
        assert any(again[row] != runs[0][row] for again in runs for row in range(rows) if not fixed[row])


@pytest.mark.parametrize("rule", list(RULES))
def test_greedy_rows_among_sampled_rows(rule: str) -> None:
    """They emit the target's own choices; the others what they emit without greedy neighbours."""
    rows, count = 40, 3
    scores, drafts, lens, probs = random_step(rows, count)
    is_greedy = torch.arange(rows) % 2 == 0
    # Some drafts of every row are the target's choice.
    best = scores.argmax(-1)
    drafts[:, :2] = torch.where(torch.arange(rows)[:, None] % 3 == 0, best[:, :2], drafts[:, :2])
    mixed = run(rule, scores, drafts, lens, torch.where(is_greedy, 0.0, 1.0), draft_probs=probs)
    drawn = run(rule, scores, drafts, lens, 1.0, draft_probs=probs)
    accepted = 0
    for row in range(rows):
        if is_greedy[row]:
            accepted += len(mixed[row]) - 1
            assert mixed[row] == best[row, : len(mixed[row])].tolist()
        else:
            assert mixed[row] == drawn[row]
    assert accepted > 0
