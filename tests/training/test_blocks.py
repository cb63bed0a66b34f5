"""Training of block drafters computes what the decoding head computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speccompile.heads import DFlashHead
from speccompile.modes.dflash.attention import BlockCache
from speccompile.training.blocks import BlockTraining
from speccompile.training.teacher import TargetStates, Teacher
from support.tiny import random_prompt
from support.training_data import TAPS, VOCAB, learnable

LENGTH, BLOCK, MASK = 12, 4, 31


def small_head(**fields: Any) -> DFlashHead:
    return DFlashHead.random(learnable(), MASK, seed=1, **{"taps": TAPS, "block_size": BLOCK} | fields)


def decoded(head: DFlashHead, token: int, hidden: torch.Tensor) -> torch.Tensor:
    """What the lm_head reads ``[BLOCK, M]`` of a block that starts with ``token`` after the context ``hidden`` ``[a,
    taps * M]``, by the cache that decoding has."""
    start = len(hidden)
    shape = (1, LENGTH + BLOCK, head.config.num_key_value_heads, head.config.head_dim)
    keys, values = ({layer: torch.zeros(shape) for layer in head.kv} for _ in range(2))
    known = head.context_kv(head.context(hidden[None]), torch.arange(start)[None])
    for layer, (key, value) in enumerate(known):
        keys[layer][:, :start], values[layer][:, :start] = key, value
    positions = torch.arange(start, start + BLOCK)[None]
    cache = BlockCache(keys, values, torch.tensor([0]), positions, positions[:, -1:].expand_as(positions))
    tokens = torch.tensor([[token, *[MASK] * (BLOCK - 1)]])
    return head.norm(head.read(head.embed(tokens), positions, cache))[0]


@pytest.mark.parametrize("fields", [{}, {"num_hidden_layers": 2}, {"causal": (True,)}], ids=str)
def test_every_block_is_that_of_the_decoding_head(fields: dict[str, Any]) -> None:
    head = small_head(**fields)
    module = BlockTraining(head, Teacher(learnable(), TAPS), blocks=3, decay=0.8, seed=0)
    texts = torch.tensor([random_prompt(LENGTH, seed=seed, vocab=VOCAB) for seed in (1, 2)])
    hidden = torch.randn(2, LENGTH, head.hidden_size)
    starts = torch.tensor([[5, 1, 11], [2, 8, 3]])
    with torch.no_grad():
        found = module._drafts(head, texts, TargetStates(hidden, hidden, texts), starts)
        for row, places in enumerate(starts.tolist()):
            for block, place in enumerate(places):
                wanted = decoded(head, int(texts[row, place]), hidden[row, :place])
                torch.testing.assert_close(found[row, block], wanted, rtol=1e-4, atol=1e-5)


def test_blocks_start_where_a_draft_is_learnt() -> None:
    module = BlockTraining(small_head(), Teacher(learnable(), TAPS), blocks=3, decay=0.8, seed=0)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 2:9], mask[1, :3] = True, True
    for training in (True, False):
        starts, rows = module.train(training)._starts(mask)
        assert starts.shape == (2, 3) and rows.tolist() == [[True] * 3, [True, False, False]]
        assert set(starts[0].tolist()) <= set(range(2, 8)) and len(set(starts[0].tolist())) == 3
        assert starts[1, 0] == 1


def test_the_loss_and_the_counts_are_those_of_their_definition() -> None:
    model, decay = learnable(), 0.7
    head = small_head()
    module = BlockTraining(head, Teacher(model, TAPS), blocks=LENGTH, decay=decay, seed=0).eval()
    text = random_prompt(LENGTH, vocab=VOCAB)
    mask = torch.tensor([[False] * 4 + [True] * 8])
    losses: list[list[torch.Tensor]] = [[] for _ in range(BLOCK - 1)]
    accepted, judged = [0] * (BLOCK - 1), [0] * (BLOCK - 1)
    with torch.no_grad():
        target = model(torch.tensor([text]), output_hidden_states=True)
        hidden = torch.cat([target.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
        for start in range(4, LENGTH - 1):
            logits, alive = model.lm_head(decoded(head, text[start], hidden[:start])), True
            for draft in range(1, min(BLOCK, LENGTH - start)):
                wanted = target.logits[0, start + draft - 1]
                losses[draft - 1].append(-(wanted.softmax(-1) * logits[draft].log_softmax(-1)).sum())
                judged[draft - 1] += alive
                alive = alive and bool(logits[draft].argmax() == wanted.argmax())
                accepted[draft - 1] += alive
                alive = alive and int(wanted.argmax()) == text[start + draft]
        found = module(torch.tensor([text]), mask)
    expected = sum(decay**draft * torch.stack(of_draft).mean() for draft, of_draft in enumerate(losses))
    torch.testing.assert_close(found["loss"], expected)
    assert found["counts"].tolist() == [[accepted, judged]]


def test_the_heads_own_tensors_alone_are_trained_and_saved() -> None:
    model = learnable()
    head = DFlashHead.random(model, MASK, taps=TAPS, block_size=BLOCK)
    module = BlockTraining(head, Teacher(model, TAPS), blocks=3, decay=0.8, seed=0)
    assert set(module.state_dict()) == {*head.own_state(), "steps"}
    text = torch.tensor([random_prompt(LENGTH, vocab=VOCAB)])
    module(text, torch.ones_like(text, dtype=torch.bool))["loss"].backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
