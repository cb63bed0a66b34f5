"""Prompts with images: every text is that of transformers' own ``generate`` with the same inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import speccompile
from speccompile import Speculator, Tree
from speccompile.errors import UnusableInputs
from speccompile.heads import Eagle3Head
from speccompile.policies import Fixed
from speccompile.runtime.request import Request
from speccompile.utils.kv_memory import KVMemory
from support.as_on_cuda import as_on_cuda
from support.errors import raises
from support.tiny import tiny_llama
from support.vision_models import END, FAMILIES, IMAGE, VIDEOS, VOCAB, VisionFamily

SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 96, "backend": "eager"}
NEW = 14
#: Rows with one image, two and none.
ROWS = (1, 2, 0)
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")


#: Plain positions; positions in parts, with DeepStack, and beside a recurrent state.
FIRST = ("Llava", "Qwen3VL", "Qwen3_5")
OTHERS = {name: family for name, family in FAMILIES.items() if name not in FIRST} | {"videos": VIDEOS}


@pytest.mark.parametrize("name", FIRST)
def test_texts_of_families(name: str) -> None:
    assert_texts(FAMILIES[name])


@pytest.mark.parametrize("name", OTHERS)
def test_texts_of_other_families(name: str) -> None:
    assert_texts(OTHERS[name])


def assert_texts(family: VisionFamily) -> None:
    model = family.model()
    batch = family.batch(model, ROWS)
    expected = own_texts(model, batch)
    without = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    assert (expected != own_texts(model, without)).any(1).tolist() == [True, True, False], "images change nothing"
    with speccompile.wrap(model, "ngram", tiers=(0, 3), **SIZES) as spec:
        for draft_len in (3, 0):
            spec.engine.policy = Fixed(draft_len)
            assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), expected)
    assert torch.equal(own_texts(model, batch), expected), "the model has changed"


def own_texts(model: PreTrainedModel, batch: dict[str, Any], new: int = NEW) -> torch.Tensor:
    texts: torch.Tensor = model.generate(**batch, max_new_tokens=new, do_sample=False)
    return texts


@pytest.fixture(scope="module", params=["Llava", "Qwen2_5_VL", "Qwen3VL"])
def family(request: pytest.FixtureRequest) -> VisionFamily:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: VisionFamily) -> PreTrainedModel:
    return family.model()


@pytest.fixture(scope="module")
def spec(model: PreTrainedModel) -> Iterator[Speculator]:
    with speccompile.wrap(model, "suffix", tiers=(0, 2, 4), **SIZES) as spec:
        yield spec


class RandomTiers:
    """A policy that chooses any of three draft lengths."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, live_rows: int) -> int:
        return self._random.choice((0, 2, 4))


@pytest.mark.parametrize("seed", range(3))
def test_random_tiers(spec: Speculator, model: PreTrainedModel, family: VisionFamily, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 3, (4,), generator=generator).tolist()
    batch = family.batch(model, rows, seed=seed + 10)
    expected = own_texts(model, batch)
    spec.engine.policy = RandomTiers(seed)
    assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), expected)


def test_a_seed_draws_one_text_at_all_tiers(spec: Speculator, model: PreTrainedModel, family: VisionFamily) -> None:
    batch = family.batch(model, ROWS, seed=3)
    texts = []
    for draft_len in (0, 2, 4):
        spec.engine.policy = Fixed(draft_len)
        texts.append(spec.generate(**batch, max_new_tokens=NEW, do_sample=True, temperature=2.0, seed=5))
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert not torch.equal(texts[0], spec.generate(**batch, max_new_tokens=NEW))


def submitted(spec: Speculator, batch: dict[str, Any], **options: Any) -> Request:
    """The request of a batch of one row."""
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
    return spec.engine.submit(batch["input_ids"], inputs=inputs, **options)


def test_requests_come_and_go(spec: Speculator, model: PreTrainedModel, family: VisionFamily) -> None:
    spec.engine.policy = Fixed(2)
    batches = [family.batch(model, [count], seed=20 + count) for count in (2, 0, 1, 1)]
    expected = [own_texts(model, batch)[0, batch["input_ids"].shape[1] :].tolist() for batch in batches]
    requests = [submitted(spec, batch, max_new_tokens=NEW) for batch in batches]
    cancelled = submitted(spec, batches[0], max_new_tokens=NEW)
    spec.engine.step()
    cancelled.cancel()
    assert [request.result().token_ids for request in requests] == expected
    assert spec.engine.idle
    assert all(request.params.features is None for request in requests), "embeddings of finished requests stay"


