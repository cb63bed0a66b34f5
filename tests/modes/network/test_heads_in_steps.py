"""Draft heads and models in steps: drafts are the definition's, whatever ran before, and the text is the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.acceptance import Forced
from speccompile.heads import DFlashHead, Eagle3Head, MtpHead, MtpVariant
from support.dflash_reference import plain_drafts
from support.dice import Dice
from support.drafters import random_drafter
from support.eagle3_specs import TAPS, drafted, drafted_in_front, plain_of, states_of
from support.engines import always_mixes
from support.head_texts import assert_greedy_texts
from support.mtp_reference import draft_by_chain, left_by_target
from support.tiny import admitted, cancel_all, greedy, random_prompt

TINY = {"layers": 4}
KMAX, MASK, BLOCK, MODULES = 3, 9, 5, 3
SIZES: dict[str, Any] = {"tiers": (0, KMAX), "max_batch": 4, "max_len": 128, "backend": "eager"}
#: How many drafts are accepted in each step, whatever they are.
TRACE = (0, 3, 1, 2, 3, 3, 0, 2, 1, 1, 3)


@dataclass(frozen=True)
class Kind:
    """A kind of drafters.

    Args:
        mode: drafts inside of the step.
        make: a random one for a target.
        drafts: tokens and logits after a sequence, by the definition.
        others: further modes with the same heads, and their options.
        reused: most tokens of a known prompt that are not processed again, by its length; 40 of them are known.
        options: of the mode.
        behind: tokens before the end of a sequence that are processed again where it goes on.
    """

    mode: str
    make: Callable[..., Any]
    drafts: Callable[[LlamaForCausalLM, Any, list[int]], tuple[list[int], torch.Tensor]]
    others: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    reused: Callable[[int], int] = field(default=lambda length: min(length - 1, 39))
    options: dict[str, Any] = field(default_factory=dict)
    behind: int = 6


def eagle3(model: LlamaForCausalLM, **fields: Any) -> Eagle3Head:
    return Eagle3Head.random(model, taps=TAPS, **({"draft_vocab_size": 50} | fields))


def block_of(model: LlamaForCausalLM, head: DFlashHead, text: list[int]) -> tuple[list[int], torch.Tensor]:
    tokens, logits = plain_drafts(model, head, text)
    return tokens[:KMAX], logits[:KMAX]


def at_once(model: LlamaForCausalLM, draft: LlamaForCausalLM, text: list[int]) -> tuple[list[int], torch.Tensor]:
    """Drafts of a draft model in one forward over the sequence and mask tokens."""
    with torch.no_grad():
        logits = draft(torch.tensor([text + [MASK] * (KMAX - 1)])).logits[0, -KMAX:]
    return logits.argmax(-1).tolist(), logits


def mtp(mode: str, others: dict[str, tuple[str, dict[str, Any]]], *, reuse: bool) -> Kind:
    return Kind(
        mode,
        lambda model, **fields: MtpHead.random(model, MODULES, **fields),
        lambda model, head, text: draft_by_chain(head, text, left_by_target(model, text), KMAX, reuse=reuse),
        others,
        lambda length: min(length - 1, 40) - (1 if reuse else MODULES),
        behind=9,
    )


KINDS = {
    "EAGLE-3": Kind(
        "eagle3_one_model",
        eagle3,
        lambda model, head, text: plain_of(head).draft(text, states_of(model, text), KMAX),
        {"split": ("eagle3", {})},
    ),
    "P-EAGLE": Kind(
        "eagle3_one_model",
        lambda model, **fields: eagle3(model, mask_token_id=MASK, **fields),
        lambda model, head, text: plain_of(head).draft_at_once(text, states_of(model, text), KMAX, MASK),
        {"split": ("eagle3", {"confidence": True})},
    ),
    "DFlash": Kind(
        "dflash",
        lambda model, **fields: DFlashHead.random(
            model, MASK, **({"block_size": BLOCK, "num_hidden_layers": 2, "taps": (0, 2)} | fields)
        ),
        block_of,
        {"split": ("dflash", {"fused": False})},
        lambda length: min(length - 1, 40),
    ),
    "PARD": Kind(
        "draft_target",
        lambda model: random_drafter(),
        at_once,
        {"split": ("draft_target", {"fused": False, "mask_token_id": MASK})},
        lambda length: min(length - 1, 40),
        {"mask_token_id": MASK},
    ),
    "MTP": mtp("mtp", {"chain of the target's states": ("mtp", {"chain": "target"})}, reuse=False),
    "one MTP module": mtp("mtp_eagle_one_model", {"split": ("mtp_eagle", {})}, reuse=True),
}
each_kind = pytest.mark.parametrize("name", KINDS)
OTHER = MtpVariant(hidden_first=True, normed_target=False, normed_carry=False)
#: Heads of other fields than the usual ones, where a kind has some: the tests of :func:`specs` have the usual ones.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all norms": (
        "EAGLE-3",
        {"draft_vocab_size": 70, "fc_norm": True, "norm_output": True, "num_hidden_layers": 2, "head_dim": 12},
    ),
    "at once, more layers": (
        "P-EAGLE",
        {"draft_vocab_size": 128, "num_hidden_layers": 2, "fc_norm": True, "norm_before_residual": True},
    ),
    "causal in part, near, and scaled": (
        "DFlash",
        {"causal": (True, False), "windows": (7, 4), "attention_bias": True}
        | {"embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 3.0},
    ),
    "other chain": ("MTP", {"variant": OTHER}),
    "other module": ("one MTP module", {"variant": OTHER}),
    "a draft model": ("PARD", {}),
}

Specs = Callable[..., tuple[Speculator, Any]]


def built(model: LlamaForCausalLM, head: Any, mode: str, **options: Any) -> Speculator:
    options = SIZES | options
    return wrap(model, mode, draft=head, **({"policy": f"fixed:{max(options['tiers'])}"} | options))


@pytest.fixture(scope="module")
def specs(model: LlamaForCausalLM) -> Specs:
    """A speculator of a kind and its head, for all tests, in the largest tier."""
    heads: dict[str, Any] = {}
    made: dict[tuple[str, str], Speculator] = {}

    def get(name: str, other: str = "") -> tuple[Speculator, Any]:
        kind = KINDS[name]
        if name not in heads:
            heads[name] = kind.make(model)
        if (name, other) not in made:
            mode, options = kind.others[other] if other else (kind.mode, kind.options)
            made[name, other] = built(model, heads[name], mode, **options)
        spec = made[name, other]
        spec.set_tier(KMAX)
        spec.stats.reset()
        return spec, heads[name]

    return get


def assert_drafts(spec: Speculator, model: LlamaForCausalLM, head: Any, name: str, request: Any) -> None:
    """Assert that a step would draft for ``request`` now the tokens that the head drafts by itself."""
    text = request.prompt + request.new_tokens
    tokens, logits = drafted(spec, request.slot, KMAX)
    wanted, wanted_logits = KINDS[name].drafts(model, head, text)
    room = min(KMAX, int(spec.arena["limit"][request.slot]) - len(text) - 1)
    assert tokens == wanted[:room] + [-1] * (KMAX - room)
    torch.testing.assert_close(logits.double(), wanted_logits.double(), rtol=1e-3, atol=1e-3)


# --- drafts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_step_by_step_after_a_prompt_in_chunks(model: LlamaForCausalLM, variant: str) -> None:
    """Some drafts are accepted in each round, whatever they are, and others are not."""
    name, fields = VARIANTS[variant]
    head = KINDS[name].make(model, **fields)
    sizes = {"tiers": (0, 1, KMAX), "max_batch": 1, "max_len": 63, **KINDS[name].options}
    with built(model, head, KINDS[name].mode, acceptance=Forced(trace=TRACE), **sizes) as spec:
        spec.generate(torch.tensor([random_prompt(20, seed=9)]), max_new_tokens=9)
        for tiers, new in {(3,): 13, (1,): 11, (0, 3, 1, 0, 0, 3): 20}.items():
            spec.stats.reset()
            request = admitted(spec.engine, random_prompt(37, seed=new), max_new_tokens=new)
            assert request.stats.prefill_tokens == 37
            steps = 0
            while not request.finished:
                assert_drafts(spec, model, head, name, request)
                spec.set_tier(tiers[steps % len(tiers)])
                spec.engine.step()
                steps += 1
            assert 0 < spec.stats.accepted_tokens < spec.stats.draft_tokens or tiers == (1,)


@each_kind
@pytest.mark.parametrize("length", [1, 2, 3, 4, 65])
def test_after_prompts_of_any_length(specs: Specs, model: LlamaForCausalLM, name: str, length: int) -> None:
    spec, head = specs(name)
    request = admitted(spec.engine, random_prompt(length, seed=100 + length), max_new_tokens=9)
    spec.set_tier(0 if length % 2 else KMAX)
    assert_drafts(spec, model, head, name, request)
    while len(request.new_tokens) < 3:
        spec.engine.step()
        assert_drafts(spec, model, head, name, request)
    request.cancel()


@each_kind
def test_twenty_steps_without_drafts_change_nothing(specs: Specs, model: LlamaForCausalLM, name: str) -> None:
    spec, head = specs(name)
    request = admitted(spec.engine, random_prompt(15, seed=3), max_new_tokens=60)
    spec.set_tier(0)
    for _ in range(20):
        spec.engine.step()
    assert len(request.new_tokens) == 21
    assert_drafts(spec, model, head, name, request)
    request.cancel()


@each_kind
def test_rows_of_different_lengths_draft_what_each_drafts_alone(
    specs: Specs, model: LlamaForCausalLM, name: str
) -> None:
    spec, head = specs(name)
    # On a busy machine others write many tokens while the longest prompt is processed.
    spec.set_tier(0)
    requests = [
        spec.engine.submit(random_prompt(length, seed=length), max_new_tokens=120 - length) for length in (1, 40, 90)
    ]
    while not all(request.new_tokens for request in requests):
        spec.engine.step()
    for tier in (KMAX, 0, 0, 0, 0, KMAX):
        for request in requests:
            assert_drafts(spec, model, head, name, request)
        spec.set_tier(tier)
        spec.engine.step()
    cancel_all(spec.engine)


@each_kind
def test_a_known_beginning(specs: Specs, model: LlamaForCausalLM, name: str) -> None:
    """Rows at the end of what two sequences share have read the other one's next tokens."""
    (spec, head), kind, beginning = specs(name), KINDS[name], random_prompt(40, seed=4)
    spec.generate(torch.tensor([[*beginning, 5, 6, 7]]), max_new_tokens=4)
    for prompt in ([*beginning, 9, 8, 7], [*beginning, 9], beginning):
        request = admitted(spec.engine, prompt, max_new_tokens=9)
        assert 0 < request.stats.reused_tokens <= kind.reused(len(prompt))
        assert_drafts(spec, model, head, name, request)
        assert request.result().token_ids == greedy(model, prompt, 9)
    # A sequence that goes on keeps its slot.
    longer = request.prompt + request.new_tokens + [3, 1]
    slot, request = request.slot, admitted(spec.engine, longer, max_new_tokens=9)
    assert request.slot == slot and request.stats.reused_tokens > len(longer) - kind.behind
    assert_drafts(spec, model, head, name, request)
    request.cancel()


