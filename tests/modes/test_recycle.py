"""Token Recycling: its tables against the model's own logits, texts, trees, given texts, and its memory in a file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator, Tree
from speccompile.errors import CorruptMemory, ForeignMemory, InvalidOption, NoMemory
from speccompile.heads import Eagle3Head
from speccompile.ops.successors import place_of
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

PROMPT = random_prompt(9)
#: Tokens of a random model are all unlikely.
OPTIONS: dict[str, Any] = {
    "max_batch": 2,
    "max_len": 96,
    "backend": "eager",
    "policy": "fixed:3",
    "tiers": (0, 3),
    "min_probability": 0.0,
}
#: Of mode ``suffix``.
SUFFIX = {name: value for name, value in OPTIONS.items() if name != "min_probability"} | {"min_probability": 0.1}
VOCAB, PAIRS = 128, 16384


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    with speccompile.wrap(model, "recycle", pairs=PAIRS, **OPTIONS) as spec:
        yield spec


def stored(spec: Speculator, row: int) -> tuple[list[int], list[float]]:
    tokens = (spec.arena["recycle_successors"][row] - 1).tolist()
    return tokens, spec.arena["recycle_logprobs"][row].tolist()


def test_the_tables_hold_the_models_likeliest_tokens(spec: Speculator, model: LlamaForCausalLM) -> None:
    prompt = random_prompt(7, 3)
    text = [*prompt, *spec.engine.submit(prompt, max_new_tokens=30).result().token_ids]
    with torch.no_grad():
        logprobs, best = model(torch.tensor([text])).logits[0].log_softmax(-1).topk(8)
    first_read = len(prompt) - 1
    # The last token is not read; of a token that occurs twice, only the last occurrence and the pairs stay.
    last = {token: place for place, token in enumerate(text[:-1]) if place >= first_read}
    checked = 0
    for token, place in last.items():
        pair = int(place_of(torch.tensor(text[place - 1]), torch.tensor(token), PAIRS))
        if spec.arena["recycle_keys"][pair] == text[place - 1] * VOCAB + token + 1:
            tokens, logs = stored(spec, VOCAB + pair)
            # A rejected draft after the pair may have been read later: then another place has the same values.
            if tokens == best[place].tolist():
                assert logs == pytest.approx(logprobs[place].tolist(), abs=1e-4)
                checked += 1
    assert checked > len(last) // 2


def test_a_text_that_comes_again_is_drafted(spec: Speculator, model: LlamaForCausalLM) -> None:
    expected = greedy(model, PROMPT, 40)
    first, again = (spec.engine.submit(PROMPT, max_new_tokens=40).result() for _ in range(2))
    assert first.token_ids == again.token_ids == expected
    assert again.stats.acceptance_length > 3 > first.stats.acceptance_length


def test_rows_beside_each_other_and_drawn_texts_are_those_without_drafts(spec: Speculator) -> None:
    prompts = [random_prompt(length, length) for length in (5, 9, 14)]
    options = {"max_new_tokens": 25, "do_sample": True, "temperature": 0.9, "top_k": 40}
    texts = []
    for tier in (0, 3):
        spec.set_tier(tier)
        requests = [spec.engine.submit(prompt, seed=seed, **options) for seed, prompt in enumerate(prompts)]
        texts.append([request.result().token_ids for request in requests])
    assert texts[0] == texts[1]
    assert spec.check(prompts, max_new_tokens=25)


def test_steps_without_drafts_fill_the_tables(model: LlamaForCausalLM) -> None:
    with speccompile.wrap(model, "recycle", **(OPTIONS | {"max_batch": 1})) as spec:
        spec.set_tier(0)
        assert not spec.arena["recycle_successors"].any()
        spec.engine.submit(PROMPT, max_new_tokens=30).result()
        assert spec.arena["recycle_keys"][:-1].count_nonzero() > 20
        spec.set_tier(3)
        assert spec.engine.submit(PROMPT, max_new_tokens=30).result().stats.acceptance_length > 3


def test_the_dummy_slot_writes_nothing(model: LlamaForCausalLM) -> None:
    with speccompile.wrap(model, "recycle", **OPTIONS) as spec, spec.arena.parked():
        for tier in spec.engine.tiers.values():
            tier.run()
        assert not spec.arena["recycle_successors"][: VOCAB + 65536].any()


@pytest.mark.parametrize(
    "tree", [Tree.dynamic(nodes=7, depth=4, branches=3), Tree.static([(0,), (1,), (0, 0), (0, 1)])]
)
def test_trees(model: LlamaForCausalLM, tree: Tree) -> None:
    options = OPTIONS | {"tiers": (0, tree), "policy": "fixed:0"}
    prompts = [PROMPT, random_prompt(5, 2)]
    with speccompile.wrap(model, "recycle", **options) as spec:
        spec.set_tier(tree)
        for _ in range(2):
            requests = [spec.engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
            results = [request.result() for request in requests]
            assert [result.token_ids for result in results] == [greedy(model, prompt, 30) for prompt in prompts]
        # A random model's second token is likelier than what follows its first one, so trees are flat.
        assert min(result.stats.acceptance_length for result in results) > 1.7
        assert spec.check(prompts, max_new_tokens=20)
        drawn = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.2, "seed": 4}
        text = spec.engine.submit(PROMPT, **drawn).result().token_ids
        spec.set_tier(0)
        assert spec.engine.submit(PROMPT, **drawn).result().token_ids == text


def test_composed_with_lookups_and_a_network(model: LlamaForCausalLM) -> None:
    expected = greedy(model, PROMPT, 40)
    with speccompile.wrap(model, ["prediction", "recycle", "suffix"], min_score=0.0, **OPTIONS) as spec:
        results = [spec.engine.submit(PROMPT, max_new_tokens=40).result() for _ in range(2)]
        assert [result.token_ids for result in results] == [expected] * 2
        assert results[1].stats.drafts_by[1][1] > 10
        assert spec.explain().count("found likeliest when it last read")
    options = OPTIONS | {"draft": Eagle3Head.random(model, taps=(0, 0, 1)), "min_score": 0.0}
    with speccompile.wrap(model, ["recycle", "eagle3_one_model"], **options) as spec:
        results = [spec.engine.submit(PROMPT, max_new_tokens=40).result() for _ in range(2)]
        assert [result.token_ids for result in results] == [expected] * 2
        assert results[1].stats.drafts_by[0][1] > 15


def test_given_texts(model: LlamaForCausalLM) -> None:
    """They are drafted from the first step on; of the successors of a pair the most frequent is the first."""
    said = greedy(model, PROMPT, 40)
    unknown = next(token for token in range(5, VOCAB) if token not in PROMPT + said)
    corpus = [PROMPT + said, [1, 2, 3], [1, 2, 4], [1, 2, 4], [unknown]]
    with speccompile.wrap(model, "recycle", pairs=PAIRS, corpus=corpus, **OPTIONS) as spec:
        place = VOCAB + int(place_of(torch.tensor(1), torch.tensor(2), PAIRS))
        tokens, logs = stored(spec, place)
        assert tokens[:3] == [4, 3, -1] and logs[:2] == pytest.approx([math.log(2 / 4), math.log(1 / 4)])
        assert stored(spec, unknown)[0] == [-1] * 8
        result = spec.engine.submit(PROMPT, max_new_tokens=40).result()
        assert result.token_ids == said and result.stats.acceptance_length > 2


@pytest.mark.parametrize(
    ("mode", "options"),
    [("recycle", {"pairs": PAIRS}), ("suffix", {"remember": 400}), (["recycle", "suffix"], {"min_score": 0.0})],
)
def test_a_memory_survives_a_restart(model: LlamaForCausalLM, tmp_path: Path, mode: Any, options: Any) -> None:
    path = tmp_path / "memory"
    with speccompile.wrap(model, mode, **OPTIONS, **options) as spec:
        cold = spec.engine.submit(PROMPT, max_new_tokens=40).result()
        spec.save_memory(path)
        warm = spec.engine.submit(PROMPT, max_new_tokens=40).result()
    assert list(tmp_path.iterdir()) == [path]
    with speccompile.wrap(model, mode, **OPTIONS, **options) as spec:
        spec.load_memory(path)
        again = spec.engine.submit(PROMPT, max_new_tokens=40).result()
        assert again.token_ids == warm.token_ids == cold.token_ids
        assert warm.stats.acceptance_length > 1.5 * cold.stats.acceptance_length
        assert again.stats.acceptance_length > 0.9 * warm.stats.acceptance_length
        # While a request runs, too.
        running = spec.engine.submit(random_prompt(6, 8), max_new_tokens=40)
        for _ in range(3):
            spec.engine.step()
        spec.load_memory(path)
        assert running.result().token_ids == greedy(model, random_prompt(6, 8), 40)


def test_a_memory_of_others_is_refused(spec: Speculator, model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    spec.save_memory(path)
    whole = path.read_bytes()
    with speccompile.wrap(model, "recycle", pairs=PAIRS + 1, **OPTIONS) as other:
        with raises(ForeignMemory, what=re.compile("the shape of recycle_")):
            other.load_memory(path)
        path.write_bytes(whole[:-4] + b"\x01\x02\x03\x04")
        with raises(CorruptMemory, reason="its contents have changed"):
            other.load_memory(path)
        path.write_bytes(whole[:100])
        with raises(CorruptMemory):
            other.load_memory(path)
        save_file({"weight": torch.zeros(2)}, path)
        with raises(CorruptMemory, reason="it has no mark of this format"):
            other.load_memory(path)
    path.write_bytes(whole)
    with speccompile.wrap(model, "suffix", remember=400, **OPTIONS) as other, raises(ForeignMemory):
        other.load_memory(path)
    assert set(load_file(path)) == {"recycle_keys", "recycle_logprobs", "recycle_successors"}


def test_a_memory_of_another_depth_with_tables_of_equal_shapes_is_refused(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    path = tmp_path / "memory"
    with speccompile.wrap(model, "suffix", remember=400, max_depth=24, **SUFFIX) as spec:
        spec.save_memory(path)
    refused = raises(ForeignMemory, what="the size of a row's cursors")
    with speccompile.wrap(model, "suffix", remember=800, max_depth=12, **SUFFIX) as other, refused:
        other.load_memory(path)


@pytest.mark.parametrize("pairs", [0, PAIRS])
def test_outputs_of_the_lm_head_after_the_vocabulary_are_no_successors(pairs: int) -> None:
    wide = tiny_llama()
    wide.lm_head = torch.nn.Linear(64, 2 * VOCAB, bias=False)
    with torch.no_grad():
        wide.lm_head.weight.copy_(tiny_llama(vocab=2 * VOCAB).lm_head.weight)
    with speccompile.wrap(wide, "recycle", pairs=pairs, **OPTIONS) as spec:
        request = spec.engine.submit(PROMPT, max_new_tokens=12)
        for _ in range(8):
            spec.engine.step()
        request.cancel()
        assert spec.arena["recycle_successors"].any()
        assert spec.arena["recycle_successors"].max() <= VOCAB


@pytest.mark.parametrize("mode", ["ngram", "none", "suffix"])
def test_modes_without_a_memory(model: LlamaForCausalLM, tmp_path: Path, mode: str) -> None:
    with speccompile.wrap(model, mode, max_len=64, backend="eager") as spec:
        with raises(NoMemory, mode=mode, verb="save"):
            spec.save_memory(tmp_path / "memory")
        with raises(NoMemory, verb="load"):
            spec.load_memory(tmp_path / "memory")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"successors": 0}, "successors"),
        ({"successors": 65}, "successors"),
        ({"successors": True}, "successors"),
        ({"pairs": -1}, "pairs"),
        ({"pairs": 1.5}, "pairs"),
        ({"min_probability": 1.1}, "min_probability"),
        ({"min_probability": "0"}, "min_probability"),
        ({"corpus": [[5, 200]]}, "corpus"),
        ({"corpus": ["text"]}, "corpus"),
    ],
)
def test_options_that_are_refused(model: LlamaForCausalLM, options: dict[str, Any], name: str) -> None:
    with raises(InvalidOption, where="mode 'recycle'", name=name):
        speccompile.wrap(model, "recycle", max_len=64, backend="eager", **options)
