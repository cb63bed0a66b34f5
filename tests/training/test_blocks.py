"""Training of block drafters computes what the decoding head computes."""

from __future__ import annotations

import math
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
    module = BlockTraining(head, Teacher(learnable(), TAPS), blocks=3, decay=0.8, variation=0.0, seed=0)
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
    module = BlockTraining(small_head(), Teacher(learnable(), TAPS), blocks=3, decay=0.8, variation=0.0, seed=0)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 2:9], mask[1, :3] = True, True
    for training in (True, False):
        starts, rows = module.train(training)._starts(mask)
        assert starts.shape == (2, 3) and rows.tolist() == [[True] * 3, [True, False, False]]
        assert set(starts[0].tolist()) <= set(range(2, 8)) and len(set(starts[0].tolist())) == 3
        assert starts[1, 0] == 1


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "markov": {"markov_rank": 3},
    "anchor": {"sample_from_anchor": True},
    "vocabulary": {"draft_vocab_size": 24},
    "all": {"markov_rank": 3, "sample_from_anchor": True, "draft_vocab_size": 24},
}


@pytest.mark.parametrize(("decay", "variation"), [(0.7, 0.0), (None, 0.3)], ids=["decay", "pace"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_and_the_counts_are_those_of_their_definition(
    name: str, decay: float | None, variation: float
) -> None:
    model, head = learnable(), small_head(**VARIANTS[name])
    module = BlockTraining(head, Teacher(model, TAPS), blocks=LENGTH, decay=decay, variation=variation, seed=0).eval()
    text = random_prompt(LENGTH, vocab=VOCAB)
    mask = torch.tensor([[False] * 4 + [True] * 8])
    most, anchor = head.config.most_drafts, int(head.config.sample_from_anchor)
    ids = list(range(VOCAB)) if head.d2t is None else (torch.arange(len(head.d2t)) + head.d2t).tolist()
    losses: list[list[torch.Tensor]] = [[] for _ in range(most)]
    accepted, judged = [0] * most, [0] * most
    with torch.no_grad():
        target = model(torch.tensor([text]), output_hidden_states=True)
        hidden = torch.cat([target.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
        for start in range(4, LENGTH - 1):
            of_block, chances, alive = [], [], True
            outputs = decoded(head, text[start], hidden[:start])
            for draft in range(1, min(most + 1, LENGTH - start)):
                logits = head.lm_head(outputs[draft - anchor])
                if head.config.markov_rank:
                    logits = logits + head.markov_head(torch.tensor(text[start + draft - 1]))
                wanted = target.logits[0, start + draft - 1]
                p, q = wanted[ids].softmax(-1), logits.softmax(-1)
                entropy = -(p * q.log()).sum()
                loss = variation * (1 - torch.minimum(p, q).sum()) + (1 - variation) * entropy
                known = int(wanted.argmax()) in ids
                # A draft outside of the vocabulary has no loss, and does not change the chance of others.
                chances.append(0.5 + 0.5 * float((-(p * (p / q).log()).sum()).exp()) if known else 1.0)
                of_block.append((loss, known))
                judged[draft - 1] += alive
                alive = alive and ids[int(logits.argmax())] == int(wanted.argmax())
                accepted[draft - 1] += alive
                alive = alive and int(wanted.argmax()) == text[start + draft]
            for draft, (loss, known) in enumerate(of_block):
                later = range(draft, len(of_block))
                pace = sum(math.prod(chances[: place + 1]) for place in later if of_block[place][1])
                if known:
                    losses[draft].append(loss * (pace if decay is None else decay**draft))
        found = module(torch.tensor([text]), mask)
    expected = torch.stack([torch.stack(of_draft).mean() for of_draft in losses if of_draft]).sum()
    torch.testing.assert_close(found["loss"], expected)
    assert found["counts"].tolist() == [[accepted, judged]]
    torch.testing.assert_close(
        module.train()(torch.tensor([text]), mask)["loss"].detach(), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["plain", "all"])
def test_the_heads_own_tensors_alone_are_trained_and_saved(name: str) -> None:
    model = learnable()
    head = DFlashHead.random(model, MASK, taps=TAPS, block_size=BLOCK, **VARIANTS[name])
    module = BlockTraining(head, Teacher(model, TAPS), blocks=3, decay=0.8, variation=0.0, seed=0)
    assert set(module.state_dict()) == {*head.own_state(), "steps"} - {"d2t"}
    text = torch.tensor([random_prompt(LENGTH, vocab=VOCAB)])
    module(text, torch.ones_like(text, dtype=torch.bool))["loss"].backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
