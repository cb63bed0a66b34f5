"""Every processor leaves what transformers' processors and warpers leave, place by place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as hf

from speccompile.errors import InvalidOption
from speccompile.graph.arena import Arena
from speccompile.graph.state import core_state, resolve_layout
from speccompile.ops.greatest import SEARCH_SIZES
from speccompile.ops.row_contexts import put_tokens
from speccompile.passes.step.sample import processed
from speccompile.sampling.pipeline import OPTIONS, PROCESSORS, USED_PROCESSORS, sampling_state
from speccompile.sampling.process_scores import state_of_all
from speccompile.sampling.request import Sampling, read_sampling
from speccompile.sampling.sequences import SequenceBias
from speccompile.sampling.top_p import TopP
from speccompile.sampling.typical_p import row_sums
from support.errors import raises
from support.sampling_options import CHOICES, VOCAB, few, options_of, tokens

MAX_LEN = 30
WIDTH = 4


def make_arena(rows: int) -> Arena:
    specs = [*core_state(VOCAB), *sampling_state()]
    layout = resolve_layout(
        specs, max_batch=rows, max_len=MAX_LEN, max_draft_len=WIDTH - 1, max_width=WIDTH, vocab_size=VOCAB
    )
    return Arena(layout, torch.device("cpu"))


def read(options: Mapping[str, Any], eos: list[int], do_sample: bool = True) -> Sampling | None:
    return read_sampling(
        "submit",
        options,
        do_sample=do_sample,
        seed=0,
        config=GenerationConfig(),
        eos=eos,
        vocab_size=VOCAB,
        num_logits=VOCAB,
    )


def ours(rows: list[dict[str, Any]], logits: torch.Tensor) -> torch.Tensor:
    """Scores ``[B, T, V]`` of rows with prompt, new tokens, drafts, options, EOS ids and limit of their own."""
    arena = make_arena(len(rows))
    slots = torch.randperm(len(rows))
    drafts = torch.tensor([row["drafts"] for row in rows])
    for row, slot in zip(rows, slots.tolist(), strict=True):
        text = row["prompt"] + row["new"]
        arena["tokens"][slot, : len(text)] = torch.tensor(text)
        arena["length"][slot] = len(text)
        arena["limit"][slot] = row["limit"]
        arena["eos"][slot, : len(row["eos"])] = torch.tensor(row["eos"])
        if (sampling := read(row["options"], row["eos"])) is not None:
            sampling.place(arena, slot, len(row["prompt"]))
    names = state_of_all(PROCESSORS)
    context = put_tokens(arena["tokens"][slots], arena["length"][slots], drafts)
    state = [arena[name] for name in names]
    columns = arena.layout.tensors[USED_PROCESSORS].columns
    length = arena["length"][slots]
    return processed(logits, context, length, slots, *state, names=names, columns=columns)


def of_transformers(row: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """The same for one row, ``[T, V]``, by transformers, which looks at one place at a time."""
    options, prompt, eos = row["options"], row["prompt"], row["eos"]
    processors = LogitsProcessorList()
    if options.get("logit_bias"):
        processors.append(
            hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in options["logit_bias"].items()])
        )
    if options.get("sequence_bias"):
        processors.append(hf.SequenceBiasLogitsProcessor(options["sequence_bias"]))
    if options.get("repetition_penalty", 1.0) != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    processors.append(Openai(len(prompt), options.get("presence_penalty", 0.0), options.get("frequency_penalty", 0.0)))
    if options.get("no_repeat_ngram_size"):
        processors.append(hf.NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    if options.get("bad_words_ids"):
        processors.append(hf.NoBadWordsLogitsProcessor(options["bad_words_ids"], eos))
    if options.get("min_new_tokens"):
        processors.append(hf.MinNewTokensLengthLogitsProcessor(len(prompt), options["min_new_tokens"], eos))
    elif options.get("min_length"):
        processors.append(hf.MinLengthLogitsProcessor(options["min_length"], eos))
    if options.get("forced_eos_token_id") is not None:
        processors.append(hf.ForcedEOSTokenLogitsProcessor(row["limit"], options["forced_eos_token_id"]))
    if options.get("remove_invalid_values"):
        processors.append(hf.InfNanRemoveLogitsProcessor())
    if options.get("suppress_tokens"):
        processors.append(hf.SuppressTokensLogitsProcessor(options["suppress_tokens"]))
    if options.get("begin_suppress_tokens"):
        processors.append(hf.SuppressTokensAtBeginLogitsProcessor(options["begin_suppress_tokens"], len(prompt)))
    if options.get("temperature", 1.0) != 1.0:
        processors.append(hf.TemperatureLogitsWarper(options["temperature"]))
    if options.get("top_k", 50):
        processors.append(hf.TopKLogitsWarper(options.get("top_k", 50)))
    if options.get("top_p", 1.0) < 1:
        processors.append(hf.TopPLogitsWarper(options["top_p"]))
    if options.get("min_p"):
        processors.append(hf.MinPLogitsWarper(options["min_p"]))
    if options.get("typical_p", 1.0) < 1:
        processors.append(hf.TypicalLogitsWarper(options["typical_p"]))
    if options.get("epsilon_cutoff"):
        processors.append(hf.EpsilonLogitsWarper(options["epsilon_cutoff"]))
    if options.get("eta_cutoff"):
        processors.append(Eta(options["eta_cutoff"]))
    if options.get("renormalize_logits"):
        processors.append(hf.LogitNormalization())
    text = prompt + row["new"]
    places = [torch.tensor([text + row["drafts"][:i]]) for i in range(logits.shape[0])]
    return torch.cat([processors(ids, logits[i : i + 1].clone()) for i, ids in enumerate(places)])


class Eta(hf.EtaLogitsWarper):
    """transformers' raises if no token is left."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if scores.isneginf().all() else super().__call__(input_ids, scores)


