"""Drafters of the user's own: traced into the step, and on the host between steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import DraftFailed, InvalidOption, PassError
from support.dice import Dice
from support.drafters import PENALTIES, TIERS, ragged, together
from support.engines import assert_failed
from support.errors import raises
from support.plans import step_graph
from support.tiny import greedy, random_prompt

SIZES: dict[str, Any] = {"tiers": (0, 1, 3), "max_batch": 4, "max_len": 63, "backend": "eager"}
#: Where nothing but the drafts matters.
SMALL: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 31}


def wrapped(model: LlamaForCausalLM, draft: Any, **options: Any) -> Speculator:
    return wrap(model, "user_provided", draft=draft, **SIZES | options)


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM) -> Speculator:
    return wrap(model, "none", **SIZES | {"tiers": (0,)})


class Asked:
    """A drafter on the host that each test gives its answers."""

    answer: Callable[[list[int], int], Any]

    def __call__(self, tokens: list[int], draft_len: int) -> Any:
        return self.answer(tokens, draft_len)


@pytest.fixture(scope="module")
def host_spec(model: LlamaForCausalLM) -> tuple[Speculator, Asked]:
    asked = Asked()
    return wrapped(model, asked, host=True, prefix_reuse=False), asked


@pytest.fixture
def asking(host_spec: tuple[Speculator, Asked]) -> Callable[[Any], Speculator]:
    """The same wrap with any drafter: a step knows nothing of it."""

    def with_answers(answer: Any) -> Speculator:
        spec, asked = host_spec
        asked.answer = answer
        spec.set_tier(3)
        spec.stats.reset()
        return spec

    return with_answers


def repeats(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The text's first tokens again; rows of an odd length abstain."""
    return tokens[:, :draft_len], torch.where(length % 2 == 0, draft_len, 0)


class Bigrams(nn.Module):
    """What a table says of the newest token, and of that, and so on."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.nn.functional.one_hot(table, len(table)).float())
        self.register_buffer("shift", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        token, drafts = tokens.gather(1, (length - 1).clamp(min=0)[:, None]), []
        for _ in range(draft_len):
            token = self.weight[token].argmax(-1) + self.shift
            drafts.append(token)
        return torch.cat(drafts, 1), torch.full_like(length, draft_len)


class Oracle:
    """The target's own text, of which every third draft is wrong, in lists of all lengths; now and then nothing."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.calls = 0

    def __call__(self, tokens: list[int], draft_len: int) -> list[int] | None:
        self.calls += 1
        if self.calls % 5 == 0:
            return None
        text = next(text for text in self.texts if text[: len(tokens)] == tokens)
        drafts = text[len(tokens) :][: self.calls % (draft_len + 1)]
        return [(token + 1) % 128 if (len(tokens) + i) % 3 == 0 else token for i, token in enumerate(drafts)]


@pytest.mark.parametrize("kind", ["function", "module", "host"])
def test_the_text_is_that_of_plain_decoding(model: LlamaForCausalLM, plain: Speculator, kind: str) -> None:
    batches = [ragged(rows, rows) for rows in (1, 3)]
    oracle = Oracle([])
    drafts: dict[str, Any] = {
        "function": repeats,
        "module": Bigrams(torch.randperm(128, generator=torch.Generator().manual_seed(0))).eval(),
        "host": oracle,
    }
    with wrapped(model, drafts[kind], host=kind == "host", max_batch=2 if kind == "module" else 4) as spec:
        for options in ({}, {"do_sample": True, **PENALTIES}):
            expected = [together(plain, prompts, 24, **options) for prompts in batches]
            oracle.texts = [
                prompt + new
                for batch, found in zip(batches, expected, strict=True)
                for prompt, new in zip(batch, found, strict=True)
            ]
            spec.stats.reset()
            for seed, (prompts, wanted) in enumerate(zip(batches, expected, strict=True)):
                spec.engine.policy = Dice(TIERS, seed)
                assert together(spec, prompts, 24, **options) == wanted
            assert spec.stats.draft_tokens > spec.stats.accepted_tokens
            assert kind != "host" or spec.stats.accepted_tokens > 0