def test_known_prefixes_are_found_by_their_images(
    spec: Speculator, model: PreTrainedModel, family: VisionFamily
) -> None:
    batch = family.batch(model, [1], seed=30)
    other = batch | {"pixel_values": batch["pixel_values"] + 1.0}
    first = batch["input_ids"][0].tolist().index(IMAGE)
    texts, reused = [], []
    for each in (batch, batch, other, batch):
        request = submitted(spec, each, max_new_tokens=NEW)
        texts.append(request.result().token_ids)
        reused.append(request.stats.reused_tokens)
        assert texts[-1] == own_texts(model, each)[0, each["input_ids"].shape[1] :].tolist()
    assert texts[0] == texts[1] == texts[3] != texts[2]
    everything = batch["input_ids"].shape[1] - 1
    assert reused[1] == reused[3] == everything and reused[2] == first


def test_a_next_turn_reuses_the_images_before_it(
    spec: Speculator, model: PreTrainedModel, family: VisionFamily
) -> None:
    """It also has another offset of rotary positions at its end."""
    whole = family.batch(model, [2], seed=40)
    end = whole["input_ids"][0].tolist().index(END) + 2
    first = {name: value[:, :end] if name in PER_TOKEN else value[:1] for name, value in whole.items()}
    if (grid := whole.get("image_grid_thw")) is not None:
        first["pixel_values"] = whole["pixel_values"][: int(grid[0].prod())]
    for batch in (first, whole):
        request = submitted(spec, batch, max_new_tokens=NEW)
        assert request.result().token_ids == own_texts(model, batch)[0, batch["input_ids"].shape[1] :].tolist()
    assert request.stats.reused_tokens >= end - 1


def test_a_recurrent_state_is_known_after_an_image() -> None:
    family = FAMILIES["Qwen3_5"]
    model = family.model()
    batch = family.batch(model, [2], seed=41)
    expected = own_texts(model, batch)[0, batch["input_ids"].shape[1] :].tolist()
    with speccompile.wrap(model, "ngram", tiers=(0, 3), **SIZES, state_checkpoints=8) as spec:
        for reused in (0, 8):
            request = submitted(spec, batch, max_new_tokens=NEW)
            assert request.result().token_ids == expected
            assert request.stats.reused_tokens >= reused


def test_the_last_token_may_be_of_an_image(spec: Speculator, model: PreTrainedModel, family: VisionFamily) -> None:
    whole = family.batch(model, [1], seed=31)
    end = len(whole["input_ids"][0]) - whole["input_ids"][0].tolist()[::-1].index(IMAGE)
    batch = {name: value[:, :end] if name in PER_TOKEN else value for name, value in whole.items()}
    expected = texts_without_cache(model, batch)
    for _ in range(2):
        assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), expected)