class Openai(hf.LogitsProcessor):
    """https://platform.openai.com/docs/guides/text-generation, "frequency and presence penalties"."""

    def __init__(self, start: int, presence: float, frequency: float) -> None:
        self.start, self.presence, self.frequency = start, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.start :], minlength=VOCAB)
        return scores - self.presence * (counts > 0) - self.frequency * counts


@st.composite
def a_row(draw: st.DrawFn, names: list[str]) -> dict[str, Any]:
    # Few different tokens, so that there is something to repeat.
    prompt = draw(st.lists(few, min_size=1, max_size=9))
    new = draw(st.lists(few, max_size=6))
    text = len(prompt) + len(new)
    return {
        "prompt": prompt,
        "new": new,
        "drafts": draw(st.lists(few, min_size=WIDTH - 1, max_size=WIDTH - 1)),
        "eos": draw(st.lists(tokens, min_size=1, max_size=3)),
        "limit": draw(st.integers(text + 1, MAX_LEN)),
        "options": draw(options_of(names)),
    }


#: What a tokenizer or the host decides; tests of their own hold these against what they allow.
GUIDED = {"guide", "prefix_allowed_tokens_fn", "logits_processor", "watermarking_config"}


def test_every_option_is_tried() -> None:
    assert CHOICES.keys() == OPTIONS.keys() - GUIDED


#: More tokens lie after 1 - 2**-24 of the mass than one.
ALMOST_ALL: dict[str, Any] = {
    "prompt": [0],
    "new": [],
    "drafts": [0, 0, 0],
    "eos": [0],
    "limit": 2,
    "options": {"temperature": 0.625, "top_p": 1 - 2**-24},
}


@given(rows=st.lists(a_row(list(CHOICES)), min_size=1, max_size=4), seed=st.integers(0, 2**32))
@example(rows=[ALMOST_ALL], seed=0)
@settings(max_examples=250, deadline=None)
def test_all_options_together_leave_what_transformers_leaves(rows: list[dict[str, Any]], seed: int) -> None:
    compare(rows, seed)


@pytest.mark.parametrize("name", list(CHOICES))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_each_option_alone_leaves_what_transformers_leaves(name: str, data: st.DataObject) -> None:
    compare(data.draw(st.lists(a_row([name]), min_size=1, max_size=3)), data.draw(st.integers(0, 2**32)))


def compare(rows: list[dict[str, Any]], seed: int) -> None:
    logits = 3 * torch.randn(len(rows), WIDTH, VOCAB, generator=torch.Generator().manual_seed(seed))
    scores = ours(rows, logits)
    for row, given_logits, got in zip(rows, logits, scores, strict=True):
        expected = of_transformers(row, given_logits)
        kept = expected > float("-inf")
        same = torch.equal(got > float("-inf"), kept)
        if same:
            assert torch.allclose(got[kept], expected[kept], rtol=1e-6, atol=1e-6)
        else:
            # At a border that rounding decides (a mass of p, to the last bits), one token more or less may stay.
            assert_near_a_border(row["options"], got, expected)


def assert_near_a_border(options: dict[str, Any], got: torch.Tensor, expected: torch.Tensor) -> None:
    """One token less, or more, or some of equal scores more: transformers drops some of these; or some that together
    weigh less than sums of float32 are off by, where p is that near 1."""
    assert options.keys() & {"top_p", "min_p", "typical_p"}, (got, expected)
    for ours, theirs in zip(got, expected, strict=True):
        more, less = (
            ours[(theirs == float("-inf")) & (ours > theirs)],
            theirs[(ours == float("-inf")) & (theirs > ours)],
        )
        differ = (ours == float("-inf")) != (theirs == float("-inf"))
        weightless = float(ours.maximum(theirs).softmax(-1)[differ].sum()) < 1e-6
        assert len(more) + len(less) <= 1 or (not len(less) and more.max() - more.min() < 1e-6) or weightless


