"""DFlash against transformers' own generator: the same drafts, token by token, whatever ran before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, wrap
from speccompile.acceptance import Forced
from speccompile.heads import DFlashHead
from support.dflash_reference import Oracle, assistant_of, recorded
from support.eagle3_specs import drafted
from support.families import model_of
from support.tiny import admitted, random_prompt, tiny_llama

MASK = 3
HEADS: dict[str, dict[str, Any]] = {
    "the last layer, and out of order": {"block_size": 6, "num_hidden_layers": 2, "taps": (3, 1), "head_dim": 12},
    "windows": {"block_size": 4, "num_hidden_layers": 2, "taps": (1, 2), "windows": (9, None)},
    "windows alone": {"block_size": 5, "num_hidden_layers": 2, "taps": (2,), "windows": (3, 3)},
}
TINY = {"layers": 4}


def dflash(model: LlamaForCausalLM, head: DFlashHead, **options: Any) -> Speculator:
    most = head.config.block_size - 1
    sizes: dict[str, Any] = {"tiers": (0, 1, most), "policy": f"fixed:{most}", "max_batch": 1, "max_len": 63}
    return wrap(model, "dflash", draft=head, backend="eager", **(sizes | options))


@pytest.mark.parametrize("name", HEADS)
def test_step_by_step_with_rejections_after_a_prompt_in_chunks(
    model: LlamaForCausalLM, tmp_path: Path, name: str
) -> None:
    """Some drafts are accepted in each round, whatever they are, and others are not."""
    head = DFlashHead.random(model, MASK, **HEADS[name])
    assistant, most = assistant_of(head, tmp_path), head.config.block_size - 1
    with dflash(model, head, acceptance=Forced(1.4)) as spec:
        for tiers, length in {(most,): 37, (1,): 2, (0, most, 1, 0, 0, most): 40}.items():
            spec.stats.reset()
            oracle = Oracle(model, assistant)
            request = admitted(spec.engine, random_prompt(length, seed=length), max_new_tokens=20)
            steps = 0
            while not request.finished:
                text = request.prompt + request.new_tokens
                room = min(most, int(spec.arena["limit"][request.slot]) - len(text) - 1)
                wanted = oracle.drafts(text)
                assert drafted(spec, request.slot, most)[0] == wanted[:room] + [-1] * (most - room)
                spec.set_tier(tiers[steps % len(tiers)])
                spec.engine.step()
                steps += 1
            accepted, judged = spec.stats.accepted_tokens, spec.stats.draft_tokens
            assert 0 < accepted < judged or tiers == (1,)


def test_a_target_whose_embedding_is_scaled(tmp_path: Path) -> None:
    target = model_of("gemma3", num_layers=3)
    head = DFlashHead.random(target, MASK, block_size=4, taps=(0, 2))
    assert head.config.embedding_scale > 1
    with dflash(target, head, acceptance=Forced(1.4)) as spec:
        oracle = Oracle(target, assistant_of(head, tmp_path))
        request = admitted(spec.engine, random_prompt(20, vocab=100), max_new_tokens=30)
        for _ in range(4):
            assert drafted(spec, request.slot, 3)[0] == oracle.drafts(request.prompt + request.new_tokens)
            spec.engine.step()


def test_the_same_steps_as_assisted_generation(tmp_path: Path) -> None:
    """Over a vocabulary so small that drafts are right by chance."""
    model = tiny_llama(layers=4, vocab=6)
    head = DFlashHead.random(model, MASK, seed=4, block_size=5, num_hidden_layers=2, taps=(1, 2, 3))
    assistant = assistant_of(head, tmp_path)
    with dflash(model, head) as spec:
        for seed in range(3):
            prompt = [token % 6 for token in random_prompt(5 + 9 * seed, seed=seed)]
            expected: dict[int, list[int]] = {}
            with recorded(expected):
                text = model.generate(
                    torch.tensor([prompt]),
                    assistant_model=assistant,
                    speculation_type="dflash",
                    max_new_tokens=40,
                    do_sample=False,
                )[0].tolist()
            found: dict[int, list[int]] = {}
            request = admitted(spec.engine, prompt, max_new_tokens=len(text) - len(prompt))
            while not request.finished:
                length = len(request.prompt + request.new_tokens)
                found[length] = drafted(spec, request.slot, 4)[0]
                spec.engine.step()
            assert request.prompt + request.new_tokens == text
            for length, tokens in found.items():
                drafts = [token for token in tokens if token >= 0]
                assert drafts == expected.get(length, [])[: len(drafts)], length
        assert 20 < spec.stats.accepted_tokens < spec.stats.draft_tokens