@pytest.mark.parametrize(
    ("name", "draft_len"),
    [*((name, KMAX) for name in KINDS), *((name, 0) for name in ("EAGLE-3", "DFlash", "MTP"))],
)
def test_a_prompt_beside_a_step(specs: Specs, model: LlamaForCausalLM, name: str, draft_len: int) -> None:
    spec, head = specs(name)
    always_mixes(spec)
    running = admitted(spec.engine, random_prompt(5), max_new_tokens=90)
    for length in (1, 2, 9, 30):
        spec.set_tier(draft_len)
        request = spec.engine.submit(random_prompt(length, seed=length), max_new_tokens=8)
        while not request.new_tokens:
            spec.engine.step()
        assert_drafts(spec, model, head, name, request)
        assert not running.finished and request.result().token_ids == greedy(model, request.prompt, 8)
    assert any(tier.key.prompt_tokens for tier in spec.engine.mixed_tiers.values())
    cancel_all(spec.engine)
    assert running.new_tokens == greedy(model, running.prompt, len(running.new_tokens))


DRAWN: dict[str, dict[str, Any]] = {"greedy": {}, "drawn": {"do_sample": True, "temperature": 6.0, "seed": 4}}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if "split" in kind.others])
def test_fused_and_split_draft_the_same(specs: Specs, name: str, drawn: dict[str, Any]) -> None:
    """Each step accepts the same drafts, and the next step would draft the same."""
    tiers, seen = [3, 0, 3, 3, 0, 0, 3] * 9, []
    for split in ("", "split"):
        one, _ = specs(name, split)
        request = one.engine.submit(random_prompt(40, seed=8), max_new_tokens=40, **drawn)
        while not request.new_tokens:
            one.engine.step()
        steps, drafts = [], []
        for draft_len in tiers:
            if request.finished:
                break
            one.set_tier(draft_len)
            one.engine.step()
            steps.append(len(request.new_tokens))
            if not request.finished:
                of = drafted_in_front(one, request.slot, 3) if split else drafted(one, request.slot, 3)[0]
                drafts.append(of)
        seen.append((request.new_tokens, steps, drafts))
    assert "before the step" in one.explain()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash"])
