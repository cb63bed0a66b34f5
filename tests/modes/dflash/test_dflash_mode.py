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
from support.eagle3_specs import drafted, run_until
from support.errors import raises
from support.tiny import admitted, greedy, random_prompt, tiny_llama

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


def test_drafts_do_not_depend_on_the_tier(spec: Speculator) -> None:
    request = admitted(spec.engine, random_prompt(15, seed=4), max_new_tokens=60)
    assert drafted(spec, request.slot, 1)[0] == drafted(spec, request.slot, KMAX)[0][:1]
    request.cancel()


def test_a_lookup_drafts_first(model: LlamaForCausalLM, head: DFlashHead) -> None:
    options: dict[str, Any] = SMALL | {"max_len": 95, "policy": f"fixed:{KMAX}", "backend": "eager"}
    with wrap(model, ["ngram", "dflash"], draft=head, **options) as one:
        for prompt in (random_prompt(8) * 5, random_prompt(40)):
            assert one.generate(torch.tensor([prompt]), max_new_tokens=40)[0, len(prompt) :].tolist() == greedy(
                model, prompt, 40
            )
        assert one.stats.draft_tokens > 40


# --- texts ---------------------------------------------------------------------------------------


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