def test_a_row_without_options_is_left_alone_beside_others() -> None:
    plain = {"prompt": [1, 2], "new": [3], "drafts": [1, 2, 3], "eos": [0], "limit": 20, "options": {"temperature": 0}}
    busy = plain | {
        "options": {"top_k": 3, "repetition_penalty": 2.0, "suppress_tokens": [5], "no_repeat_ngram_size": 1}
    }
    logits = torch.randn(2, WIDTH, VOCAB)
    scores = ours([plain, busy], logits)
    assert torch.equal(scores[0], logits[0])
    assert not torch.equal(scores[1], logits[1])


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
def test_a_nucleus_is_the_same_alone_and_beside_others() -> None:
    """Torch shares the sum over one place out among threads, but not those over many, and the order changes the last
    bits. Here a token stands exactly at the border."""
    nothing = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for seed in range(60):
        logits = 3 * torch.randn(1, 4, 40_000, generator=torch.Generator().manual_seed(seed))
        share = logits[0, 0].softmax(-1).sort(descending=True).values.cumsum(-1)[seed]
        wide, alone = logits.clone(), logits[:, :1].clone()
        TopP().apply(wide, *nothing, share[None])
        TopP().apply(alone, *nothing, share[None])
        assert torch.equal(wide[:, :1], alone)


@pytest.mark.usefixtures("two_threads")
def test_an_entropy_is_the_same_alone_and_beside_others() -> None:
    values = torch.rand(60, 4, 40_000, generator=torch.Generator().manual_seed(0))
    wide = row_sums(values)
    assert all(torch.equal(row_sums(values[i : i + 1, :1]), wide[i : i + 1, :1]) for i in range(60))
    assert not all(torch.equal(values[i, :1].sum(-1), values.sum(-1)[i, :1]) for i in range(60)), "torch's own are not"


@pytest.mark.parametrize("size", SEARCH_SIZES)
def test_a_nucleus_wider_than_a_search(size: int) -> None:
    vocab = 4 * size
    logits = 0.01 * torch.randn(1, 2, vocab)
    expected = torch.cat([hf.TopPLogitsWarper(0.9)(None, logits[:, i]) for i in range(2)])
    TopP().apply(logits, torch.zeros(1, 4), torch.tensor([1]), torch.tensor([0.9]))
    kept = (logits[0] > float("-inf")).sum(-1)
    assert torch.all((kept - (expected > float("-inf")).sum(-1)).abs() <= 1)
    assert kept.min() > size


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": -0.1}, "number of at least 0"),
        ({"temperature": float("nan")}, "number of at least 0"),
        ({"temperature": float("inf")}, "number of at least 0"),
        ({"temperature": True}, "number of at least 0"),
        ({"temperature": 1e7}, "at most 1e\\+06"),
        ({"top_k": -1}, "int of at least 0"),
        ({"top_k": 2.0}, "int of at least 0"),
        ({"top_k": 2**70}, "at most 2147483647"),
        ({"top_p": -0.1}, "at least 0 and at most 1"),
        ({"top_p": 1.1}, "at least 0 and at most 1"),
        ({"typical_p": 0.0}, "above 0 and at most 1"),
        ({"min_p": 1.5}, "at least 0 and at most 1"),
        ({"epsilon_cutoff": 1.0}, "at least 0 and below 1"),
        ({"eta_cutoff": -0.1}, "at least 0 and below 1"),
        ({"renormalize_logits": 1}, "True or False"),
        ({"sequence_bias": {3: 1.0}}, "list of \\[token ids, bias\\], or map tuples"),
        ({"sequence_bias": [[[], 1.0]]}, "list of \\[token ids, bias\\], or map tuples"),
        ({"sequence_bias": [[[VOCAB], 1.0]]}, "not a token id"),
        ({"sequence_bias": [[[1, 2], float("nan")]]}, "of \\[1, 2\\] must be a number"),
        ({"sequence_bias": [[[1] * 9, 1.0]]}, "a slot holds 256 of up to 8"),
        ({"repetition_penalty": 0}, "at least 1e-06"),
        ({"repetition_penalty": 1e40}, "at most 1e\\+06"),
        ({"presence_penalty": "1"}, "number"),
        ({"logit_bias": [1]}, "map token ids to numbers"),
        ({"logit_bias": {VOCAB: 1.0}}, "not a token id"),
        ({"logit_bias": {1: float("inf")}}, "must be a number"),
        ({"logit_bias": {1: 1e39}}, "must be a number of at most"),
        ({"suppress_tokens": [VOCAB]}, "not a token id"),
        ({"suppress_tokens": 3}, "list of token ids"),
        ({"suppress_tokens": [1] * 257}, "257 ids, and a slot holds at most 256"),
        ({"bad_words_ids": [[]]}, "list of lists"),
        ({"bad_words_ids": [[1] * 9]}, "a slot holds 64 of up to 8"),
        ({"bad_words_ids": [[1]] * 65}, "a slot holds 64 of up to 8"),
        ({"no_repeat_ngram_size": 17}, "at most 16"),
        ({"min_new_tokens": -1}, "at least 0"),
        ({"min_new_tokens": 2**63 - 1}, "at most 2147483647"),
        ({"forced_eos_token_id": -2}, "not a token id"),
    ],
    ids=str,
)
def test_sampling_values_that_are_not_valid_are_refused(options: dict[str, Any], reason: str) -> None:
    (name,) = options
    with raises(InvalidOption, where="submit", name=name, reason=re.compile(reason)) as caught:
        read(options, [0])
    assert len(str(caught.value)) < 400, "a long value does not hide the reason"