def test_own_longest_text(model: LlamaForCausalLM, name: str) -> None:
    """After it rows are decoded plainly, one by one, beside others that draft."""
    head = KINDS[name].make(model, max_position_embeddings=32)
    with built(model, head, KINDS[name].mode, tiers=(0, KMAX), max_batch=2, max_len=63) as spec:
        assert spec.arena["drafter_k_0"].shape[1] < spec.arena["k_0"].shape[1]
        assert spec.arena["drafter_k_0"].shape[1] == 32 + (BLOCK if name == "DFlash" else KMAX + 1)
        requests = [
            spec.engine.submit(prompt, max_new_tokens=30) for prompt in (random_prompt(25), random_prompt(4, seed=1))
        ]
        while not requests[0].finished:
            lengths = [len(request.prompt + request.new_tokens) for request in requests]
            spec.engine.step()
            for request, length in zip(requests, lengths, strict=True):
                if len(request.new_tokens) > 1 and not request.finished and length > 31:
                    assert int(spec.arena["proposed"][request.slot]) == 0
        assert requests[1].stats.draft_tokens > 20
        for request in requests:
            assert request.result().token_ids == greedy(model, request.prompt, 30)


@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash"])
@pytest.mark.parametrize(("most", "drafts"), [(2, 0), (4, 1)])
def test_a_head_for_the_shortest_texts(
    specs: Specs, model: LlamaForCausalLM, name: str, most: int, drafts: int
) -> None:
    """Shorter than what its capture is checked over."""
    _, head = specs(name)
    options = {"draft_max_len": most, "tiers": (0, 1), "max_batch": 1, "max_len": 16}
    with built(model, head, KINDS[name].mode, **options) as one:
        request = one.engine.submit([5], max_new_tokens=12)
        assert request.result().token_ids == greedy(model, [5], 12)
        assert one.stats.draft_tokens == drafts


