"""EAGLE-3 over a target with recurrent layers, whose hidden states are saved, with guides and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from speccompile import Speculator
from speccompile.guides import regex_guide
from speccompile.heads import Eagle3Head
from speccompile.hidden_states import SavedHiddenStates, SaveHiddenStates
from support.dice import Dice
from support.eagle3_specs import TAPS, drafted, eagle3, plain_of, states_of
from support.families import model_of
from support.guide_tokenizers import EOS, byte_level
from support.tiny import admitted, greedy

TIERS, INTERVAL, NEW = (0, 3), 8, 12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return model_of("qwen3_next", num_layers=4, vocab_size=300)


@pytest.fixture(scope="module")
def head(model: PreTrainedModel) -> Eagle3Head:
    return Eagle3Head.random(model, taps=TAPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def spec(model: PreTrainedModel, head: Eagle3Head, folder: Path) -> Iterator[Speculator]:
    saves = SaveHiddenStates(folder, write_interval=1, eagle3_layers_to_capture=(0,))
    options = {"max_batch": 2, "max_len": 63, "state_checkpoints": INTERVAL, "save_hidden_states": saves}
    with eagle3(model, head, tiers=TIERS, **options) as spec:
        yield spec


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 100), k=length)


def assert_drafts_are_the_papers(spec: Speculator, model: PreTrainedModel, head: Eagle3Head, text: list[int]) -> None:
    """After ``text``, whose prefix is known where the test says so."""
    request = admitted(spec.engine, text, max_new_tokens=9)
    text = request.prompt + request.new_tokens
    tokens, logits = drafted(spec, request.slot, 3)
    wanted, wanted_logits = plain_of(head).draft(text, states_of(model, text), 3)
    assert tokens == wanted
    torch.testing.assert_close(logits.double(), wanted_logits, rtol=1e-3, atol=1e-3)
    request.cancel()


def test_drafts_are_the_papers_whatever_was_known_of_the_prompt(
    spec: Speculator, model: PreTrainedModel, head: Eagle3Head
) -> None:
    spec.set_tier(0)
    request = spec.engine.submit(prompt_of(29, seed=1), max_new_tokens=NEW)
    text = request.prompt + request.result().token_ids
    assert request.new_tokens == greedy(model, request.prompt, NEW)
    # From the end of the text, from a checkpoint in the middle of it, and from nothing. What the head keeps of a token
    # depends on the next one.
    for known, more in ((len(text) - 2, [6, 7]), (2 * INTERVAL, [8, 9]), (0, [5])):
        before = spec.stats.reused_tokens
        kept = text if known > 2 * INTERVAL else text[: known + 3]
        assert_drafts_are_the_papers(spec, model, head, [*kept, *more] if known else prompt_of(11, seed=2))
        assert spec.stats.reused_tokens - before == known


def test_texts_and_saved_states_do_not_depend_on_tiers_guides_and_prefixes(
    spec: Speculator, model: PreTrainedModel, folder: Path
) -> None:
    """Guided and sampled requests beside greedy ones; many go on from a known text, or leave one."""
    engine, choose = spec.engine, random.Random(3)
    guide = regex_guide("(ab|ba|b)+", byte_level())
    base = prompt_of(20, seed=4)
    base += greedy(model, base, NEW)
    prompts = [[*base[: choose.randint(9, len(base))], *prompt_of(choose.randint(1, 3), seed)] for seed in range(8)]
    asked = [
        {"ids": prompt, "max_new_tokens": NEW}
        | ({"do_sample": True, "seed": index} if index % 3 == 1 else {})
        | ({"guide": guide, "eos_token_id": [EOS]} if index % 3 == 2 else {})
        for index, prompt in enumerate(prompts)
    ]
    # It ends where the slot does, so that the last steps are narrower than their tiers.
    asked.append({"ids": prompt_of(55, seed=9), "max_new_tokens": 30})
    spec.set_tier(0)
    # Nothing is known, and no request has a neighbour.
    reuse, engine.slots._reuse = engine.slots._reuse, False
    expected = [engine.submit(**request).result().token_ids for request in asked]
    for index in (0, 3, 6, 8):
        assert expected[index] == greedy(model, asked[index]["ids"], len(expected[index]))
    assert len(expected[8]) == 8
    engine.slots._reuse, engine.policy = reuse, Dice(TIERS, seed=5)
    before = spec.stats.reused_tokens, spec.stats.reread_tokens, spec.stats.draft_tokens
    requests = [engine.submit(**request, record=str(index)) for index, request in enumerate(asked)]
    leaving = [engine.submit([*prompt, 7], max_new_tokens=NEW) for prompt in prompts[:3]]
    while not engine.idle:
        engine.step()
        if leaving and choose.random() < 0.2:
            leaving.pop().cancel()
    assert [request.new_tokens for request in requests] == expected
    after = spec.stats.reused_tokens, spec.stats.reread_tokens, spec.stats.draft_tokens
    assert all(new > old for new, old in zip(after, before, strict=True))
    spec.hidden_states.flush()
    for index, request in enumerate(requests):
        record, text = SavedHiddenStates(folder)[str(index)], request.prompt + request.new_tokens
        assert record.input_ids.tolist() == text[:-1]
        with torch.no_grad():
            states = model(record.input_ids[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(record.hidden_state, states[-1][0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(record.aux_hidden_state, states[1][0], rtol=1e-3, atol=1e-4)
