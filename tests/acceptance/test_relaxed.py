"""``relaxed`` as TensorRT-LLM has it, point by point, and the thinking phase through real steps and reused slots."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from speccompile import wrap
from speccompile.acceptance import Relaxed
from speccompile.acceptance.relaxed import thinking, within_top, within_top_in_trtllm
from speccompile.errors import InvalidOption
from support.errors import raises

BEGIN, END = 8, 9
VOCAB = 10


def pool_thinks(prompt: list[int], emitted: list[int]) -> bool:
    """TensorRT-LLM's state of a slot: set by the prompt, then flipped by each token that a step emits."""
    thinks = BEGIN in prompt
    for token in emitted:
        thinks = {BEGIN: True, END: False}.get(token, thinks)
    return thinks


def ours_thinks(prompt: list[int], emitted: list[int]) -> bool:
    return next((token == BEGIN for token in reversed(prompt + emitted) if token in (BEGIN, END)), False)


def kept(
    scores: torch.Tensor, draft: int, prompt: list[int], emitted: list[int], *, compat: bool, top_k: int = 3,
    delta: float = 0.2,
) -> bool:  # fmt: skip
    """Whether one draft passes, after that text."""
    # What a former owner left after the text does not count.
    text, length = torch.tensor([[*prompt, *emitted, BEGIN, END]]), torch.tensor([len(prompt) + len(emitted)])
    options: dict[str, Any] = {"begin": BEGIN, "end": END, "top_k": top_k, "delta": delta}
    places, drafts = scores.expand(1, 2, -1), torch.tensor([[draft]])
    if not compat:
        return bool(within_top(places, drafts, text, length, **options))
    slots, prompts = torch.tensor([1]), torch.tensor([-1, len(prompt)])
    return bool(within_top_in_trtllm(places, drafts, text, length, slots, prompts, **options))


#: Probabilities of 0.5, 0.4, 0.06 and next to nothing.
CLEAR = torch.tensor([0.5, 0.4, 0.06] + [0.04 / 7] * 7).log()
TIED = torch.tensor([0.0, 1.0, 1.0] + [-5.0] * 7)

marks = st.lists(st.sampled_from([0, 1, BEGIN, END]), max_size=8)


@pytest.mark.parametrize(
    ("prompt", "emitted", "compat", "ours"),
    [
        # An end in the prompt: a finished turn of a chat.
        ([BEGIN, 1, END, 2], [3], True, False),
        ([END, BEGIN, END], [], True, False),
        ([BEGIN, END], [1, BEGIN], True, True),
        # Everything else decides alike.
        ([END, 1, BEGIN], [2], True, True),
        ([BEGIN, 1, END, 2], [END], False, False),
        ([1, END, 2], [3], False, False),
        ([1, 2], [BEGIN, 3], True, True),
        ([1, 2], [BEGIN, END], False, False),
        ([BEGIN], [END, BEGIN], True, True),
        ([1, 2], [], False, False),
    ],
)
def test_ends_in_the_prompt(prompt: list[int], emitted: list[int], compat: bool, ours: bool) -> None:
    assert kept(CLEAR, 1, prompt, emitted, compat=True) == compat == pool_thinks(prompt, emitted)
    assert kept(CLEAR, 1, prompt, emitted, compat=False) == ours == ours_thinks(prompt, emitted)


@pytest.mark.parametrize("thinks", [False, True])
def test_the_first_of_two_equally_likely_tokens_is_kept(thinks: bool) -> None:
    """Of two equally likely tokens the target chooses the first; outside of the phase ours keeps that alone."""
    prompt = [BEGIN] if thinks else [1]
    assert kept(TIED, 1, prompt, [], compat=True) and kept(TIED, 1, prompt, [], compat=False)
    assert kept(TIED, 2, prompt, [], compat=True)
    assert kept(TIED, 2, prompt, [], compat=False) == thinks
    assert not kept(TIED, 0, prompt, [], compat=True, delta=0.2)


def test_a_wide_delta_is_none_outside_of_the_phase() -> None:
    for delta in (0.0, 1.0, float("inf")):
        assert not kept(CLEAR, 1, [1], [], compat=True, delta=delta)
        assert kept(TIED, 2, [1], [], compat=True, delta=delta)


@given(prompt=marks.filter(bool), emitted=marks)
@settings(max_examples=150, deadline=None)
def test_the_phase_is_that_of_the_pool(prompt: list[int], emitted: list[int]) -> None:
    text, length = torch.tensor([prompt + emitted + [BEGIN]]), torch.tensor([len(prompt) + len(emitted)])
    ends = {"begin": BEGIN, "end": END}
    assert bool(thinking(text, length, **ends, end_from=torch.tensor([len(prompt)]))) == pool_thinks(prompt, emitted)
    assert bool(thinking(text, length, **ends)) == ours_thinks(prompt, emitted)


