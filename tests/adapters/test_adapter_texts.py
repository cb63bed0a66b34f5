"""Texts with adapters are those of transformers with that adapter alone, among requests with others."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel

from speccompile import Adapters, Speculator, Tree, wrap
from speccompile.errors import AdaptersFull
from support.lora import ATTENTION, MLP, lora_config, own_text, saved, with_adapters
from support.our_kernels import our_kernels
from support.tiny import tiny_llama

NEW = 10
COUNT = 16
TARGETS = (ATTENTION, MLP, ("q_proj", "v_proj"), (*ATTENTION, *MLP))
#: What each of them adapts, and its rank.
CONFIGS = {
    f"adapter-{i}": lora_config(
        rank=(1, 4, 8, 16)[i % 4],
        targets=TARGETS[i // 4],
        use_rslora=i % 5 == 0,
        rank_pattern={f"layers.0.*{TARGETS[i // 4][0]}": 3} if i % 7 == 0 else {},
        alpha_pattern={TARGETS[i // 4][1]: 5} if i % 3 == 0 else {},
        layers_to_transform=[1] if i % 8 == 5 else None,
    )
    for i in range(COUNT)
}
SHAPES: tuple[int, ...] = (0, 1, 3, Tree.dynamic(nodes=5, depth=5, branches=3))


class AnyTier:
    """A policy that chooses at random."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def choose(self, live_rows: int) -> int:
        return self._rng.choice(SHAPES)


@pytest.fixture(scope="module")
def adapted() -> PeftModel:
    return with_adapters(CONFIGS)


