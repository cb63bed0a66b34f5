"""Modes by name with their options, and the n-gram drafter against a search that anyone can read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import speccompile
from speccompile import modes
from speccompile.errors import DuplicateMode, InvalidOption, OptionOfAnotherMode, UnknownMode, UnknownOption
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes import registry
from speccompile.modes.base import Mode
from speccompile.modes.early_exit import EarlyExit
from speccompile.modes.ngram import NGram
from speccompile.modes.none import NoSpeculation
from speccompile.modes.ready_mode import ReadyMode
from speccompile.utils import mode_names
from support.errors import raises
from support.tiny import tiny_llama

INFO = ModelInfo("Tiny", num_layers=4, vocab_size=128, hidden_size=64, dtype=torch.float32, device=torch.device("cpu"))


@dataclass(frozen=True)
class Echo(ReadyMode):
    """Drafts the newest token again and again."""

    times: int = 2

    name: ClassVar[str] = "echo"

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        newest = tokens.gather(1, (length - 1).clamp(min=0)[:, None])
        return newest.expand(-1, draft_len), torch.full_like(length, self.times)

    def explain(self) -> str:
        return f"the newest token {self.times} times"


@pytest.fixture(autouse=True)
def registered_modes_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_modes", dict(registry._modes))


class EntryPoint:
    """What importlib.metadata hands out."""

    def __init__(self, name: str, mode: type[Mode]) -> None:
        self.name, self.mode = name, mode

    def load(self) -> type[Mode]:
        return self.mode


# --- by name -----------------------------------------------------------------------------------------------------


def test_the_modes_of_this_package() -> None:
    assert modes.available() == sorted([*mode_names.CLASSES, mode_names.AUTO])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("none", NoSpeculation),
        (None, NoSpeculation),
        ("NONE", NoSpeculation),
        ("ngram", NGram),
        ("NGram", NGram),
        ("early_exit", EarlyExit),
        ("Early_Exit", EarlyExit),
    ],
)
def test_any_case_and_none(name: str | None, mode: type[Mode]) -> None:
    assert type(modes.create(name, {})) is mode


@pytest.mark.parametrize("name", ["lookahead", "", "n-gram", "ngram ", 7])
def test_unknown(name: Any) -> None:
    with raises(UnknownMode, name=name, available=re.compile("mtp_eagle_one_model, ngram, none")):
        modes.create(name, {})


def test_register_from_outside() -> None:
    speccompile.register_mode("Echo", Echo)
    assert "echo" in modes.available()
    assert modes.create("ECHO", {"times": 3}) == Echo(3)


def test_a_registered_mode_decodes() -> None:
    speccompile.register_mode("echo", Echo)
    model = tiny_llama()
    ids = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(0))
    sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 64, "backend": "eager", "policy": "fixed:3"}
    with speccompile.wrap(model, "echo", **sizes, times=2) as spec:
        assert torch.equal(spec.generate(ids, max_new_tokens=30), greedy(model, ids, 30))
        # It offers two drafts, so two of the tier's three places are ever proposed.
        assert spec.stats.proposed_at[0] >= spec.stats.proposed_at[1] > 0
        assert spec.stats.proposed_at[2] == 0
        assert "the newest token 2 times" in spec.explain()


def greedy(model: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    assert isinstance(output, torch.Tensor)
    return output


@pytest.mark.parametrize("name", ["ngram", "NGRAM"])
def test_a_name_is_taken_once(name: str) -> None:
    with raises(DuplicateMode, name="ngram", owner="speccompile.modes.ngram.NGram"):
        modes.register(name, Echo)
    assert type(modes.create("ngram", {})) is NGram
    modes.register(name, Echo, replace=True)
    assert type(modes.create("ngram", {})) is Echo


@pytest.mark.parametrize("mode", [Echo(), "ngram", torch.nn.Linear, None])
def test_only_modes_are_registered(mode: Any) -> None:
    with raises(InvalidOption, name="mode", reason=re.compile(r"must be a subclass of speccompile\.modes\.Mode")):
        modes.register("mine", mode)
    assert "mine" not in modes.available()


def test_entry_points_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("Echo", Echo), EntryPoint("ngram", Echo)]

    monkeypatch.setattr(mode_names, "entry_points", entry_points)
    assert "echo" in modes.available()
    assert modes.create("echo", {"times": 1}) == Echo(1)
    # What is known already stays what it is.
    assert type(modes.create("ngram", {})) is NGram
    assert set(asked) == {"speccompile.modes"}


# --- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "option", "takes"),
    [
        (OptionOfAnotherMode, "none", "max_ngram", "the arguments of wrap"),
        (OptionOfAnotherMode, "ngram", "exit_layer", "the arguments of wrap, max_ngram, min_ngram"),
        (OptionOfAnotherMode, "early_exit", "max_ngram", "the arguments of wrap, exit_layer"),
        (UnknownOption, "ngram", "name", "the arguments of wrap, max_ngram, min_ngram"),
    ],
)
def test_unknown_option(kind: type[UnknownOption], mode: str, option: str, takes: str) -> None:
    with raises(kind, where=f"wrap(mode={mode!r})", names=option, known=takes):
        modes.create(mode, {option: 1})


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("max_ngram", r"^max_ngram= is an option of mode='ngram'$"),
        ("draft", "^draft= is an option of mode='auto', which chooses a mode by it, and of 'dflash', 'draft_target', "),
        ("head", "^head= is an option of mode='auto', which chooses a mode by it$"),
    ],
)
def test_an_unknown_option_names_the_modes_that_have_it(option: str, named: str) -> None:
    with raises(OptionOfAnotherMode, names=option, modes=re.compile(named)):
        modes.create("early_exit", {option: 1})


def test_an_option_of_no_mode_names_none() -> None:
    with raises(UnknownOption, names="max_lenn", known="the arguments of wrap, exit_layer"):
        modes.create("early_exit", {"max_lenn": 1})


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        ("ngram", {"max_ngram": 0}, ""),
        ("ngram", {"max_ngram": -1}, ""),
        ("ngram", {"max_ngram": 2.0}, ""),
        ("ngram", {"max_ngram": True}, ""),
        ("ngram", {"max_ngram": "3"}, ""),
        ("ngram", {"min_ngram": 0}, ""),
        ("ngram", {"max_ngram": 2, "min_ngram": 3}, "must be at most max_ngram=2"),
        ("early_exit", {"exit_layer": 0}, "1 .. 4"),
        ("early_exit", {"exit_layer": 5}, "1 .. 4"),
        ("early_exit", {"exit_layer": 1.0}, "1 .. 4"),
        ("early_exit", {"exit_layer": True}, "1 .. 4"),
        ("early_exit", {"exit_layer": None}, "1 .. 4"),
    ],
)
def test_invalid_option(mode: str, options: dict[str, Any], reason: str) -> None:
    name, value = list(options.items())[-1]
    with raises(InvalidOption, where=f"mode {mode!r}", name=name, value=value, reason=re.compile(re.escape(reason))):
        modes.create(mode, options).check(INFO)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("none", {}),
        ("ngram", {"max_ngram": 1}),
        ("ngram", {"max_ngram": 5, "min_ngram": 5}),
        ("early_exit", {"exit_layer": 1}),
        ("early_exit", {"exit_layer": 4}),
    ],
)
def test_valid_options_are_said_in_explain(mode: str, options: dict[str, int]) -> None:
    made = modes.create(mode, options)
    made.check(INFO)
    for value in options.values():
        assert str(value) in made.explain()


# --- n-gram ------------------------------------------------------------------------------------------------------


def search(text: list[int], max_ngram: int, min_ngram: int, draft_len: int) -> list[int]:
    """Longest suffix first, most recent occurrence first; the continuation starts over where the text ends."""
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                continuation = text[start + size :]
                return [continuation[i % len(continuation)] for i in range(draft_len)]
    return []


@given(
    # 0 is also what the arena is filled with: a match with what lies after the text would show.
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    draft_len=st.integers(1, 7),
    room=st.integers(0, 9),
    filler=st.integers(0, 2),
)
def test_propose_is_the_search(
    texts: list[list[int]], sizes: list[int], draft_len: int, room: int, filler: int
) -> None:
    min_ngram, max_ngram = sizes
    capacity = max(len(text) for text in texts) + room
    tokens = torch.full((len(texts), capacity), filler)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    length = torch.tensor([len(text) for text in texts])
    drafts, lens = NGram(max_ngram, min_ngram).propose(tokens, length, draft_len=draft_len)
    assert drafts.shape == (len(texts), draft_len)
    for row, text in enumerate(texts):
        got = drafts[row, : int(lens[row])].tolist()
        assert got == search(text, max_ngram, min_ngram, draft_len), f"row {row}"


@pytest.mark.parametrize(
    ("text", "max_ngram", "min_ngram", "drafts"),
    [
        # The longest suffix wins over a more recent match of a shorter one.
        ([1, 2, 3, 8, 8, 3, 9, 1, 2, 3], 3, 1, [8, 8, 3, 9]),
        # Of equally long matches the most recent one.
        ([2, 5, 6, 2, 7, 6, 2], 1, 1, [7, 6, 2, 7]),
        # Around again at the end of the text.
        ([4, 5, 4, 5], 2, 1, [4, 5, 4, 5]),
        ([3, 3], 3, 1, [3, 3, 3, 3]),
        # No match, or only a shorter one than asked for.
        ([1, 2, 3, 4], 3, 1, []),
        ([1, 2, 3, 1], 3, 2, []),
        ([1], 3, 1, []),
        # A suffix longer than what precedes it may overlap with its match.
        ([0, 0, 0], 3, 2, [0, 0, 0, 0]),
    ],
)
def test_propose_by_example(text: list[int], max_ngram: int, min_ngram: int, drafts: list[int]) -> None:
    assert search(text, max_ngram, min_ngram, 4) == drafts
    proposed, lens = NGram(max_ngram, min_ngram).propose(torch.tensor([text]), torch.tensor([len(text)]), draft_len=4)
    assert proposed[0, : int(lens[0])].tolist() == drafts


def test_a_row_without_text_proposes_nothing() -> None:
    """The dummy slot's row is empty; it must neither fail nor draft."""
    drafts, lens = NGram().propose(torch.zeros((1, 12), dtype=torch.int64), torch.tensor([0]), draft_len=3)
    assert lens.tolist() == [0]
    assert drafts.shape == (1, 3)