@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_drafter_proposes_what_its_tensors_say(model: LlamaForCausalLM, kind: str) -> None:
    table = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    shift = torch.zeros(1, dtype=torch.int64)

    def bigrams(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        token, drafts = tokens.gather(1, (length - 1).clamp(min=0)[:, None]), []
        for _ in range(draft_len):
            token = table[token] + shift
            drafts.append(token)
        return torch.cat(drafts, 1), torch.full_like(length, draft_len)

    module = Bigrams(table).eval()
    with wrapped(model, module if kind == "module" else bigrams, **SMALL) as spec:
        for change in (0, 1):
            # The tensors are the very ones: what is changed in place is followed.
            module.shift.fill_(change)  # type: ignore[operator]
            shift.fill_(change)
            request = spec.engine.submit(random_prompt(9), max_new_tokens=6)
            while not request.new_tokens:
                spec.engine.step()
            token, wanted = request.new_tokens[-1], []
            for _ in range(3):
                token = (int(table[token]) + change) % 128
                wanted.append(token)
            if all(token < 127 for token in wanted):
                assert spec.arena["draft_tokens"][request.slot].tolist() == wanted
            request.cancel()


def test_what_is_no_token_ends_a_rows_drafts(model: LlamaForCausalLM, plain: Speculator) -> None:
    """The processors look at drafts: such a step would end all its requests."""

    def drafts(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = tokens[:, 0]
        wrong = torch.where(first == 1, -5, torch.where(first == 2, 128, 10**6))
        return torch.stack([first, wrong, first], 1), length * 0 + draft_len

    drawn: dict[str, Any] = {"do_sample": True, **PENALTIES, "no_repeat_ngram_size": 3}
    with wrapped(model, drafts, **SMALL) as spec:
        spec.set_tier(3)
        for first in (1, 2, 3):
            spec.stats.reset()
            prompts = [[first, *random_prompt(8, seed=seed)] for seed in (1, 2)]
            for options in ({}, drawn):
                assert together(spec, prompts, 12, **options) == together(plain, prompts, 12, **options)
            assert spec.stats.proposed_at[0] > 0 == spec.stats.proposed_at[1]


class Nested(nn.Module):
    """Drafts ``inner.weight`` and ``inner_weight`` in turn. One of its modules has two names, and one of its weights is
    in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)
        self.again, self.tied = self.inner, nn.Linear(1, 1, bias=False)
        self.tied.weight = self.inner.weight
        self.register_buffer("inner_weight", torch.tensor([[5.0]]))
        nn.init.constant_(self.inner.weight, 7.0)

    def forward(self, tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.again.weight, self.inner_weight, self.tied.weight], 1).long()  # type: ignore[list-item]
        return both.expand(tokens.shape[0], -1), torch.full_like(length, draft_len)


def test_weights_whose_names_are_alike_are_not_mixed_up(model: LlamaForCausalLM) -> None:
    drafter = Nested().eval()
    before = drafter.inner.weight
    with wrapped(model, drafter, **SMALL) as spec:
        assert drafter.inner.weight is before and drafter.tied.weight is before
        request = spec.engine.submit(random_prompt(9), max_new_tokens=6)
        while not request.new_tokens:
            spec.engine.step()
        assert spec.arena["draft_tokens"][request.slot].tolist() == [7, 5, 7]


def test_a_host_drafter_that_is_always_right_is_always_accepted(
    model: LlamaForCausalLM, asking: Callable[[Any], Speculator]
) -> None:
    prompt = random_prompt(10)
    text = prompt + greedy(model, prompt, 33)

    def draft(tokens: list[int], draft_len: int) -> list[int]:
        return text[len(tokens) :][:draft_len]

    spec = asking(draft)
    spec.generate(torch.tensor([prompt]), max_new_tokens=33)
    assert spec.stats.acceptance_length == 4
    assert set(spec.stats.tier_steps) == {3}


def test_a_step_is_as_wide_as_what_was_proposed(asking: Callable[[Any], Speculator]) -> None:
    def draft(tokens: list[int], draft_len: int) -> list[int] | None:
        return [7] if len(tokens) % 2 else None

    spec = asking(draft)
    spec.generate(torch.tensor([random_prompt(10)]), max_new_tokens=20, eos_token_id=[])
    assert set(spec.stats.tier_steps) == {0, 1}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1, 2, 3, 4], "it proposed 4 tokens, and the largest tier only has 3"),
        ([128], r"it proposed the token 128, and ids are 0 \.\. 127"),
        ([-1], "it proposed the token -1"),
        (["a"], "it raised TypeError"),
        ([True], "True is not a token id"),
        (7, "it raised TypeError"),
        (OSError("no line"), "it raised OSError: no line"),
    ],
)
def test_what_goes_wrong_on_the_host_is_one_requests_fault(
    model: LlamaForCausalLM, asking: Callable[[Any], Speculator], answer: Any, reason: str
) -> None:
    bad, good = random_prompt(5, seed=1), random_prompt(6, seed=2)

    def draft(tokens: list[int], draft_len: int) -> Any:
        if tokens[: len(bad)] != bad or len(tokens) < len(bad) + 3:
            return [1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    spec = asking(draft)
    failing, other = (spec.engine.submit(prompt, max_new_tokens=20) for prompt in (bad, good))
    assert_failed(failing, DraftFailed, reason=re.compile(reason))
    assert 3 <= len(failing.new_tokens) < 20
    assert other.result().token_ids == greedy(model, good, 20)


def test_host_drafts_are_cut_where_the_text_ends(model: LlamaForCausalLM, asking: Callable[[Any], Speculator]) -> None:
    spec = asking(lambda tokens, draft_len: [1] * draft_len)
    request = spec.engine.submit(random_prompt(5), max_new_tokens=3)
    assert request.result().token_ids == greedy(model, request.prompt, 3)
    assert 3 not in spec.stats.tier_steps


def test_the_host_is_asked_for_drafts_that_are_of_use_alone(
    model: LlamaForCausalLM, asking: Callable[[Any], Speculator]
) -> None:
    asked: dict[int, set[int]] = {5: set(), 6: set(), 7: set()}

    def draft(tokens: list[int], draft_len: int) -> list[int]:
        asked[tokens[0]].add(draft_len)
        return [1, 2, 3]

    spec = asking(draft)
    limits = {5: 0, 6: 1, 7: None}
    requests = [
        spec.engine.submit([first, 9, 9], max_new_tokens=12, num_draft_tokens=limit) for first, limit in limits.items()
    ]
    for request in requests:
        assert request.result().token_ids == greedy(model, request.prompt, 12)
    assert [request.stats.draft_tokens > 0 for request in requests] == [False, True, True]
    assert asked[5] == set() and asked[6] == {1} and max(asked[7]) == 3


# --- refused -----------------------------------------------------------------------------------------------------


def looks(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    if int(length[0]) > 3:
        return tokens[:, :draft_len], length
    return tokens[:, -draft_len:], length


def holds(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[1] * draft_len]).expand(len(length), -1) + HELD, length


def short(tokens: torch.Tensor, length: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[:, :1], length


HELD = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("draft", "fields"),
    [
        (looks, {"drafter": "looks"}),
        (holds, {"drafter": "holds"}),
        (short, {"returned": re.compile(r"^torch.int64\[")}),
        (lambda tokens, draft_len: [1], {"drafter": "<lambda>", "reason": re.compile("positional argument")}),
    ],
)
def test_what_cannot_be_traced(model: LlamaForCausalLM, draft: Any, fields: dict[str, Any]) -> None:
    with raises(PassError, **fields):
        step_graph(model, "user_provided", 3, "greedy", draft=draft, **SIZES | SMALL)


def test_what_cannot_be_traced_ends_a_wrap(model: LlamaForCausalLM) -> None:
    with raises(PassError, drafter="looks"):
        wrapped(model, looks, **SMALL)


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"draft": None}, "draft", r"draft\(tokens, length, draft_len\)"),
        ({"draft": [1], "host": True}, "draft", r"draft\(tokens, draft_len\)"),
        ({"draft": repeats, "host": 1}, "host", "use True or False"),
        ({"draft": Bigrams(torch.arange(4))}, "draft", "it is in training mode"),
        ({"draft": repeats, "acceptance": "block"}, "acceptance", "drafter of mode 'user_provided' has none"),
    ],
)
def test_wrong_options(model: LlamaForCausalLM, options: dict[str, Any], name: str, reason: str) -> None:
    with raises(InvalidOption, name=name, reason=re.compile(reason)):
        wrap(model, "user_provided", **SIZES, **options)