def texts_without_cache(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    """The text of one row by the model's forward. After a prompt that ends in an image, transformers' ``generate``
    gives new tokens of Qwen's models the type of the image, and other positions than their forward does."""
    batch = dict(batch)
    with torch.no_grad():
        for _ in range(NEW):
            newest = model(**batch, use_cache=False).logits[:, -1:].argmax(-1)
            new = {"input_ids": newest, "attention_mask": newest * 0 + 1, "mm_token_type_ids": (newest * 0).int()}
            batch |= {name: torch.cat([batch[name], new[name]], dim=1) for name in new.keys() & batch.keys()}
    ids: torch.Tensor = batch["input_ids"]
    return ids


def test_copies_of_a_prompt_share_its_images(spec: Speculator, model: PreTrainedModel, family: VisionFamily) -> None:
    batch = family.batch(model, [1, 0], seed=32)
    expected = own_texts(model, batch).repeat_interleave(2, dim=0)
    assert torch.equal(spec.generate(**batch, num_return_sequences=2, max_new_tokens=NEW), expected)


def test_several_requests_may_share_what_was_embedded(
    spec: Speculator, model: PreTrainedModel, family: VisionFamily
) -> None:
    batch = family.batch(model, [1], seed=34)
    ids = batch["input_ids"]
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
    embedded = spec.engine.embed(ids, inputs)
    requests = [spec.engine.submit(ids, inputs=embedded, max_new_tokens=NEW) for _ in range(2)]
    expected = own_texts(model, batch)[0, ids.shape[1] :].tolist()
    assert [request.result().token_ids for request in requests] == [expected] * 2
    with raises(UnusableInputs, reason="they were embedded for a prompt with other placeholder tokens"):
        spec.engine.submit([5, *ids[0].tolist()], inputs=embedded)


def test_prompts_are_scored_with_their_images(spec: Speculator, model: PreTrainedModel, family: VisionFamily) -> None:
    batch = family.batch(model, [1], seed=33)
    with torch.no_grad():
        logits = model(**batch).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, batch["input_ids"][0, 1:, None])[:, 0]
    found = submitted(spec, batch, max_new_tokens=1, prompt_logprobs=True).result().prompt_logprobs
    torch.testing.assert_close(torch.tensor(found[1:]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("ngram", {"tiers": (0, Tree.dynamic(5, 3, 2))}), ("early_exit", {"tiers": (0, 2), "exit_layer": 1})],
    ids=["trees", "early_exit"],
)
def test_other_steps(model: PreTrainedModel, family: VisionFamily, mode: str, options: dict[str, Any]) -> None:
    batch = family.batch(model, ROWS)
    with speccompile.wrap(model, mode, **SIZES | options) as spec:
        assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), own_texts(model, batch))


def test_images_are_read_again_after_a_row_gave_up_its_pages(model: PreTrainedModel, family: VisionFamily) -> None:
    batch = family.batch(model, (2, 2))
    options: dict[str, Any] = SIZES | {
        "max_len": 80,
        "kv_memory": KVMemory(96, tokens=96, page=16),
        "prefix_reuse": False,
    }
    with speccompile.wrap(model, "ngram", tiers=(0, 3), **options) as spec:
        assert torch.equal(spec.generate(**batch, max_new_tokens=40), own_texts(model, batch, new=40))
        assert spec.engine.stats.reread_tokens > batch["input_ids"].shape[1], "no row gave up its pages"


def test_a_head_reads_hidden_states_of_images(model: PreTrainedModel, family: VisionFamily) -> None:
    head = Eagle3Head.random(model, taps=(0, 1))
    batch = family.batch(model, ROWS)
    with speccompile.wrap(model, "eagle3", draft=head, tiers=(0, 2), **SIZES) as spec:
        assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), own_texts(model, batch))


def test_only_chunks_of_prompts_read_embeddings(spec: Speculator) -> None:
    read = {name for name in spec.arena if name.startswith("prompt_") and name != "prompt_length"}
    assert read
    for tier in spec.engine.table.tiers.values():
        assert not read & set(tier.argument_names)
    for (_, kind), chunk in spec.engine.table.prefill.items():
        assert read <= set(chunk.argument_names), kind


def test_steps_with_joined_ops_read_images_too(model: PreTrainedModel, family: VisionFamily) -> None:
    """As on CUDA, where ops before the first layer and norms at its start are moved into bodies."""
    batch = family.batch(model, ROWS)
    with (
        as_on_cuda() as backend,
        speccompile.wrap(model, "ngram", **SIZES | {"tiers": (0, 3), "backend": backend}) as spec,
    ):
        assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), own_texts(model, batch))


def test_a_draft_model_reads_placeholders_as_text(model: PreTrainedModel, family: VisionFamily) -> None:
    draft = tiny_llama(vocab=VOCAB)
    batch = family.batch(model, ROWS)
    with speccompile.wrap(model, "draft_target", draft=draft, **SIZES | {"tiers": (0, 2)}) as spec:
        assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), own_texts(model, batch))
    with speccompile.wrap(model, "draft_target", draft=family.model(seed=1), **SIZES | {"tiers": (0, 2)}) as spec:
        assert torch.equal(spec.generate(**batch, max_new_tokens=NEW), own_texts(model, batch))
