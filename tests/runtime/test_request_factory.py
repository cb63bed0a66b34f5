"""Requests are made of checked arguments, when what they run is built; what goes wrong leaves no record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import StoppingCriteriaList

from speccompile.errors import InvalidInput, InvalidOption, PlaceholderToken, UnknownOption
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind
from speccompile.graph.state import recorded_state
from speccompile.runtime.adapter_table import AdapterTable
from speccompile.runtime.options import StepTraits
from speccompile.runtime.params import Params
from speccompile.runtime.request import NoDriver, Request
from speccompile.runtime.request_factory import RequestFactory
from speccompile.runtime.request_options import SubmitOptions
from speccompile.runtime.saver import Saver
from speccompile.runtime.target import Target
from speccompile.sampling.request import Sampling
from support.engine_parts import MAX_LEN, VOCAB, small_arena
from support.errors import raises

IMAGE = 9


class AnyTarget:
    """Stands in for the wrapped model: it accepts what it is asked for, except prompts with an image."""

    calls_host = True
    only_chooses = False

    def __init__(self) -> None:
        self.chosen: Sampling | None = None

    def check(self) -> None: ...

    def eos(self, given: Any) -> list[int]:
        return given or []

    def new_tokens(self, where: str, given: int | None, prompt_length: int) -> int:
        return given or 8

    def sampling(self, where: str, options: Any, **others: Any) -> Sampling | None:
        return self.chosen

    def features_of_one(self, prompt: list[int], inputs: object) -> None:
        assert inputs is None

    def check_prompt(self, prompt: list[int], features: None) -> None:
        if IMAGE in prompt:
            raise PlaceholderToken(position=prompt.index(IMAGE), token=IMAGE, name="image")


class Reservations:
    """Stands in for the writer of records: ids that were reserved and not cancelled."""

    def __init__(self) -> None:
        self.open: list[str] = []

    def reserve(self, id: str | None) -> str:
        self.open.append(id or "made up")
        return self.open[-1]

    def cancel(self, id: str) -> None:
        self.open.remove(id)


class Bench:
    """A factory, and what it has prepared: kinds, and whether for watched tokens."""

    def __init__(self, *, saves: bool = False, drawn_options: frozenset[str] = frozenset()) -> None:
        self.arena: Arena = small_arena(*recorded_state(VOCAB, 4, scores=False))
        self.target, self.reservations = AnyTarget(), Reservations()
        self.prepared: list[tuple[Kind, bool]] = []
        saver = cast(Saver, SimpleNamespace(writer=self.reservations)) if saves else None
        adapters = cast(AdapterTable, SimpleNamespace(find=lambda where, name: None))
        self.factory = RequestFactory(
            cast(Target, self.target), self.arena, adapters, saver, StepTraits(drawn_options=drawn_options)
        )

    def prepare(self, kind: Kind, watched: bool) -> None:
        self.prepared.append((kind, watched))

    def submitted(self, ids: list[int] | torch.Tensor | None = None, **options: Any) -> Request:
        given = SubmitOptions(**options)
        ids = [1, 2] if ids is None else ids
        return self.factory.from_options(NoDriver(), self.prepare, ids, given)

    def made(self, prompt: list[int], params: Params) -> Request:
        shown = torch.tensor([prompt])
        return self.factory.make(NoDriver(), self.prepare, prompt, params, shown, None, StoppingCriteriaList())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_options_that_are_not_given_are_the_targets(bench: Bench) -> None:
    request = bench.submitted(torch.tensor([[3, 4]]))
    assert (request.prompt, request.slot, request.new_tokens) == ([3, 4], -1, [])
    assert request.params == Params(max_new_tokens=8, eos=())


def test_what_a_watched_request_runs_is_built_before_it_is_made(bench: Bench) -> None:
    bench.submitted()
    bench.submitted(logprobs=True)
    bench.made([1], Params(4, (), patient=True))
    assert bench.prepared == [("greedy", True), ("scored", True), ("greedy", False)]


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ((), []),
        (("temperature",), [{"temperature"}]),
        (("temperature", "top_k"), [{"temperature"}, {"temperature", "top_k"}]),
    ],
    ids=["no option", "temperature", "temperature and top_k"],
)
def test_requests_with_few_options_run_the_kind_drawn_where_there_is_one(
    options: tuple[str, ...], drawn: list[set[str]]
) -> None:
    values = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1}
    bench, asked = (
        Bench(drawn_options=frozenset(options)),
        [["temperature"], ["temperature", "top_k"], ["top_k"], [*values]],
    )
    for names in asked:
        bench.made([1], Params(4, (), Sampling({name: values[name] for name in names})))
    assert [kind for kind, _ in bench.prepared] == ["drawn" if set(names) in drawn else "sampled" for names in asked]


def test_an_argument_that_is_not_valid_builds_nothing(bench: Bench) -> None:
    with raises(UnknownOption, where="submit", names="num_beams"):
        bench.submitted(sampling={"num_beams": 2})
    with raises(InvalidInput, name="streamer"):
        bench.submitted(streamer=5)
    with raises(InvalidOption, where="submit", name="output_logits"):
        bench.submitted(output_logits=True)
    with raises(PlaceholderToken, position=1, token=IMAGE):
        bench.submitted([1, IMAGE])
    assert bench.prepared == []


def test_a_prompt_whose_log_probabilities_are_wanted_is_read_whole(bench: Bench) -> None:
    assert bench.submitted().params.reuse
    assert not bench.submitted(prompt_logprobs=True).params.reuse


@pytest.mark.parametrize(("length", "new"), [(2, 8), (MAX_LEN - 3, 3)])
def test_a_listener_has_room_up_to_max_len(bench: Bench, length: int, new: int) -> None:
    seen: list[int] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        seen.append(ids.shape[1])
        return torch.tensor([False])

    request = bench.submitted([1] * length, stopping_criteria=criterion)
    for token in range(new):
        assert not request.listener.notify(token)
    assert seen[-1] == length + new
    with pytest.raises(IndexError):
        request.listener.notify(0)


def test_a_request_whose_tokens_the_host_chooses_has_no_drafts_and_a_call_of_its_own(bench: Bench) -> None:
    bench.target.chosen = Sampling({"logits_processor": (lambda ids, scores: scores,)})
    first, second = bench.submitted(), bench.submitted()
    assert first.params.num_draft_tokens == second.params.num_draft_tokens == 0
    calls = [request.params.sampling and request.params.sampling.host_call for request in (first, second)]
    assert calls[0] is not None and calls[1] is not None and calls[0].number != calls[1].number
    bench.target.chosen = Sampling({"top_k": 3})
    assert bench.submitted().params.num_draft_tokens is None


# --- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("record", "ordered"), [(True, ["made up"]), ("mine", ["mine"]), (False, [])])
def test_a_record_is_ordered_where_hidden_states_are_saved(record: bool | str, ordered: list[str]) -> None:
    bench = Bench(saves=True)
    order = bench.submitted(record=record).params.record
    assert bench.reservations.open == ordered == ([] if order is None else [order.id])


def test_where_none_are_saved_an_id_is_refused(bench: Bench) -> None:
    with raises(InvalidOption, where="submit", name="record", value="mine"):
        bench.submitted(record="mine")
    assert bench.submitted(record=True).params.record is None


def test_no_record_stays_open_of_a_request_that_is_not_made() -> None:
    bench = Bench(saves=True)
    with raises(PlaceholderToken):
        bench.submitted([IMAGE], record="mine")
    assert bench.reservations.open == []