# --- texts -------------------------------------------------------------------------------------


each_mode = pytest.mark.parametrize(
    ("name", "other"), [(name, other) for name, kind in KINDS.items() for other in ("", *kind.others)]
)


@each_mode
@pytest.mark.parametrize("rows", [2, 3])
def test_greedy_text_is_the_targets(specs: Specs, model: LlamaForCausalLM, name: str, other: str, rows: int) -> None:
    assert_greedy_texts(specs(name, other)[0], model, rows)


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    drawn = [{}, {"temperature": 5.0}, {"top_k": 9, "repetition_penalty": 1.3}, {"top_p": 0.8, "temperature": 2.0}]
    return [
        {"ids": random_prompt(1 + 9 * row, seed=row), "do_sample": True, "seed": row, "max_new_tokens": 25} | options
        for row, options in enumerate(drawn)
    ]


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM, asked: list[dict[str, Any]]) -> list[list[int]]:
    with wrap(model, "none", **SIZES | {"tiers": (0,)}) as plain:
        return [plain.engine.submit(**request).result().token_ids for request in asked]


@each_mode
@pytest.mark.parametrize("rows", [3])
def test_sampled_text_is_the_targets(
    specs: Specs, asked: list[dict[str, Any]], expected: list[list[int]], name: str, other: str, rows: int
) -> None:
    spec, _ = specs(name, other)
    spec.engine.policy = Dice(SIZES["tiers"], rows)
    together = [spec.engine.submit(**request) for request in asked[:rows]]
    assert [request.result().token_ids for request in together] == expected[:rows]
