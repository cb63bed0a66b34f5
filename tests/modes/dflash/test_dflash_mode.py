"""DFlash in steps: the text is the target's, and drafts do not depend on what ran before."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.errors import InvalidHead, InvalidOption, InvalidTiers
from speccompile.heads import DFlashHead
from support.dflash_reference import Oracle, assistant_of, plain_drafts
from support.dice import Dice
from support.eagle3_specs import drafted, drafted_in_front, run_until
from support.engines import always_mixes
from support.errors import raises
from support.head_texts import assert_greedy_texts
from support.tiny import admitted, cancel_all, greedy, random_prompt, tiny_llama

MASK, BLOCK, KMAX = 3, 5, 3
SMALL: dict[str, Any] = {"tiers": (0, KMAX), "max_batch": 1, "max_len": 63}
TINY = {"layers": 4}


def head_of(model: LlamaForCausalLM, **fields: Any) -> DFlashHead:
    sizes: dict[str, Any] = {"block_size": BLOCK, "num_hidden_layers": 2, "taps": (0, 2)}
    return DFlashHead.random(model, MASK, **(sizes | fields))


@pytest.fixture(scope="module")
def head(model: LlamaForCausalLM) -> DFlashHead:
    return head_of(model)


@pytest.fixture(scope="module")
def assistant(head: DFlashHead, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return assistant_of(head, tmp_path_factory.mktemp("assistant"))


def dflash(model: LlamaForCausalLM, head: DFlashHead, **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": (0, 1, KMAX), "max_batch": 4, "max_len": 128, "backend": "eager"}
    options = sizes | options
    return wrap(model, "dflash", draft=head, **({"policy": f"fixed:{max(options['tiers'])}"} | options))


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM, head: DFlashHead) -> Speculator:
    return dflash(model, head)


def assert_drafts(spec: Speculator, model: LlamaForCausalLM, assistant: Any, request: Any) -> None:
    text = request.prompt + request.new_tokens
    room = min(KMAX, int(spec.arena["limit"][request.slot]) - len(text) - 1)
    wanted = Oracle(model, assistant).drafts(text)[:KMAX]
    assert drafted(spec, request.slot, KMAX)[0] == wanted[:room] + [-1] * (KMAX - room)


# --- drafts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5, 64, 65, 100])
def test_behind_prompts_of_any_length(spec: Speculator, model: LlamaForCausalLM, assistant: Any, length: int) -> None:
    request = admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=9)
    assert_drafts(spec, model, assistant, request)
    request.cancel()


VARIANTS: dict[str, dict[str, Any]] = {
    "causal in part": {"causal": (True, False), "windows": (6, None), "attention_bias": True},
    "near, and scaled": {"windows": (7, 4), "embedding_scale": 2.0, "logit_scale": 0.5, "logit_softcap": 3.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_published_heads(model: LlamaForCausalLM, name: str) -> None:
    own = head_of(model, **VARIANTS[name])
    with dflash(model, own, **SMALL) as one:
        request = admitted(one.engine, random_prompt(37), max_new_tokens=20)
        for _ in range(6):
            text = request.prompt + request.new_tokens
            tokens, logits = drafted(one, request.slot, KMAX)
            wanted, wanted_logits = plain_drafts(model, own, text)
            assert tokens == wanted[:KMAX]
            torch.testing.assert_close(logits.double(), wanted_logits[:KMAX], rtol=1e-3, atol=1e-3)
            one.engine.step()


def test_twenty_steps_without_drafts_change_nothing(spec: Speculator, model: LlamaForCausalLM, assistant: Any) -> None:
    request = admitted(spec.engine, random_prompt(15, seed=3), max_new_tokens=60)
    spec.set_tier(0)
    for _ in range(20):
        spec.engine.step()
    assert len(request.new_tokens) == 21
    assert_drafts(spec, model, assistant, request)
    request.cancel()


def test_drafts_do_not_depend_on_the_tier(spec: Speculator) -> None:
    request = admitted(spec.engine, random_prompt(15, seed=4), max_new_tokens=60)
    assert drafted(spec, request.slot, 1)[0] == drafted(spec, request.slot, KMAX)[0][:1]
    request.cancel()


def test_rows_of_different_lengths_draft_what_each_drafts_alone(
    spec: Speculator, model: LlamaForCausalLM, assistant: Any
) -> None:
    spec.set_tier(KMAX)
    prompts = [random_prompt(length, seed=length) for length in (3, 40, 90)]
    requests = [spec.engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
    while not all(request.new_tokens for request in requests):
        spec.engine.step()
    for tier in (KMAX, 1, KMAX):
        for request in requests:
            assert_drafts(spec, model, assistant, request)
        spec.set_tier(tier)
        spec.engine.step()
    cancel_all(spec.engine)


def test_a_known_beginning(spec: Speculator, model: LlamaForCausalLM, assistant: Any) -> None:
    beginning = random_prompt(40, seed=4)
    spec.set_tier(KMAX)
    spec.generate(torch.tensor([[*beginning, 5, 6, 7]]), max_new_tokens=4)
    for prompt in ([*beginning, 9, 8, 7], [*beginning, 9], beginning):
        request = admitted(spec.engine, prompt, max_new_tokens=9)
        assert request.stats.reused_tokens > 0
        assert_drafts(spec, model, assistant, request)
        assert request.result().token_ids == greedy(model, prompt, 9)


def test_a_prompt_beside_a_step(model: LlamaForCausalLM, head: DFlashHead, assistant: Any) -> None:
    with dflash(model, head, tiers=(0, KMAX), max_batch=2, max_len=63) as spec:
        always_mixes(spec)
        running = admitted(spec.engine, random_prompt(5), max_new_tokens=58)
        for length in (1, 9, 30):
            spec.set_tier(KMAX)
            request = spec.engine.submit(random_prompt(length, seed=length), max_new_tokens=8)
            while not request.new_tokens:
                spec.engine.step()
            assert_drafts(spec, model, assistant, request)
            assert not running.finished and request.result().token_ids == greedy(model, request.prompt, 8)
        assert any(tier.key.prompt_tokens for tier in spec.engine.mixed_tiers.values())
        cancel_all(spec.engine)
        assert running.new_tokens == greedy(model, running.prompt, len(running.new_tokens))


def test_fused_and_split_draft_the_same(spec: Speculator, model: LlamaForCausalLM, head: DFlashHead) -> None:
    tiers, seen = [KMAX, 0, 1, KMAX, 0, 0, KMAX, 1] * 4, []
    with dflash(model, head, fused=False) as split:
        assert "before the step" in split.explain()
        for one in (spec, split):
            request = admitted(one.engine, random_prompt(40, seed=8), max_new_tokens=30)
            drafts = []
            for draft_len in tiers:
                if request.finished:
                    break
                drafts.append((drafted if one is spec else drafted_in_front)(one, request.slot, KMAX))
                one.set_tier(draft_len)
                one.engine.step()
            seen.append((request.new_tokens, [found[0] if one is spec else found for found in drafts]))
    assert seen[0] == seen[1]


def test_a_lookup_drafts_first(model: LlamaForCausalLM, head: DFlashHead) -> None:
    options: dict[str, Any] = SMALL | {"max_len": 95, "policy": f"fixed:{KMAX}", "backend": "eager"}
    with wrap(model, ["ngram", "dflash"], draft=head, **options) as one:
        for prompt in (random_prompt(8) * 5, random_prompt(40)):
            assert one.generate(torch.tensor([prompt]), max_new_tokens=40)[0, len(prompt) :].tolist() == greedy(
                model, prompt, 40
            )
        assert one.stats.draft_tokens > 40


def test_own_longest_text(model: LlamaForCausalLM) -> None:
    """After it rows are decoded plainly, one by one, beside others that draft."""
    own = head_of(model, max_position_embeddings=32)
    with dflash(model, own, tiers=(0, KMAX), max_batch=2, max_len=63) as spec:
        assert spec.arena["drafter_k_0"].shape[1] == 32 + BLOCK
        prompts = [random_prompt(25), random_prompt(4, seed=1)]
        requests = [spec.engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
        while not requests[0].finished:
            lengths = [len(request.prompt + request.new_tokens) for request in requests]
            spec.engine.step()
            for request, length in zip(requests, lengths, strict=True):
                if len(request.new_tokens) > 1 and not request.finished and length > 31:
                    assert int(spec.arena["proposed"][request.slot]) == 0
        assert requests[1].stats.draft_tokens > 20
        for request in requests:
            assert request.result().token_ids == greedy(model, request.prompt, 30)


@pytest.mark.parametrize(("most", "drafts"), [(2, 0), (4, 1)])
def test_a_head_for_the_shortest_texts(model: LlamaForCausalLM, head: DFlashHead, most: int, drafts: int) -> None:
    """Shorter than what its capture is checked over."""
    with dflash(model, head, draft_max_len=most, tiers=(0, 1), max_batch=1, max_len=16) as one:
        request = one.engine.submit([5], max_new_tokens=12)
        assert request.result().token_ids == greedy(model, [5], 12)
        assert one.stats.draft_tokens == drafts


# --- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_greedy_text_is_the_targets(spec: Speculator, model: LlamaForCausalLM, rows: int) -> None:
    assert_greedy_texts(spec, model, rows)


def test_sampled_text_is_the_targets(spec: Speculator, model: LlamaForCausalLM) -> None:
    asked = [
        {"ids": random_prompt(5 + 9 * row, seed=row), "do_sample": True, "seed": row, "max_new_tokens": 25}
        | [{}, {"temperature": 5.0}, {"top_k": 9, "repetition_penalty": 1.3}, {"top_p": 0.8, "temperature": 2.0}][row]
        for row in range(4)
    ]
    with wrap(model, "none", tiers=(0,), max_batch=4, max_len=128, backend="eager") as plain:
        expected = [plain.engine.submit(**request).result().token_ids for request in asked]
    spec.engine.policy = Dice([0, 1, KMAX], 4)
    together = [spec.engine.submit(**request) for request in asked]
    assert [request.result().token_ids for request in together] == expected


def test_shared_noise_makes_drafts_right(model: LlamaForCausalLM, head: DFlashHead) -> None:
    """Where noise outweighs logits the head draws what the target draws."""
    with dflash(model, head, **SMALL) as spec:
        drawn = {"do_sample": True, "temperature": 60.0, "top_k": 0, "max_new_tokens": 50}
        for seed in (1, 2):
            spec.generate(torch.tensor([random_prompt(8)]), seed=seed, **drawn)
        assert spec.stats.accepted_tokens / spec.stats.draft_tokens > 0.75


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_with_draft_probabilities(model: LlamaForCausalLM, head: DFlashHead, rule: str) -> None:
    """A step hands over what its drafts were drawn from, which is all that a rule keeps its distribution by."""
    with dflash(model, head, acceptance=rule, **SMALL) as spec:
        prompt = random_prompt(9)
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=20)[0, 9:].tolist() == greedy(model, prompt, 20)
        for seed in (0, 1):
            spec.generate(torch.tensor([prompt]), do_sample=True, temperature=3.0, seed=seed, max_new_tokens=45)
        assert 5 < spec.stats.accepted_tokens < spec.stats.draft_tokens
        drawn = {"do_sample": True, "temperature": 3.0, "top_k": 0, "seed": 2, "max_new_tokens": 20}
        request = spec.engine.submit(prompt, **drawn)
        while not request.new_tokens:
            spec.engine.step()
        graph = spec.engine.tiers[KMAX, 1, "sampled"].graph
        probs, _ = run_until(spec, request.slot, graph, "draft_probs")
        _, logits = plain_drafts(model, head, prompt + request.new_tokens)
        torch.testing.assert_close(probs[0].double(), (logits[:KMAX] / 3.0).softmax(-1), rtol=1e-3, atol=1e-5)
        assert probs.amax() < 0.9


# --- what is taken -------------------------------------------------------------------------------


def test_a_smaller_block_is_that_of_a_head_made_so(model: LlamaForCausalLM, head: DFlashHead) -> None:
    text, drafts = random_prompt(20), []
    for own, options in ((head, {"block_size": 3}), (head_of(model, block_size=3), {}), (head, {})):
        with dflash(model, own, **(SMALL | {"tiers": (0, 2)}), **options) as spec:
            request = admitted(spec.engine, text, max_new_tokens=9)
            drafts.append(drafted(spec, request.slot, 2)[1])
    assert torch.equal(drafts[0], drafts[1]) and not torch.allclose(drafts[0], drafts[2])
    assert head.config.block_size == BLOCK


def test_what_does_not_fit_is_refused(model: LlamaForCausalLM, head: DFlashHead) -> None:
    with raises(InvalidOption, name="draft", reason=re.compile("DFlashHead")):
        wrap(model, "dflash")
    with raises(InvalidOption, name="draft_max_len"):
        dflash(model, head, draft_max_len=1)
    for size in (1, True, BLOCK + 1):
        with raises(InvalidOption, name="block_size"):
            dflash(model, head, block_size=size)
    with raises(InvalidTiers):
        dflash(model, head, tiers=(0, BLOCK))
    with raises(InvalidHead, reason=re.compile("another target")):
        dflash(tiny_llama(layers=4), head)
    with raises(InvalidHead, reason=re.compile(r"eval\(\)")):
        # A head's train() reaches what it shares with its target.
        dflash(target := tiny_llama(layers=4), head_of(target).train())
    double = head_of(model)
    double.fc.double()
    with raises(InvalidHead, reason=re.compile("float64")):
        dflash(model, double)
    with raises(InvalidHead, reason=re.compile("not a folder")):
        dflash(model, "/nowhere/at/all")  # type: ignore[arg-type]
