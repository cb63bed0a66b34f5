"""Unrolled training steps compute what a decoding head computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speccompile.heads import Eagle3Head
from speccompile.modes.network.draft_head import HeadCache
from speccompile.training.teacher import Teacher
from speccompile.training.unrolled import UnrolledTraining, later, unrolled
from support.eagle3_specs import plain_of, states_of
from support.tiny import random_prompt, tiny_llama
from support.training_data import TAPS, VOCAB, learnable

LENGTH, STEPS = 12, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "two layers": {"num_hidden_layers": 2, "norm_before_fc": True},
}


def small_head(**fields: Any) -> Eagle3Head:
    taps = {"taps": TAPS} | fields
    return Eagle3Head.random(learnable(), seed=1, draft_vocab_size=20, **taps).double()


def decoded(head: Eagle3Head, text: list[int], hidden: torch.Tensor, row: int) -> torch.Tensor:
    """Logits ``[STEPS, Vd]`` of a chain that starts at ``row`` and reads ``text``, by the cache that decoding has."""
    config = head.config
    shape = (1, LENGTH + STEPS, config.num_key_value_heads, config.head_dim)
    keys, values = ({layer: torch.zeros(shape, dtype=torch.float64) for layer in head.kv} for _ in range(2))

    def cache(positions: torch.Tensor) -> HeadCache:
        return HeadCache(keys, values, torch.tensor([0]), positions)

    positions = torch.arange(row + 1)[None]
    first = head(torch.tensor([text[1 : row + 2]]), positions, hidden[None, : row + 1], cache(positions))
    logits, left = [first["logits"][0, -1]], first["hidden"][:, -1:]
    for step in range(1, STEPS):
        positions = torch.tensor([[row + step]])
        token = torch.tensor([[text[row + 1 + step]]])
        left = head.read(token, positions, head.carry(left), cache(positions))
        logits.append(head.logits(left)[0, 0])
    return torch.stack(logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_unrolled_step_is_that_of_the_decoding_head(name: str) -> None:
    head = small_head(**VARIANTS[name])
    text = random_prompt(LENGTH, vocab=VOCAB)
    hidden = torch.randn(LENGTH, head.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        steps = [head.logits(left)[0] for left in unrolled(head, torch.tensor([text]), hidden[None], STEPS)]
        for row in range(LENGTH - STEPS):
            expected = decoded(head, text, hidden, row)
            # Norms are computed in float32.
            torch.testing.assert_close(torch.stack([step[row] for step in steps]), expected, rtol=1e-4, atol=1e-5)


def test_unrolled_steps_draft_the_chain_of_the_head_written_down_once_more() -> None:
    model = tiny_llama(layers=6)
    head = Eagle3Head.random(model, seed=2, taps=(1, 2, 4), draft_vocab_size=40).double()
    plain = plain_of(head)
    text = random_prompt(9)
    hidden = torch.stack(states_of(model, text)).double()
    drafts, expected = plain.draft(text, list(hidden), STEPS)
    whole = torch.tensor([[*text, *drafts]])
    rows = torch.cat([*hidden], dim=-1)
    rows = torch.cat([rows, torch.randn(1 + STEPS, rows.shape[1])])[None]
    with torch.no_grad():
        found = [head.logits(left)[0, len(text) - 2] for left in unrolled(head, whole, rows, STEPS)]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_that_of_its_definition() -> None:
    """One text after another, with the target's whole forward, and no masks."""
    model = learnable()
    head = small_head().float()
    teacher, decay = Teacher(model, TAPS), 0.7
    ids = torch.arange(20) + head.d2t
    module = UnrolledTraining(head, teacher, ids, unroll=3, decay=decay).eval()
    lengths, starts = (11, 7), (3, 2)
    texts = [random_prompt(length, seed=length, vocab=VOCAB) for length in lengths]
    input_ids, mask = torch.zeros(2, 11, dtype=torch.int64), torch.zeros(2, 11, dtype=torch.bool)
    losses: list[list[torch.Tensor]] = [[], [], []]
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        input_ids[row, : len(text)] = torch.tensor(text)
        mask[row, start : len(text)] = True
        with torch.no_grad():
            target = model(torch.tensor([text]), output_hidden_states=True)
            hidden = torch.cat([target.hidden_states[tap + 1] for tap in TAPS], dim=-1)
            lefts = list(unrolled(head, torch.tensor([text]), hidden, 3))
        for step, left in enumerate(lefts):
            for at in range(start - 1, len(text) - 2 - step):
                wanted = target.logits[0, at + 1 + step]
                if int(wanted.argmax()) in ids:
                    probs = wanted[ids].softmax(-1)
                    losses[step].append(-(probs * head.logits(left[0, at]).log_softmax(-1)).sum())
    expected = sum(decay**step * torch.stack(found).mean() for step, found in enumerate(losses))
    with torch.no_grad():
        found = module(input_ids, mask)
    torch.testing.assert_close(found["loss"], expected)


def test_the_embedding_that_the_target_lends_is_not_in_checkpoints() -> None:
    head = small_head().float()
    module = UnrolledTraining(head, Teacher(learnable(), TAPS), torch.arange(20) + head.d2t, unroll=1, decay=1.0)
    names = set(module.state_dict())
    assert "head.fc.weight" in names and "head.embed_tokens.weight" not in names and "weight" not in names


def test_later_shifts_and_fills_with_zeros() -> None:
    x = torch.tensor([[1, 2, 3]])
    assert [later(x, places).tolist() for places in (0, 1, 3, 5)] == [[[1, 2, 3]], [[2, 3, 0]], [[0] * 3], [[0] * 3]]