#: Options that are numbers, of requests that draw.
DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def test_options_that_draw_need_do_sample() -> None:
    for name in DRAWING:
        value = 3 if name == "top_k" else 0.5
        with raises(InvalidOption, name=name, value=value, reason="it needs do_sample=True"):
            read({name: value}, [], do_sample=False)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("value", [torch.tensor([]), torch.ones(2), np.ones(2)], ids=["empty", "two", "array"])
def test_tensors_are_refused_for_numbers(value: Any, name: str, draws: bool) -> None:
    reason = "must be a" if draws else "it needs do_sample=True"
    with raises(InvalidOption, where="submit", name=name, reason=re.compile(reason)):
        read({name: value}, [], do_sample=draws)


def test_what_does_nothing_is_nothing() -> None:
    neutral = {name: option.neutral for name, option in OPTIONS.items() if not option.draws}
    assert read(neutral, [], do_sample=False) is None
    # What is greatest stays greatest.
    assert read({"temperature": 0, "top_k": 3, "typical_p": 0.5}, []) is None


@pytest.mark.parametrize("temperature", [9.9e-6, 1e-9, 1e-300])
def test_a_temperature_near_zero_chooses_the_greatest(temperature: float) -> None:
    assert read({"temperature": temperature, "eta_cutoff": 0.5}, []) is None
    assert read({"temperature": 1e-5}, []) is not None


@pytest.mark.parametrize("form", [{(1, 2): 1.5, (3,): -2}, [[[1, 2], 1.5], [[3], -2.0]], [((1, 2), 1.5), ((3,), -2)]])
def test_sequence_bias_has_the_forms_of_transformers(form: Any) -> None:
    sampling = read({"sequence_bias": form}, [], do_sample=False)
    assert sampling is not None
    placed = SequenceBias().place(sampling.values, 0)
    assert placed["biased_sequences"] == [[-1] * 7 + [3], [-1] * 6 + [1, 2]]
    assert placed["sequence_biases"] == [-2.0, 1.5]


def test_invalid_values_become_those_of_transformers() -> None:
    logits = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.5] + [0.0] * (VOCAB - 4)] * WIDTH)[None]
    row = {"prompt": [1], "new": [], "drafts": [1, 2, 3], "eos": [0], "limit": 20}
    got = ours([row | {"options": {"temperature": 0, "remove_invalid_values": True}}], logits)
    assert torch.equal(got[0], hf.InfNanRemoveLogitsProcessor()(None, logits[0]))
    assert got.isfinite().all()


def test_defaults_are_those_of_transformers() -> None:
    sampling = read({}, [])
    assert sampling is not None and sampling.values == {"temperature": 1.0, "top_k": 50}
    config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, top_k=0, repetition_penalty=1.1)
    read_of = read_sampling(
        "submit", {"top_p": 0.5}, do_sample=None, seed=3, config=config, eos=[], vocab_size=VOCAB, num_logits=VOCAB
    )
    assert read_of == Sampling({"temperature": 0.6, "top_p": 0.5, "repetition_penalty": 1.1}, 3)


def test_a_bad_value_of_the_generation_config_is_told_as_such() -> None:
    config = GenerationConfig(do_sample=True, top_k=50)
    config.top_p = 7.0
    with raises(InvalidOption, where="the model's generation_config", name="top_p", value=7.0):
        read_sampling("submit", {}, do_sample=None, seed=0, config=config, eos=[], vocab_size=VOCAB, num_logits=VOCAB)


def test_a_word_that_is_an_eos_id_may_come() -> None:
    sampling = read({"bad_words_ids": [[3], [4]]}, [4])
    assert sampling is not None and sampling.values["bad_words_ids"] == [[3]]
