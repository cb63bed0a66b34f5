"""The functions that passes trace into a step, against plain Python that does one row at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.commit import commit
from speccompile.ops.draft_rows import cut_drafts
from speccompile.ops.step_inputs import newest_and_drafts
from speccompile.passes.step.drafts import no_drafts, proposed_drafts, useful_lens
from speccompile.passes.step.greedy_accept import greedy_accept
from speccompile.passes.step.last_logits import at_index
from speccompile.passes.step.verify_inputs import first_places, prompt_chunk

# --- acceptance ----------------------------------------------------------------------------------


def accepted_by_hand(target: tuple[int, ...], drafts: tuple[int, ...], draft_len: int) -> int:
    count = 0
    while count < draft_len and drafts[count] == target[count]:
        count += 1
    return count


@pytest.mark.parametrize(("vocab", "draft_len"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("padding", [0, 2])
def test_greedy_accept_is_enumerated(vocab: int, draft_len: int, padding: int) -> None:
    """Every target, every draft (-1 is none) and every draft length there can be, one row each."""
    cases = list(
        itertools.product(
            itertools.product(range(vocab), repeat=draft_len + 1),
            itertools.product(range(-1, vocab), repeat=draft_len),
            range(draft_len + 1),
        )
    )
    targets, drafts, lens = zip(*cases, strict=True)
    generator = torch.Generator().manual_seed(0)
    # The target's choice leads by less than the other logits vary; places after K+1 are padding.
    logits = torch.rand(len(cases), draft_len + 1 + padding, vocab, generator=generator)
    logits[:, : draft_len + 1].scatter_(2, torch.tensor(targets)[:, :, None], 1.001)
    got_targets, got = greedy_accept(
        logits, torch.tensor(drafts, dtype=torch.int64).reshape(len(cases), draft_len), torch.tensor(lens)
    )
    assert got_targets.tolist() == [list(target) for target in targets]
    assert got.tolist() == [accepted_by_hand(*case) for case in cases]


def test_ties_go_to_the_lowest_id_as_in_transformers() -> None:
    target, _ = greedy_accept(torch.tensor([[[1.0, 3.0, 3.0]]]), torch.empty(1, 0, dtype=torch.int64), torch.zeros(1))
    assert target.tolist() == [[1]]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("spoiled", ["one logit", "all logits"])
def test_where_logits_are_nan_no_token_is_chosen(spoiled: str, padding: int) -> None:
    """Every set of spoiled places of a step with three drafts, all of them right: what is sound is judged as ever."""
    places, vocab = 4, 5
    cases = list(itertools.product([False, True], repeat=places))
    right = [3, 1, 4, 2]
    logits = torch.rand(len(cases), places + padding, vocab, generator=torch.Generator().manual_seed(0))
    # Padding is not judged, whatever is there.
    logits[:, places:] = torch.nan
    logits[:, :places].scatter_(2, torch.tensor([right] * len(cases))[:, :, None], 2.0)
    for row, case in enumerate(cases):
        for place in range(places):
            if case[place]:
                logits[row, place, slice(None) if spoiled == "all logits" else 0] = torch.nan
    target, accepted = greedy_accept(logits, torch.tensor([right[:3]] * len(cases)), torch.tensor([3] * len(cases)))
    for row, case in enumerate(cases):
        assert target[row].tolist() == [-1 if nan else token for nan, token in zip(case, right, strict=True)]
        assert int(accepted[row]) == (case[:3].index(True) if any(case[:3]) else 3)


def test_infinite_logits_are_chosen_as_in_transformers() -> None:
    logits = torch.tensor([[[1.0, torch.inf, 3.0], [-torch.inf, -torch.inf, 0.5], [-torch.inf] * 3]])
    target, _ = greedy_accept(logits, torch.tensor([[1, 2]]), torch.tensor([2]))
    assert target.tolist() == logits.argmax(-1).tolist() == [[1, 2, 0]]


# --- commit --------------------------------------------------------------------------------------

SLOTS, DUMMY = 4, 4
PLACES = 14
MAX_LEN = 10
VOCAB = 5


@st.composite
def commits(draw: st.DrawFn) -> dict[str, Any]:
    """State of all slots and the outcome of a step, as lists: what :func:`commit` takes, by its names."""
    draft_len = draw(st.integers(0, 3))

    def ints(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    alive, length, limit = [], [], []
    for slot in range(SLOTS + 1):
        alive.append(slot != DUMMY and draw(st.booleans()))
        length.append(ints(1, MAX_LEN - 1 if alive[-1] else MAX_LEN))
        # A row that is alive has something left to emit; of the others nothing is known.
        limit.append(ints(length[-1] + 1 if alive[-1] else 0, MAX_LEN))
    used = draw(st.lists(st.sampled_from(range(SLOTS)), unique=True, max_size=SLOTS))
    slots = draw(st.permutations(used + [DUMMY] * ints(0 if used else 1, 2)))
    row_accepted = [ints(0, draft_len) for _ in slots]
    case = {
        "tokens": [[ints(0, VOCAB - 1) for _ in range(PLACES)] for _ in range(SLOTS + 1)],
        "length": length,
        "limit": limit,
        "alive": alive,
        "eos": [draw(st.lists(st.integers(-1, VOCAB - 1), min_size=2, max_size=2)) for _ in range(SLOTS + 1)],
        "emitted": [ints(0, 4) for _ in range(SLOTS + 1)],
        "accepted": [ints(0, 4) for _ in range(SLOTS + 1)],
        "proposed": [ints(0, 4) for _ in range(SLOTS + 1)],
        "slots": slots,
        # -1, where no token could be chosen, is also what fills "eos".
        "target_tokens": [[ints(-1, VOCAB - 1) for _ in range(draft_len + 1)] for _ in slots],
        "row_accepted": row_accepted,
        "row_draft_lens": [ints(accepted, draft_len) for accepted in row_accepted],
    }
    if draw(st.booleans()):
        case["ready"] = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    return case


def commit_by_hand(case: dict[str, Any]) -> None:
    """Changes the lists of ``case`` as :func:`commit` ought to change its tensors."""
    for row, slot in enumerate(case["slots"]):
        acts = case["alive"][slot] and case.get("ready", [True] * len(case["slots"]))[row]
        emitted: list[int] = []
        if acts:
            for token in case["target_tokens"][row][: case["row_accepted"][row] + 1]:
                if token < 0:
                    # With drafts they may be to blame: the row goes on, and is decided without any.
                    case["alive"][slot] = case["row_draft_lens"][row] > 0
                    break
                emitted.append(token)
                start = case["length"][slot]
                case["tokens"][slot][start] = token
                case["length"][slot] += 1
                if token in case["eos"][slot] or case["length"][slot] == case["limit"][slot]:
                    case["alive"][slot] = False
                    break
        case["emitted"][slot] = len(emitted)
        case["accepted"][slot] = min(case["row_accepted"][row], len(emitted))
        case["proposed"][slot] = case["row_draft_lens"][row] if acts else 0


@settings(deadline=None, max_examples=300)
@given(commits())
def test_commit_is_what_one_row_at_a_time_would_do(case: dict[str, Any]) -> None:
    tensors = {name: torch.tensor(value) for name, value in case.items()}
    assert commit(**tensors) is None
    commit_by_hand(case)
    for name, value in case.items():
        assert tensors[name].tolist() == value, name


def one_row(**changes: Any) -> dict[str, Any]:
    """A row of 3 tokens in slot 0 that accepted 2 of 3 drafts; slot 1 is the dummy."""
    case: dict[str, Any] = {
        "tokens": [[7, 7, 7, 0, 0, 0, 0, 0], [0] * 8],
        "length": [3, 1],
        "limit": [8, 8],
        "alive": [True, False],
        "eos": [[-1, -1], [-1, -1]],
        "emitted": [0, 0],
        "accepted": [0, 0],
        "proposed": [0, 0],
        "slots": [0],
        "target_tokens": [[4, 5, 6, 9]],
        "row_accepted": [2],
        "row_draft_lens": [3],
    }
    tensors = {name: torch.tensor(value) for name, value in (case | changes).items()}
    commit(**tensors)
    return {name: value[0].tolist() for name, value in tensors.items()}


def test_commit_appends_the_accepted_and_the_bonus_token() -> None:
    after = one_row()
    assert after["tokens"] == [7, 7, 7, 4, 5, 6, 0, 0] and after["length"] == 6 and after["alive"]
    assert (after["emitted"], after["accepted"], after["proposed"]) == (3, 2, 3)


def test_commit_cuts_behind_the_first_eos() -> None:
    after = one_row(eos=[[-1, 5], [-1, -1]])
    assert after["tokens"] == [7, 7, 7, 4, 5, 0, 0, 0] and after["length"] == 5 and not after["alive"]
    assert (after["emitted"], after["accepted"]) == (2, 2)
    # An EOS among what was not accepted is none.
    assert one_row(eos=[[9, -1], [-1, -1]])["alive"]


def test_commit_cuts_at_the_limit() -> None:
    after = one_row(limit=[4, 8])
    assert after["tokens"] == [7, 7, 7, 4, 0, 0, 0, 0] and after["length"] == 4 and not after["alive"]
    assert (after["emitted"], after["accepted"]) == (1, 1)


def test_commit_ends_a_row_where_no_token_could_be_chosen() -> None:
    after = one_row(target_tokens=[[-1]], row_accepted=[0], row_draft_lens=[0])
    assert after["tokens"] == [7, 7, 7, 0, 0, 0, 0, 0] and after["length"] == 3 and not after["alive"]
    assert after["emitted"] == 0
    # A chunk that is not its prompt's last has no say.
    assert one_row(target_tokens=[[-1]], row_accepted=[0], row_draft_lens=[0], ready=[False])["alive"]


@pytest.mark.parametrize("sound", [0, 1, 2])
def test_commit_emits_what_was_chosen_in_front_of_it(sound: int) -> None:
    """With drafts the row goes on: they may be what spoiled it, and a step without them shows it."""
    target = [4, 5, 6, 9]
    target[sound] = -1
    after = one_row(target_tokens=[target])
    assert after["tokens"] == [7, 7, 7, *target[:sound], *[0] * (5 - sound)] and after["length"] == 3 + sound
    assert after["alive"]
    assert (after["emitted"], after["accepted"]) == (sound, sound)


def test_commit_does_not_look_behind_what_was_accepted_or_behind_an_end() -> None:
    whole = one_row()
    assert one_row(target_tokens=[[4, 5, 6, -1]])["tokens"] == whole["tokens"]
    for ends in ({"eos": [[5, -1], [-1, -1]]}, {"limit": [5, 8]}):
        after = one_row(target_tokens=[[4, 5, -1, 9]], **ends)
        assert after["tokens"] == [7, 7, 7, 4, 5, 0, 0, 0] and not after["alive"]
        assert after["emitted"] == 2


def test_commit_leaves_rows_alone_that_are_not_ready_or_not_alive() -> None:
    for changes in ({"ready": [False]}, {"alive": [False, False]}):
        after = one_row(**changes)
        assert after["tokens"] == [7, 7, 7, 0, 0, 0, 0, 0] and after["length"] == 3
        assert (after["emitted"], after["accepted"], after["proposed"]) == (0, 0, 0)
    assert one_row(ready=[False])["alive"]


# --- drafts --------------------------------------------------------------------------------------


def test_useful_lens_are_enumerated() -> None:
    cases = list(itertools.product(range(5), range(1, 7), range(7)))
    lens, length, limit = (torch.tensor(column) for column in zip(*cases, strict=True))
    # A step emits at least one token, so the last one that fits needs no draft.
    expected = [max(0, min(n, top - done - 1)) for n, done, top in cases]
    assert useful_lens(lens, length, limit).tolist() == expected


def test_no_drafts_are_none() -> None:
    drafts, lens = no_drafts(torch.tensor([2, 0, 1]))
    assert drafts.shape == (3, 0) and drafts.dtype is torch.int64 and lens.tolist() == [0, 0, 0]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 4), st.data())
def test_proposed_drafts_are_those_of_the_slot(draft_len: int, data: st.DataObject) -> None:
    longest, slots = 4, data.draw(st.permutations(range(3)))
    proposals = [data.draw(st.lists(st.integers(0, 9), min_size=longest, max_size=longest)) for _ in range(3)]
    lens = [data.draw(st.integers(0, longest)) for _ in range(3)]
    room = [data.draw(st.integers(0, 6)) for _ in range(3)]
    drafts, row_lens = proposed_drafts(
        torch.tensor(proposals),
        torch.tensor(lens),
        torch.tensor([5, 6, 7]),
        torch.tensor([5, 6, 7]) + torch.tensor(room),
        torch.tensor(slots),
        draft_len=draft_len,
    )
    for row, slot in enumerate(slots):
        count = max(0, min(lens[slot], draft_len, room[slot] - 1))
        assert row_lens[row] == count
        assert drafts[row].tolist() == proposals[slot][:count] + [-1] * (draft_len - count)


def test_drafts_of_early_exit_end_at_the_rows_own_length() -> None:
    drafted = [torch.tensor([[10 * place + row] for row in range(4)]) for place in range(3)]
    cut = cut_drafts(torch.cat(drafted, dim=1), torch.tensor([0, 1, 2, 3]), 0)
    assert cut.tolist() == [[-1, -1, -1], [1, -1, -1], [2, 12, -1], [3, 13, 23]]


# --- what the target reads -----------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    draft_len=st.integers(0, 3),
    padding=st.integers(0, 3),
    lengths=st.lists(st.integers(0, 8), min_size=3, max_size=3),
    slots=st.permutations(range(3)),
    drafts=st.lists(st.integers(-1, 12), min_size=9, max_size=9),
)
def test_newest_and_drafts(
    draft_len: int, padding: int, lengths: list[int], slots: list[int], drafts: list[int]
) -> None:
    tokens = torch.arange(3 * 12).reshape(3, 12)
    given_drafts = torch.tensor(drafts).reshape(3, 3)[:, :draft_len]
    width = draft_len + 1 + padding
    read, positions = newest_and_drafts(
        tokens, torch.tensor(lengths), torch.tensor(slots), given_drafts, width=width, vocab_size=10
    )
    for row, slot in enumerate(slots):
        # A slot that was never used has length 0: it reads its first place, which is in bounds.
        newest = max(0, lengths[slot] - 1)
        newest_token = int(tokens[slot, newest])
        # What is not a token, and padding, is read as the newest one.
        ids = [draft if 0 <= draft < 10 else newest_token for draft in given_drafts[row].tolist()]
        assert read[row].tolist() == [newest_token, *ids, *[newest_token] * padding]
        assert positions[row].tolist() == list(range(newest, newest + width))


@pytest.mark.parametrize("width", [1, 4, 8, 40])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 15])
@pytest.mark.parametrize("start", [0, 4, 12])
def test_prompt_chunk(width: int, length: int, start: int) -> None:
    if start >= length:
        start = 0
    capacity, slot = 16, 1
    tokens = torch.arange(2 * capacity).reshape(2, capacity)
    read, positions, last, ready = prompt_chunk(
        tokens, torch.tensor([2, length]), torch.tensor([slot]), torch.tensor([start]), width=width
    )
    # Places after the cache share its last one.
    places = [min(start + i, capacity - 1) for i in range(width)]
    # After the prompt its last token is read: nothing that a former owner of the slot, or an unused id, could spoil.
    of_prompt = [min(place, length - 1) for place in places]
    assert positions.tolist() == [places] and read.tolist() == [tokens[slot][of_prompt].tolist()]
    holds_last = length - 1 < start + width
    assert ready.tolist() == [holds_last]
    assert last.tolist() == [length - 1 - start if holds_last else width - 1]
    if holds_last:
        assert int(read[0, last]) == int(tokens[slot, length - 1])


def test_last_and_first_places() -> None:
    hidden = torch.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    picked = at_index(hidden, torch.tensor([2, 0]))
    assert picked.shape == (2, 1, 4)
    assert torch.equal(picked[0, 0], hidden[0, 2]) and torch.equal(picked[1, 0], hidden[1, 0])
    assert torch.equal(first_places(hidden, count=2), hidden[:, :2])