@pytest.fixture(scope="module")
def folders(adapted: PeftModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved(adapted, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def backend() -> Iterator[str]:
    with our_kernels() as name:
        yield name


@pytest.fixture(scope="module")
def spec(backend: str) -> Iterator[Speculator]:
    options: dict[str, Any] = {"tiers": SHAPES, "max_batch": 8, "max_len": 96, "backend": backend}
    with wrap(tiny_llama(), "suffix", adapters=Adapters(count=8), **options) as spec:
        yield spec


def test_sixteen_adapters_in_eight_places_that_come_and_go(
    spec: Speculator, adapted: PeftModel, folders: dict[str, Path]
) -> None:
    """Requests arrive at random, with prompts that begin alike, while adapters are exchanged and tiers change."""
    rng = random.Random(0)
    spec.prepare(mixed=True)
    before = spec.arena.fingerprint()
    spec.engine.policy = AnyTier()
    beginnings = [[rng.randrange(128) for _ in range(length)] for length in (9, 21)]
    waiting, running, ended, loaded, refused = list(folders), [], [], [], 0
    rng.shuffle(waiting)
    while len(ended) < 30 or len({name for name, *_ in ended}) <= COUNT:
        assert len(ended) < 1000
        if waiting and rng.random() < 0.3:
            name = waiting[0]
            try:
                spec.add_adapter(name, folders[name])
                loaded.append(waiting.pop(0))
            except AdaptersFull:
                refused += 1
                if loaded:
                    waiting.append(loaded.pop(0))
                    spec.remove_adapter(waiting[-1])
        for _ in range(rng.choice((0, 0, 1, 3))):
            prompt = rng.choice(beginnings) + [rng.randrange(128) for _ in range(rng.choice((1, 2, 6)))]
            name = rng.choice([None, *loaded])
            running.append((name, prompt, spec.engine.submit(prompt, max_new_tokens=NEW, adapter=name)))
        spec.engine.step()
        ended += [item for item in running if item[2].finished]
        running = [item for item in running if not item[2].finished]
    spec.engine.run()
    ended += running
    for name, prompt, request in ended:
        assert request.result().token_ids == own_text(adapted, name, prompt, NEW), name
    assert len({name for name, _, _ in ended}) == COUNT + 1 and refused
    assert spec.stats.reused_tokens > 100 and spec.stats.accepted_tokens > 0
    assert spec.arena.fingerprint() == before
    for name in spec.adapters:
        spec.remove_adapter(name)


def test_every_adapter_changes_the_text(adapted: PeftModel) -> None:
    prompt = list(range(7, 19))
    texts = {tuple(own_text(adapted, name, prompt, NEW)) for name in (None, *CONFIGS)}
    assert len(texts) == COUNT + 1


def test_generate_has_an_adapter_for_each_prompt(
    spec: Speculator, adapted: PeftModel, folders: dict[str, Path]
) -> None:
    names = ["adapter-3", None, "adapter-12"]
    for name in ("adapter-3", "adapter-12"):
        spec.add_adapter(name, folders[name])
    ids = torch.randint(0, 128, (3, 8), generator=torch.Generator().manual_seed(1))
    got = spec.generate(ids, max_new_tokens=NEW, adapter=names, num_return_sequences=2)
    for row, tokens in enumerate(got.tolist()):
        prompt = ids[row // 2].tolist()
        assert tokens == prompt + own_text(adapted, names[row // 2], prompt, NEW)
    alone = spec.generate(ids[:1], max_new_tokens=NEW, adapter="adapter-12", do_sample=True, seed=3)
    among = spec.generate(ids, max_new_tokens=NEW, adapter="adapter-12", do_sample=True, seed=3)
    assert torch.equal(alone[0], among[0])
    assert spec.check(ids, max_new_tokens=NEW, adapter="adapter-3")
    assert spec.check(ids, max_new_tokens=NEW, adapter="adapter-3", reference="plain")
    for name in spec.adapters:
        spec.remove_adapter(name)


def test_without_an_adapter_the_bits_are_those_of_a_wrap_without_any(backend: str, folders: dict[str, Path]) -> None:
    """Beside requests that have some."""
    prompt = list(range(30, 41))
    options: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 96, "backend": backend, "scores": True}
    with (
        wrap(tiny_llama(), "suffix", **options) as plain,
        wrap(tiny_llama(), "suffix", adapters=Adapters(1), **options) as other,
    ):
        other.add_adapter("other", folders["adapter-15"])
        wanted = plain.engine.submit(prompt, max_new_tokens=NEW, output_logits=True).result()
        beside = other.engine.submit(prompt, max_new_tokens=NEW, adapter="other")
        got = other.engine.submit(prompt, max_new_tokens=NEW, output_logits=True).result()
        assert beside.result().token_ids != wanted.token_ids
        assert got.logits is not None and wanted.logits is not None
        assert all(torch.equal(one, two) for one, two in zip(got.logits, wanted.logits, strict=True))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("early_exit", {"exit_layer": 1}),
        ("draft_target", {"draft": tiny_llama(seed=5, layers=1)}),
        ("draft_target", {"draft": tiny_llama(seed=5, layers=1), "fused": False}),
        (["ngram", "suffix"], {}),
    ],
    ids=["early_exit", "fused", "split", "composed"],
)
def test_every_kind_of_drafter_drafts_for_all(
    mode: Any, options: dict[str, Any], backend: str, adapted: PeftModel, folders: dict[str, Path]
) -> None:
    sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 3, "max_len": 64, "backend": backend}
    with wrap(tiny_llama(), mode, adapters=Adapters(2), **sizes, **options) as spec:
        spec.set_tier(3)
        for name in ("adapter-13", "adapter-6"):
            spec.add_adapter(name, folders[name])
        prompts = [[5, 6, 7, 5, 6], [9] * 12, [1, 2, 3]]
        names = ["adapter-13", "adapter-6", None]
        requests = [
            spec.engine.submit(prompt, max_new_tokens=NEW, adapter=name)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        for prompt, name, request in zip(prompts, names, requests, strict=True):
            assert request.result().token_ids == own_text(adapted, name, prompt, NEW)


@pytest.mark.parametrize("options", [{"weights": "int8"}, {"free_originals": True}], ids=["int8", "free_originals"])
def test_the_weights_of_the_base_may_have_another_form(
    options: dict[str, Any], backend: str, folders: dict[str, Path]
) -> None:
    sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 64, "backend": backend}
    with wrap(tiny_llama(), "ngram", adapters=Adapters(1), **sizes, **options) as spec:
        spec.add_adapter("one", folders["adapter-14"])
        report = spec.check([[3, 1, 4, 1, 5], list(range(20))], max_new_tokens=NEW, adapter="one")
        assert report or report.largest_logit_change <= max(d.rounding for d in report.differences)
        assert spec.check([[3, 1, 4, 1, 5]], max_new_tokens=NEW, adapter="one", reference="plain")


@pytest.mark.parametrize("native", [True, False], ids=["ours", "stock"])
def test_linears_of_gpt2_are_adapted(native: bool, backend: str) -> None:
    """They hold their weights transposed, and queries, keys and values are one of them."""
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 96}
    config = GPT2Config(**sizes, initializer_range=0.15, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = GPT2LMHeadModel(config).eval()
    configs = {"one": lora_config(targets=("c_attn", "c_fc", "c_proj"), fan_in_fan_out=True)}
    adapted, prompt = with_adapters(configs, copy.deepcopy(base)), [3, 1, 4, 1, 5]
    chosen = backend if native else "eager"
    with wrap(base, "ngram", tiers=(0, 3), max_len=64, backend=chosen, adapters=Adapters(1)) as spec:
        spec.add_adapter("one", adapted)
        got = spec.engine.submit(prompt, max_new_tokens=NEW, adapter="one").result().token_ids
        assert got == own_text(adapted, "one", prompt, NEW) != own_text(adapted, None, prompt, NEW)
