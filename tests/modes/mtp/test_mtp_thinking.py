"""Relaxed acceptance with MTP modules, end to end: a scripted model begins to think and ends, over and over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile.acceptance import Relaxed
from speccompile.heads import MtpHead
from support.mtp_specs import mtp
from support.tiny import tiny_llama

VOCAB, BEGIN, END = 12, 4, 9
DRAFT_LEN, NEW = 3, 30


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Says t + 1 after t: 0 1 2 3 BEGIN 5 6 7 8 END 10 11 0 ..."""
    model = tiny_llama(vocab=VOCAB)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        tokens = torch.eye(VOCAB, model.config.hidden_size)
        model.model.embed_tokens.weight.copy_(tokens)
        model.lm_head.weight.copy_(tokens.roll(1, 0))
    return model


def thinks(prompt: list[int], emitted: list[int], compat: bool) -> bool:
    """A slot's state: of TensorRT-LLM's the prompt's END says nothing."""
    state = BEGIN in prompt
    for token in emitted if compat else [*prompt, *emitted]:
        state = {BEGIN: True, END: False}.get(token, state)
    return state


@pytest.mark.parametrize(("mode", "compat"), [("mtp", True), ("mtp_eagle", False)])
def test_acceptance_changes_with_the_phase(model: LlamaForCausalLM, mode: str, compat: bool) -> None:
    """Everything is near enough in the phase, so all drafts of a step that begins in it stay; else the script's alone
    do. Requests share two slots: what a former owner's state was makes no difference."""
    rule = Relaxed(BEGIN, END, top_k=VOCAB, delta=1.0, trtllm_compat=compat)
    head = MtpHead.random(model, DRAFT_LEN)
    prompts = [[0], [5], [BEGIN, 5], [END, 10], [BEGIN, END], [1, 2, 3], [BEGIN, 7, END, 11]]
    options: dict[str, Any] = {"tiers": (0, DRAFT_LEN), "max_batch": 2, "max_len": 64, "acceptance": rule}
    seen = {True: 0, False: 0}
    with mtp(model, head, mode, **options) as spec:
        requests = [spec.engine.submit(prompt, max_new_tokens=NEW, eos_token_id=[]) for prompt in prompts]
        while not all(request.finished for request in requests):
            before = [(request.stats.row_steps, request.stats.emitted_tokens) for request in requests]
            spec.engine.step()
            for request, (ran, emitted) in zip(requests, before, strict=True):
                if request.stats.row_steps == ran:
                    continue
                text = request.prompt + request.new_tokens
                new = request.stats.emitted_tokens - emitted
                known = len(request.new_tokens) - new
                state = thinks(request.prompt, request.new_tokens[:known], compat)
                seen[state] += 1
                assert text[-1] == (text[-2] + 1) % VOCAB
                if state:
                    assert new == min(DRAFT_LEN + 1, NEW - known)
                else:
                    script = [(token + 1) % VOCAB for token in text[-new - 1 : -1]]
                    assert text[-new:] == script
    assert min(seen.values()) > 10, seen