@given(
    prompt=marks.filter(lambda text: bool(text) and END not in text),
    emitted=marks,
    draft=st.integers(-1, VOCAB),
    top_k=st.integers(1, VOCAB + 1),
    delta=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_elsewhere_both_are_equal(
    prompt: list[int], emitted: list[int], draft: int, top_k: int, delta: float, seed: int
) -> None:
    """Without an end in the prompt, and without ties."""
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {"top_k": top_k, "delta": delta}
    one, other = (kept(scores, draft, prompt, emitted, compat=compat, **options) for compat in (False, True))
    assert one == other


def test_trtllm_compat_must_be_a_bool() -> None:
    with raises(InvalidOption, name="trtllm_compat", value=1, reason=re.compile("use True or False")):
        Relaxed(1, 2, trtllm_compat=1)  # type: ignore[arg-type]


# --- in steps ------------------------------------------------------------------------------------


TINY = {"vocab": VOCAB}


@pytest.mark.parametrize(("begin", "end", "name"), [(VOCAB, END, "begin"), (BEGIN, VOCAB + 5, "end")])
def test_tokens_that_never_come(model: LlamaForCausalLM, begin: int, end: int, name: str) -> None:
    never = {"name": name, "value": max(begin, end), "reason": re.compile(r"not a token id of the target \(0 \.\. 9\)")}
    with raises(InvalidOption, **never):
        wrap(model, "none", tiers=(0,), max_len=16, backend="eager", acceptance=Relaxed(begin, end))


def test_what_is_forbidden_is_not_near() -> None:
    """Fewer tokens are possible than may be kept, and none of them is sure."""
    scores = torch.full((VOCAB,), float("-inf"))
    scores[:3] = 0.0
    for compat in (False, True):
        assert [kept(scores, draft, [BEGIN], [], compat=compat, top_k=VOCAB, delta=1.0) for draft in (0, 2, 3)] == [
            True, True, False
        ]  # fmt: skip


PROMPTS = [
    [1, BEGIN, 2], [3, 4, 5], [BEGIN, 1, END, 6], [END, 2, 7], [2, 3, BEGIN], [6, END, BEGIN, 1], [5, 5, 1],
    [1, END, 4], [BEGIN, 1, END, 6],
]  # fmt: skip


@pytest.mark.parametrize("compat", [False, True])
def test_the_phase_of_each_step_is_that_of_its_own_text(model: LlamaForCausalLM, compat: bool) -> None:
    """Requests over two slots, the last ones with KV of former owners. A step that begins in the phase keeps all of its
    drafts, since everything is near enough; one that does not emits the greedy text."""
    rule = Relaxed(BEGIN, END, top_k=VOCAB, delta=1.0, trtllm_compat=compat)
    phase = pool_thinks if compat else ours_thinks
    draft_len, new = 3, 24
    sizes: dict[str, Any] = {"tiers": (0, draft_len), "max_batch": 2, "max_len": 64, "backend": "eager"}
    steps, flipped = {True: 0, False: 0}, 0
    with wrap(model, "early_exit", acceptance=rule, **sizes) as spec:
        for prompts in (PROMPTS, PROMPTS[-2:]):
            requests = [spec.engine.submit(prompt, max_new_tokens=new, eos_token_id=[]) for prompt in prompts]
            while not all(request.finished for request in requests):
                before = [(request.stats.row_steps, request.stats.emitted_tokens) for request in requests]
                spec.engine.step()
                for request, (ran, emitted) in zip(requests, before, strict=True):
                    if request.stats.row_steps == ran:
                        continue
                    text, prompt = request.new_tokens, request.prompt
                    known = len(text) - (request.stats.emitted_tokens - emitted)
                    with torch.no_grad():
                        choices = (
                            model(torch.tensor([prompt + text])).logits[0].argmax(-1)[len(prompt) + known - 1 : -1]
                        )
                    thinks = phase(prompt, text[:known])
                    steps[thinks] += 1
                    flipped += thinks != phase(prompt, [])
                    if thinks:
                        assert len(text) - known == min(draft_len + 1, new - known) and text[-1] == choices[-1]
                    else:
                        assert text[known:] == choices.tolist()
        assert spec.stats.reused_tokens > 0
    assert min(*steps.values(), flipped) > 5, (steps, flipped)
