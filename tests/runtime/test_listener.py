"""What hears tokens: streamers, stop strings and stopping criteria, one request at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from speccompile.errors import InvalidInput, UserError
from speccompile.runtime.listener import Listener, check_streamer, make_criteria
from support.errors import raises
from support.letters import tokenizer
from support.recorder import Recorder


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return tokenizer()


def listener(prompt: list[int] | None = None, room: int = 10, streamer: Any = None, criteria: Any = ()) -> Listener:
    return Listener(torch.tensor([prompt or [5, 6]]), room, streamer, StoppingCriteriaList(criteria))


def never(ids: torch.Tensor, scores: None) -> torch.Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


# --- the listener --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streamer", "criteria", "is_silent"), [(None, [], True), (Recorder(), [], False), (None, [never], False)]
)
def test_silent_means_that_nobody_listens(streamer: Any, criteria: list[Any], is_silent: bool) -> None:
    assert listener(streamer=streamer, criteria=criteria).is_silent == is_silent


def test_without_a_streamer_nothing_happens_at_start_and_end() -> None:
    heard = listener()
    heard.start()
    assert heard.notify(3) is False
    heard.end()


def test_criteria_see_the_prompt_and_all_tokens_and_no_scores() -> None:
    seen: list[Any] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        seen.append((ids.dtype, ids.tolist(), scores))
        return torch.tensor([False])

    heard = listener(criteria=[criterion])
    heard.notify(7)
    heard.notify(8)
    assert seen == [(torch.int64, [[5, 6, 7]], None), (torch.int64, [[5, 6, 7, 8]], None)]


def test_the_ids_that_a_criterion_keeps_stay_what_they_were() -> None:
    kept: list[torch.Tensor] = []

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        kept.append(ids)
        return torch.tensor([False])

    heard = listener(criteria=[criterion])
    for token in (7, 8, 9):
        heard.notify(token)
    assert [ids.tolist() for ids in kept] == [[[5, 6, 7]], [[5, 6, 7, 8]], [[5, 6, 7, 8, 9]]]


@pytest.mark.parametrize("answer", [True, torch.tensor([True]), torch.tensor(True), 1])
def test_a_criterion_may_answer_in_several_ways(answer: Any) -> None:
    assert listener(criteria=[lambda ids, scores: answer]).notify(7) is True


def test_one_criterion_of_several_is_enough() -> None:
    assert listener(criteria=[never, lambda ids, scores: torch.tensor([True]), never]).notify(7) is True
    assert listener(criteria=[never, never]).notify(7) is False


def test_there_is_room_for_every_token() -> None:
    heard = listener(prompt=[1, 2, 3], room=4, criteria=[MaxLengthCriteria(max_length=7)])
    assert [heard.notify(token) for token in range(4)] == [False, False, False, True]


# --- arguments -----------------------------------------------------------------------------------


class OnlyPut:
    def put(self, value: torch.Tensor) -> None: ...


class OnlyEnd:
    def end(self) -> None: ...


@pytest.mark.parametrize("streamer", [OnlyPut(), OnlyEnd(), print, "text", 5, [Recorder()]])
def test_what_is_no_streamer(streamer: Any) -> None:
    with raises(InvalidInput, name="streamer", reason=re.compile("it has no methods put and end")):
        check_streamer(streamer)


def test_what_is_a_streamer(letters: PreTrainedTokenizerFast) -> None:
    for streamer in (None, Recorder(), TextStreamer(letters)):
        check_streamer(streamer)


def test_nothing_to_stop_at() -> None:
    assert list(make_criteria(None, None, None)) == []
    assert list(make_criteria(None, None, [])) == []


@pytest.mark.parametrize(
    "form", [lambda one: one, lambda one: [one], lambda one: (one,), lambda one: StoppingCriteriaList([one])]
)
def test_forms_of_stopping_criteria(form: Callable[[Any], Any]) -> None:
    assert list(make_criteria(None, None, form(never))) == [never]


@pytest.mark.parametrize("given", [5, "stop", [never, 5], {}, [None]])
def test_what_is_no_criterion(given: Any) -> None:
    with raises(InvalidInput, name="stopping_criteria", reason=re.compile("not a StoppingCriteria")):
        make_criteria(None, None, given)


@pytest.mark.parametrize("stop", ["", [], [""], ["ab", ""], ["ab", 5], [b"ab"], ()])
def test_what_is_no_stop_text(letters: PreTrainedTokenizerFast, stop: Any) -> None:
    with raises(InvalidInput, name="stop", reason=re.compile("must be a text or a list of texts")):
        make_criteria(stop, letters, None)


@pytest.mark.parametrize("stop", [5, True, 1.5, b"ab", {"ab": 1}])
def test_a_stop_that_is_no_sequence_is_a_users_mistake_too(letters: PreTrainedTokenizerFast, stop: Any) -> None:
    with pytest.raises(UserError):
        make_criteria(stop, letters, None)


def test_stop_texts_need_a_tokenizer() -> None:
    with raises(InvalidInput, name="stop", reason=re.compile("stop strings need tokenizer=")):
        make_criteria("ab", None, None)


def test_a_tokenizer_alone_stops_nothing(letters: PreTrainedTokenizerFast) -> None:
    assert list(make_criteria(None, letters, None)) == []


# --- stop strings --------------------------------------------------------------------------------


def stops_at(prompt: str, text: list[str], stop: Any, letters: PreTrainedTokenizerBase) -> int | None:
    """The place in ``text`` (a list of tokens) of the one that completes a stop string."""
    ids = letters.convert_tokens_to_ids([*letters.tokenize(prompt), *text])
    count = len(ids) - len(text)
    heard = Listener(torch.tensor([ids[:count]]), len(text), None, make_criteria(stop, letters, None))
    return next((place for place, token in enumerate(ids[count:]) if heard.notify(token)), None)


@pytest.mark.parametrize(
    ("text", "stop", "place"),
    [
        (["ab", "c", "d"], "c", 1),
        (["ab", "c", "d"], "abc", 1),
        # One that straddles three tokens, and ends inside of the third.
        (["ga", "b", "ch", "d"], "abc", 2),
        # Two texts: the one that is complete first.
        (["a", "b", "c", "d"], ["cd", "b"], 1),
        # What begins like it is none.
        (["ab", "ab", "ad"], "abc", None),
        # One that begins twice.
        (["a", "a", "b"], "aab", 2),
        (["ab", "ab", "c"], "ababc", 2),
    ],
)
def test_a_stop_string_ends_with_the_token_that_completes_it(
    letters: PreTrainedTokenizerFast, text: list[str], stop: Any, place: int | None
) -> None:
    assert stops_at("h", text, stop, letters) == place


def test_a_stop_string_may_have_begun_in_the_prompt(letters: PreTrainedTokenizerFast) -> None:
    assert stops_at("hab", ["c", "d"], "bc", letters) == 0


def test_a_stop_string_in_the_prompt_alone_stops_nothing(letters: PreTrainedTokenizerFast) -> None:
    assert stops_at("abc", ["d", "e"], "abc", letters) is None


@pytest.mark.real
def test_stop_strings_of_a_real_tokenizer(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    """Bytes, spaces before words, a character of three tokens."""
    _, words = smollm2
    ids = words("The sky is blue.\n\nAnd 你好 is Chinese.", add_special_tokens=False).input_ids
    for stop in (".\n", " is b", "好", "Chinese"):
        heard = Listener(torch.tensor([ids[:1]]), len(ids), None, make_criteria(stop, words, None))
        place = next(place for place, token in enumerate(ids[1:], 1) if heard.notify(token))
        assert stop in words.decode(ids[: place + 1]), stop
        assert stop not in words.decode(ids[:place]), stop


def test_a_listener_made_in_inference_mode_hears_outside_of_it() -> None:
    class At(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
            return input_ids.shape[1] == 5

    with torch.inference_mode():
        listener = Listener(torch.tensor([[1, 2, 3]]), 10, None, make_criteria(None, None, At()))
    assert [listener.notify(token) for token in (7, 8)] == [False, True]


def test_stop_strings_know_tokens_that_were_added_meanwhile() -> None:
    letters = tokenizer()
    assert not bool(make_criteria("abc", letters, None)(torch.tensor([[0, 1]]), None).all())
    letters.add_tokens(["xabcx"])
    criteria = make_criteria("abc", letters, None)
    new = torch.tensor([[letters.convert_tokens_to_ids("xabcx")]])
    assert bool(criteria(new, None).all())
