"""A user's own logits processors: transformers' text with them in every mode and tier, or a refusal that says why."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_modes import Random
from tiny import tiny_llama
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from speccompile import Speculator, wrap
from speccompile.errors import InvalidInput, InvalidOption, ProcessorAtRequest, RequestFailed, UnsupportedProcessor
from speccompile.modes import registry
from speccompile.sampling.user import texts_in_front
from speccompile.sampling.user_check import check_processors

VOCAB = 128
MAX_LEN = 60
#: One token, a period, and text.
PROMPTS = ([9], [5, 17, 5, 17, 5, 17, 5], list(range(30, 52)))
NEW = 30


@cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


def normal(*shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class TensorBias(LogitsProcessor):
    """Holds a tensor, and writes in place."""

    def __init__(self) -> None:
        self.bias = normal(VOCAB)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, [1, 2, 3]] = -float("inf")
        scores += self.bias
        return scores


class AfterLast(LogitsProcessor):
    """A table of what may follow what."""

    def __init__(self) -> None:
        self.table = normal(VOCAB, VOCAB)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.table[input_ids[:, -1]]


class NoSum(LogitsProcessor):
    """Looks at the last two tokens, so that a text of one is too short."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = (input_ids[:, -2] + torch.arange(100)[:, None] + input_ids[:, -1]).T % VOCAB
        return scores.scatter(1, banned, -float("inf"))


class Once(LogitsProcessor):
    """No token that was among the last 40 comes again; prepares itself in its first call."""

    scale: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = torch.full((1,), 100.0)
        recent = input_ids[:, -40:] if input_ids.shape[1] > 40 else input_ids
        return scores - self.scale * torch.zeros_like(scores).scatter(1, recent, 1.0)


def fold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """No order of this and another processor may be changed."""
    return torch.where(scores > 1.5, scores - 3.0, scores)


MAKE: dict[str, Callable[[], list[Any]]] = {
    "repetition": lambda: [hf.RepetitionPenaltyLogitsProcessor(1.4)],
    "sequence bias": lambda: [
        hf.SequenceBiasLogitsProcessor([[[i, i ^ (i % 2 * 2 + 1)], 6.0] for i in range(VOCAB)] + [[[4], 2.0]])
    ],
    "temperature": lambda: [hf.TemperatureLogitsWarper(0.5), fold],
    "tensor": lambda: [TensorBias()],
    "last token": lambda: [AfterLast()],
    "seen": lambda: [Once()],
    "several": lambda: [Once(), TensorBias(), hf.RepetitionPenaltyLogitsProcessor(1.2), fold, AfterLast()],
}
MODES: dict[str, dict[str, Any]] = {"ngram": {}, "early_exit": {"exit_layer": 1}}


@cache
def spec_of(name: str, mode: str) -> Speculator:
    """Of two rows, so that a third request waits, or, of ``several``, of four, so that one is dead."""
    return wrapped(MAKE[name](), mode, max_batch=4 if name == "several" else 2)


def wrapped(processors: Any, mode: str = "ngram", **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": (0, 1, 3), "max_batch": 2, "max_len": MAX_LEN, "backend": "eager"}
    return wrap(model(), mode, logits_processor=processors, **(sizes | MODES.get(mode, {}) | options))


def of_transformers(prompt: list[int], processors: list[Any], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    output = model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        logits_processor=LogitsProcessorList(processors),
        **({"do_sample": False} | options),
    )
    return output[0, len(prompt) :].tolist()


def new_tokens(spec: Speculator, prompts: tuple[list[int], ...] = PROMPTS, **options: Any) -> list[list[int]]:
    """Of all prompts, together as far as there are slots."""
    requests = [spec.engine.submit(prompt, max_new_tokens=NEW, **options) for prompt in prompts]
    return [request.result().token_ids for request in requests]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MAKE)
def test_the_text_is_that_of_transformers_at_every_tier(name: str, mode: str) -> None:
    spec = spec_of(name, mode)
    expected = [of_transformers(prompt, MAKE[name]()) for prompt in PROMPTS]
    if name != "temperature":
        assert expected != [of_transformers(prompt, []) for prompt in PROMPTS], "or it would prove nothing"
    for draft_len in (0, 1, 3):
        spec.set_tier(draft_len)
        spec.stats.reset()
        assert new_tokens(spec) == expected
        assert new_tokens(spec, PROMPTS[1:2]) == expected[1:2], "alone, in the executables of one row"
    assert 1 < spec.stats.acceptance_length < 4 or name in ("seen", "several"), "where nothing comes twice"


@pytest.mark.parametrize("name", ["several", "last token"])
def test_with_options_of_a_request_the_same_text_for_all_modes_and_tiers(name: str) -> None:
    options = {"do_sample": True, "seed": 11, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
    texts = []
    for mode in MODES:
        spec = spec_of(name, mode)
        for draft_len in (0, 1, 3):
            spec.set_tier(draft_len)
            texts.append(new_tokens(spec, **options))
    assert all(text == texts[0] for text in texts)
    assert texts[0] != new_tokens(spec, **(options | {"seed": 12}))
    assert texts[0] != new_tokens(spec)


@pytest.mark.parametrize("mode", MODES)
def test_their_place_is_behind_the_penalties_and_in_front_of_the_warpers(mode: str) -> None:
    """With one token kept, what is drawn is what transformers draws, whose processors come in this order."""
    options = {"do_sample": True, "top_k": 1, "temperature": 0.4, "repetition_penalty": 1.7}
    spec = wrapped([fold], mode, tiers=(0, 3))
    expected = [of_transformers(prompt, [fold], **options) for prompt in PROMPTS]
    assert expected != [of_transformers(prompt, [], **options) for prompt in PROMPTS]
    assert new_tokens(spec, **options) == expected
    other = [of_transformers(prompt, [hf.TemperatureLogitsWarper(0.4), fold], do_sample=False) for prompt in PROMPTS]
    assert other != [of_transformers(prompt, [fold, hf.TemperatureLogitsWarper(0.4)]) for prompt in PROMPTS]


def test_a_padded_batch() -> None:
    spec, width = spec_of("several", "ngram"), max(len(prompt) for prompt in PROMPTS)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    expected = [of_transformers(prompt, MAKE["several"]()) for prompt in PROMPTS]
    assert spec.generate(ids, mask, max_new_tokens=NEW)[:, width:].tolist() == expected


def test_drafts_that_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place sees the drafts in front of it, right or wrong."""
    monkeypatch.setattr(registry, "_modes", dict(registry._modes) | {"random_drafts": Random})
    processors = [AfterLast(), Once(), hf.SuppressTokensLogitsProcessor(list(range(12, VOCAB)))]
    with wrapped(processors, "random_drafts", tiers=(0, 3)) as spec:
        spec.stats.reset()
        assert new_tokens(spec) == [of_transformers(prompt, processors) for prompt in PROMPTS]
        assert 1 < spec.stats.acceptance_length < 4


@pytest.mark.parametrize("options", [{"acceptance": "rejection"}, {"acceptance": "block"}, {"deterministic": True}])
def test_with_other_rules_and_widths(options: dict[str, Any]) -> None:
    processors = MAKE["several"]()
    expected = [of_transformers(prompt, processors) for prompt in PROMPTS]
    with wrapped(processors, "early_exit", tiers=(0, 3), **options) as spec:
        assert new_tokens(spec) == expected


def test_check_compares_with_what_transformers_does_with_them() -> None:
    spec = spec_of("several", "early_exit")
    assert spec.check(PROMPTS, max_new_tokens=NEW)
    assert spec.check(PROMPTS, max_new_tokens=NEW, reference="plain")


def test_one_processor_an_empty_list_and_none() -> None:
    with wrapped(AfterLast(), tiers=(0, 1)) as spec:
        assert new_tokens(spec) == [of_transformers(prompt, [AfterLast()]) for prompt in PROMPTS]
    for nothing in ([], None):
        with wrapped(nothing, tiers=(0,)) as spec:
            assert {kind for _, _, kind in spec.engine.tiers} == {"greedy"}


def test_what_it_holds_may_be_changed_in_place() -> None:
    processor = TensorBias()
    with wrapped([processor], tiers=(0, 1)) as spec:
        before = new_tokens(spec)
        processor.bias.neg_()
        after = [of_transformers(prompt, [processor]) for prompt in PROMPTS]
        assert new_tokens(spec) == after != before


def test_a_prompt_that_is_too_short_for_it() -> None:
    with wrapped([NoSum()], tiers=(0, 1)) as spec:
        expected = [of_transformers(prompt, [NoSum()]) for prompt in PROMPTS[1:]]
        assert new_tokens(spec, PROMPTS[1:]) == expected
        for call in (lambda: new_tokens(spec), lambda: spec.engine.submit([4])):
            with pytest.raises(InvalidInput, match="it has 1 tokens, and the logits processor NoSum fails for fewer"):
                call()
        assert spec.engine.idle


def test_a_drafter_that_is_the_target_drafts_what_the_target_chooses() -> None:
    processors = MAKE["several"]()
    with wrapped(processors, "early_exit", exit_layer=2, tiers=(0, 3), prefix_reuse=False) as spec:
        for options in ({}, {"do_sample": True, "seed": 3}):
            spec.stats.reset()
            spec.engine.submit(PROMPTS[1], max_new_tokens=41, **options).result()
            assert spec.stats.acceptance_length == 4


def test_processors_that_forbid_everything() -> None:
    spec = wrapped(lambda ids, scores: scores.fill_(-math.inf), tiers=(0, 1))
    with spec, pytest.raises(RequestFailed, match="the logits processors given to wrap, forbid every token"):
        spec.engine.submit([1, 2, 3]).result()


# --- looking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_stages_print_as_python_that_runs(mode: str) -> None:
    spec = spec_of("several", mode)
    for tier in (*spec.engine.tiers.values(), *spec.engine.prefill_tiers.values()):
        stage = tier.stages.last
        assert not stage.graph.graph.find_nodes(op="get_attr")
        with torch.no_grad():
            stage.call(*stage.make_inputs())
    text = spec.stages["process_logits"].python
    assert f"processor_4_0,  # weight float32[{VOCAB}, {VOCAB}]" in text
    assert "processor_4_0," not in spec.stages["outline"].python


def test_they_are_listed() -> None:
    spec = spec_of("several", "ngram")
    names = "Once, TensorBias, RepetitionPenaltyLogitsProcessor, fold, AfterLast"
    assert f"logits processors  {names}: in every step" in spec.explain()
    assert f"begin_suppress_tokens, {names}, temperature" in spec.stages["process_logits"].note
    assert {kind for _, _, kind in spec.engine.tiers} == {"sampled"}
    assert {kind for _, kind in spec.engine.prefill_tiers} == {"sampled", "inner"}
    assert set(spec.tiers) == {0, 1, 3}
    assert set(spec.prefill) == {width for width, kind in spec.engine.prefill_tiers if kind == "sampled"}
    graph, _ = spec.pipeline(3).run(spec.stages["outline"].graph)
    assert graph.op_counts() == spec.tiers[3].graph.op_counts()


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=3), st.integers(1, 4))
def test_every_place_has_its_text_at_the_end_of_a_row(texts: list[list[int]], width: int) -> None:
    context = torch.tensor([text + [-1] * (14 - len(text)) for text in texts])
    ends = torch.tensor([len(text) for text in texts])[:, None] - torch.arange(width).flip(0)
    rows = texts_in_front(context, ends).view(len(texts), width, -1)
    for text, row, lengths in zip(texts, rows.tolist(), ends.tolist(), strict=True):
        for place, end in zip(row, lengths, strict=True):
            wanted = text[: max(end, 0)]
            assert place == [text[0]] * (14 - len(wanted)) + wanted


# --- refusals ------------------------------------------------------------------------------------


class CountsTokens(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 0.01 * torch.zeros_like(scores).scatter_add(1, input_ids, torch.ones_like(input_ids).float())


class CountsCalls(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + self.calls


class Remembers(LogitsProcessor):
    """Its result is the same as ever."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"lengths": []}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen["lengths"].append(input_ids.shape[1])
        return scores


class CountsInATensor(LogitsProcessor):
    def __init__(self) -> None:
        self.count = torch.zeros(())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return scores


class Caches(LogitsProcessor):
    """Made anew for another shape: in a trace it would keep a fake."""

    def __init__(self) -> None:
        self.zeros = torch.zeros(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > MAX_LEN:
            self.zeros = torch.zeros_like(scores)
        return scores


def branches(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + 1 if (input_ids[:, -1] == 3).any() else scores


def loops(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    for row, ids in enumerate(input_ids.tolist()):
        scores[row, ids[-1]] = -math.inf
    return scores


def loops_over_rows(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.stack([line + 1 for line in scores])


def masks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[scores > 0] -= 1
    return scores


def numpys(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(scores.numpy() + 1)


def draws(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + torch.rand_like(scores)


def mixes_rows(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - scores.nan_to_num(neginf=0).mean(0)


def mixes_texts(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + input_ids[:, -1].max()


def uses_length(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + input_ids.shape[1] / 1000


def long_texts(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """At no length that is tried but for the branch's own."""
    return scores + 1 if input_ids.shape[1] == 51 else scores


def twice_the_same(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Of all texts of one token, wrong for one."""
    twice = torch.nn.functional.pad(input_ids, (1, 0), value=-1)[:, -2:] == 77
    return scores + twice.all(1, keepdim=True)


def writes_ids(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    input_ids[:, -1] = 0
    return scores


def needs_more(input_ids: torch.Tensor, scores: torch.Tensor, cur_len: int) -> torch.Tensor:
    return scores


AS_OPS = "Write it with tensor operations alone"
NO_LENGTHS = "positions, counts and lengths cannot be told"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "min length": (hf.MinLengthLogitsProcessor(20, 1), "it depends on padding", r"give min_new_tokens=\.\.\. to"),
    "forced eos": (hf.ForcedEOSTokenLogitsProcessor(50, 1), "a text of 49 tokens", "give forced_eos_token_id"),
    "begin": (hf.SuppressTokensAtBeginLogitsProcessor([3], 41), "a text of 41 tokens", "give begin_suppress_tokens"),
    "ngrams": (hf.NoRepeatNGramLogitsProcessor(2), "a text of 1 token changes", "give no_repeat_ngram_size"),
    "words": (hf.NoBadWordsLogitsProcessor([[5, 5, 7]]), "a text of 1 token changes", "give bad_words_ids"),
    "long word": (hf.NoBadWordsLogitsProcessor([[8, 8, 9, 10, 11, 12]]), "a text of 4 tokens", "give bad_words_ids"),
    "length": (uses_length, "it depends on padding", NO_LENGTHS),
    "counts tokens": (CountsTokens(), "it depends on padding", NO_LENGTHS),
    "one length": (long_texts, "its result for a text of 51 tokens changes when the text is padded to 64", NO_LENGTHS),
    "counts calls": (CountsCalls(), "called twice with the same tensors it returns different ones", AS_OPS),
    "remembers": (Remembers(), "a call changes its 'seen'", AS_OPS),
    "count in a tensor": (CountsInATensor(), "a call changes its 'count'", AS_OPS),
    "draws": (draws, "called twice with the same tensors it returns different ones", AS_OPS),
    "branches": (branches, "it looks at the values of tensors in Python", AS_OPS),
    "loops": (loops, "it looks at the values of tensors in Python", AS_OPS),
    "masks": (masks, "the size of a tensor depends on values", AS_OPS),
    "numpy": (numpys, "it cannot be traced: RuntimeError", AS_OPS),
    "loops over rows": (loops_over_rows, "it counts rows, or loops over them, in Python", AS_OPS),
    "rows": (mixes_rows, "what it returns for a row depends on the other rows", "must not depend on its neighbours"),
    "texts": (mixes_texts, "what it returns for a row depends on the other rows", "must not depend on its neighbours"),
    "shape": (lambda ids, scores: scores[:, :5], r"it returns float32 \[4, 5\]", r"float32 \[4, 128\] on cpu"),
    "dtype": (lambda ids, scores: scores.double(), r"it returns float64 \[4, 128\]", "It has to return scores"),
    "nothing": (lambda ids, scores: None, "it returns NoneType", "It has to return scores"),
    "ids": (writes_ids, "it writes into input_ids", "clone"),
    "arguments": (needs_more, "it raises TypeError: .*cur_len", r"called as processor\(input_ids, scores\)"),
    "a class": (hf.TemperatureLogitsWarper, "it raises TypeError", "It is called as"),
    "device": (lambda ids, scores: scores.to("meta"), "on meta", "on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    processor, reason, advice = REFUSED[name]
    with pytest.raises(UnsupportedProcessor, match=f"cannot become part of a step: .*{reason}.*{advice}") as caught:
        wrapped([AfterLast(), processor])
    assert getattr(processor, "__name__", type(processor).__name__) in str(caught.value)


def test_what_it_looks_for_is_tried() -> None:
    with pytest.raises(UnsupportedProcessor, match="its result for a text of 1 token changes"):
        check_processors(twice_the_same, vocab_size=5000, max_len=50, places=54, device=torch.device("cpu"))


def test_a_trace_leaves_nothing_in_a_processor() -> None:
    processor = Caches()
    with pytest.raises(UnsupportedProcessor, match="a call changes its 'zeros'"):
        wrapped(processor)
    assert type(processor.zeros) is torch.Tensor and processor.zeros.shape == (0,)
    remembers = Remembers()
    with pytest.raises(UnsupportedProcessor, match="a call changes its 'seen'"):
        wrapped(remembers)
    assert {type(length) for length in remembers.seen["lengths"]} == {int}


@pytest.mark.parametrize("given", [3, "repetition", [AfterLast(), None], {"penalty": 2}])
def test_what_is_no_processor(given: Any) -> None:
    with pytest.raises(InvalidOption, match=r"logits_processor=.* it has to be a LogitsProcessor or a list of them"):
        wrapped(given)


def test_the_check_draws_nothing_from_torchs_generator() -> None:
    state = torch.get_rng_state()
    check_processors(MAKE["several"](), vocab_size=VOCAB, max_len=50, places=54, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_request_cannot_bring_its_own() -> None:
    spec = spec_of("tensor", "ngram")
    message = r"does not take logits_processor: .* speccompile\.wrap\(model, logits_processor=\.\.\.\)"
    with pytest.raises(ProcessorAtRequest, match=f"generate {message}"):
        spec.generate(torch.tensor([[1, 2]]), logits_processor=[AfterLast()])
    with pytest.raises(ProcessorAtRequest, match=f"submit {message}"):
        spec.engine.submit([1, 2], logits_processor=[AfterLast()])
