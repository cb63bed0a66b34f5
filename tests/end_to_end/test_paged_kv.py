"""``kv_memory=``: KV in pages of a pool. Every text is that of one piece of KV for each slot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Adapters, Tree, wrap
from speccompile.errors import InvalidOption
from speccompile.graph.paging import PAGES
from speccompile.heads import DFlashHead, Eagle3Head
from speccompile.policies import Fixed
from speccompile.runtime.measure import measure_tiers
from speccompile.runtime.request import Request
from speccompile.utils.kv_memory import KVMemory
from support.errors import raises
from support.families import NEW_TOKENS, SIZES, assert_texts, greedy, model_of, periodic, speculative
from support.our_kernels import our_kernels
from support.tiny import tiny_llama

TREE = Tree.dynamic(7, 3, 3)
PROMPTS = [periodic(seed=2)[:38], periodic(seed=3)[:17], [7] * 33]


def pool(tokens: int, page: int) -> Any:
    return KVMemory(tokens, tokens=tokens, page=page)


@pytest.fixture(scope="module", params=["torch's kernels", "our kernels"])
def sizes(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of a wrap whose steps run over these kernels. Pages of 16 only change addresses; ours need 128."""
    if request.param == "torch's kernels":
        yield SIZES | {"kv_memory": pool(300, 16)}
        return
    with our_kernels() as backend:
        yield SIZES | {"backend": backend, "max_len": 150, "kv_memory": pool(600, 128)}


@pytest.mark.parametrize(
    "name",
    # Windows and a soft cap, sinks, experts, its own attention over gathered rows, latents, an index of keys, layers
    # with a recurrent state beside layers with KV.
    ["llama", "gemma2", "gpt_oss", "mixtral", "bloom", "deepseek_v3", "qwen3_next"],
)
def test_texts_of_families(name: str, sizes: dict[str, Any]) -> None:
    model = model_of(name)
    with wrap(model, "ngram", tiers=(0, 3), **sizes) as spec:
        assert PAGES in spec.arena
        for draft_len in (0, 3):
            spec.engine.policy = Fixed(draft_len)
            assert_texts(spec, model, PROMPTS)
        assert spec.check(PROMPTS, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("mode", ["suffix", "eagle3_one_model", "draft_target", "early_exit"])
def test_texts_of_modes_in_chains_and_trees(mode: str, sizes: dict[str, Any]) -> None:
    model = tiny_llama(layers=4)
    draft: dict[str, Any] = {
        "eagle3_one_model": {"draft": Eagle3Head.random(model, taps=(0, 1, 1))},
        "draft_target": {"draft": tiny_llama(seed=1)},
        "early_exit": {"exit_layer": 2},
    }
    trees = () if mode == "early_exit" else (TREE,)
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    with wrap(model, mode, tiers=(0, 3, *trees), **sizes, **draft.get(mode, {})) as spec:
        for tier in (0, 3, *trees):
            spec.engine.policy = Fixed(tier)
            assert speculative(spec, PROMPTS) == wanted


@cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=128)


DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "early_exit": lambda: {"exit_layer": 1},
    "draft_target": lambda: {"draft": tiny_llama(vocab=128, seed=1)},
    "eagle3_one_model": lambda: {"draft": Eagle3Head.random(model(), taps=(0, 1, 1))},
    "dflash": lambda: {"draft": DFlashHead.random(model(), 1, block_size=5)},
}


@pytest.mark.parametrize("mode", DRAFTERS)
def test_keys_and_values_are_those_of_one_piece(mode: str) -> None:
    """Those of the target, and those of the drafter's network, which drafts from them."""
    kept: list[dict[str, torch.Tensor]] = []
    for pages in (None, pool(400, 16)):
        sizes = SIZES | {"tiers": (0, 3), "policy": "fixed:3", "kv_memory": pages} | DRAFTERS[mode]()
        with wrap(model(), mode, **sizes) as spec:
            requests = [spec.engine.submit(p, max_new_tokens=20, eos_token_id=[]) for p in PROMPTS]
            while any(len(request.new_tokens) < 8 for request in requests):
                spec.engine.step()
            arena, found = spec.arena, {}
            for name, tensor in arena.layout.tensors.items():
                for request in requests if tensor.in_pages else ():
                    slot, count = request.slot, request.cached
                    rows = arena[name][slot] if pages is None else arena[name][arena[PAGES][slot]].flatten(0, 1)
                    found[f"{name} {request.prompt}"] = rows[:count].clone()
            kept.append(found)
    assert kept[0].keys() == kept[1].keys() and any("drafter" in name for name in kept[0]) is (mode != "early_exit")
    for name, rows in kept[0].items():
        torch.testing.assert_close(kept[1][name], rows, rtol=0, atol=0)


def test_drawn_texts_are_those_of_one_piece() -> None:
    texts = []
    for options in ({}, {"kv_memory": pool(300, 16)}):
        with wrap(model(), "ngram", tiers=(0, 3), policy="fixed:3", **(SIZES | options)) as spec:
            drawn = [spec.engine.submit(prompt, max_new_tokens=20, do_sample=True, seed=3) for prompt in PROMPTS]
            texts.append([request.result().token_ids for request in drawn])
    assert texts[0] == texts[1]


def test_requests_with_one_beginning_share_its_whole_pages() -> None:
    begun = [int(token) for token in torch.randint(1, 127, (40,), generator=torch.Generator().manual_seed(0))]
    asked = [[*begun, end] for end in (3, 4, 5, 6)]
    with wrap(model(), "ngram", tiers=(0, 3), kv_memory=pool(230, 16), **SIZES) as spec:
        engine, pages = spec.engine, spec.engine.slots.pool
        # 65 positions with the drafts need five pages, of which two are those of the beginning: 2 + 4 * 3.
        assert pages is not None and pages.size == 15
        requests = [engine.submit(prompt, max_new_tokens=20, eos_token_id=[]) for prompt in asked]
        while any(request.slot < 0 for request in requests):
            engine.step()
        assert len(engine.running) == 4 and pages.shared == 2
        assert [request.result().token_ids for request in requests] == [
            model().generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 41:].tolist()
            for prompt in asked
        ]
        assert pages.shared == 2, "and remain so while the slots are free"


def test_the_pages_that_a_failed_request_shared_stay_as_they_are() -> None:
    class Failing:
        def put(self, value: torch.Tensor) -> None:
            if value.ndim == 1 and len(value) == 1:
                raise ValueError("enough")

        def end(self) -> None: ...

    prompt = PROMPTS[0]
    with wrap(model(), "ngram", tiers=(0, 3), kv_memory=pool(300, 16), **SIZES) as spec:
        kept = spec.engine.submit(prompt, max_new_tokens=20, eos_token_id=[])
        while not kept.new_tokens:
            spec.engine.step()
        failing = spec.engine.submit([*prompt[:36], 5], max_new_tokens=9, eos_token_id=[], streamer=Failing())
        while not failing.finished:
            spec.engine.step()
        assert failing.finish_reason == "error" and failing.stats.reused_tokens == 36 and not kept.finished
        wanted = model().generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert kept.result().token_ids == wanted.tolist()


def test_a_request_waits_for_pages_and_later_ones_do_not_overtake_it() -> None:
    with wrap(model(), "none", tiers=(0,), prefix_reuse=False, kv_memory=pool(64, 16), **SIZES) as spec:
        engine = spec.engine
        first, second = (engine.submit([token] * 20, max_new_tokens=20, eos_token_id=[]) for token in (5, 6))
        third = engine.submit([7], max_new_tokens=2, eos_token_id=[])
        engine.step()
        engine.step()
        assert first.slot >= 0 and second.slot < 0 and third.slot < 0
        assert len(first.result().token_ids) == 20 and len(second.result().token_ids) == 20
        assert third.result().token_ids == spec.engine.submit([7], max_new_tokens=2, eos_token_id=[]).result().token_ids


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_adapters_and_forms_of_kv_have_pages(form: Any, sizes: dict[str, Any]) -> None:
    with wrap(tiny_llama(), "ngram", tiers=(0, 3), kv=form, adapters=Adapters(2, 8), **sizes) as spec:
        assert spec.check(PROMPTS, max_new_tokens=NEW_TOKENS)


def test_a_package_keeps_the_pool(tmp_path: Path) -> None:
    with wrap(tiny_llama(), "ngram", tiers=(0, 3), kv_memory=400, **SIZES) as spec:
        text = speculative(spec, PROMPTS)
        spec.save(tmp_path / "package")
    with speccompile.load(tmp_path / "package", tiny_llama()) as loaded:
        assert loaded.arena.layout.paging is not None and loaded.arena.layout.paging.count == 5
        assert speculative(loaded, PROMPTS) == text


@pytest.mark.parametrize("value", ["4 gigabytes", "0", 0, -5, 1.5, "-1GiB"])
def test_other_sizes_are_refused(value: Any) -> None:
    with raises(InvalidOption, name="kv_memory", reason=re.compile('a size in KiB, MiB or GiB such as "4GiB"')):
        wrap(tiny_llama(), "ngram", kv_memory=value, **SIZES)


@pytest.mark.parametrize("value", [100, "20KiB"])
def test_a_pool_for_less_than_one_sequence_is_refused(value: Any) -> None:
    with raises(InvalidOption, name="kv_memory", reason=re.compile("one sequence of max_len=300 tokens needs 384 tok")):
        wrap(tiny_llama(), "ngram", kv_memory=value, **(SIZES | {"max_len": 300}))


def test_a_model_without_keys_and_values_is_refused() -> None:
    with raises(InvalidOption, name="kv_memory", value=400, reason=re.compile("keeps a recurrent state, and no keys")):
        wrap(model_of("mamba"), "none", tiers=(0,), kv_memory=400, **SIZES)


@pytest.mark.parametrize("mode", ["none", "ngram", "eagle3_one_model", "draft_target"])
def test_requests_that_were_stopped_for_pages_have_the_same_text(mode: str) -> None:
    """Seven pages of 16 positions, and three requests that need five each: later ones stop, and are read again."""
    prompts = [PROMPTS[0][:10], PROMPTS[1][:12], PROMPTS[2][:9]]
    draft: dict[str, Any] = {
        "eagle3_one_model": {"draft": Eagle3Head.random(model(), taps=(0, 1, 1))},
        "draft_target": {"draft": tiny_llama(vocab=128, seed=1)},
    }
    asked = {"max_new_tokens": 60, "eos_token_id": []}
    laws: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 4, "repetition_penalty": 1.3}, {"logprobs": True}]
    sizes = SIZES | {"max_len": 80, "tiers": (0,) if mode == "none" else (0, 3)} | draft.get(mode, {})
    found = []
    for pages in (None, pool(7 * 16, 16)):
        with wrap(model(), mode, kv_memory=pages, **sizes) as spec:
            requests = [spec.engine.submit(p, **asked, **law) for p, law in zip(prompts, laws, strict=True)]
            results = [request.result() for request in requests]
            found.append([(result.token_ids, result.finish_reason) for result in results])
            probabilities = results[2].logprobs
            assert probabilities is not None and len(probabilities) == 60
            reread = sum(request.stats.reread_tokens for request in requests)
            assert (reread > 0) is (pages is not None) is (spec.stats.preemptions > 0)
            assert all(request.stats.reused_tokens == 0 for request in requests)
    assert found[0] == found[1]


def test_the_newest_request_of_the_lowest_priority_stops() -> None:
    with wrap(model(), "none", tiers=(0,), kv_memory=pool(7 * 16, 16), **(SIZES | {"max_len": 80})) as spec:
        engine = spec.engine
        asked = {"max_new_tokens": 60, "eos_token_id": []}
        requests = [engine.submit(PROMPTS[0][:10], priority=priority, **asked) for priority in (0, 1, 1)]
        while not any(request.admitted and request.slot < 0 for request in requests):
            engine.step()
        assert [request.slot < 0 for request in requests] == [True, False, False]
        texts = [request.result().token_ids for request in requests]
        assert texts[0] == texts[1] == texts[2] and requests[0].stats.reread_tokens > 0


def test_a_model_whose_tokens_cannot_be_read_again_holds_all_its_pages() -> None:
    """Its prompts leave another state than its steps."""
    limited, sizes = model_of("nemotron_h", time_step_min=0.005), SIZES | {"max_len": 80}
    with wrap(limited, "none", tiers=(0,), kv_memory=pool(7 * 16, 16), **sizes) as spec:
        assert spec.engine.traits.prompts_differ
        prompts = (PROMPTS[0][:10], PROMPTS[1][:10])
        requests = [spec.engine.submit(prompt, max_new_tokens=60, eos_token_id=[]) for prompt in prompts]
        for request in requests:
            assert len(request.result().token_ids) == 60 and request.stats.reread_tokens == 0
        assert spec.memory().running == 0


def test_memory_counts_pages() -> None:
    for options, expected in (({}, (62 + 4, 4, 1, 0)), ({"kv_memory": pool(160, 16)}, (16, 10, 2, 0))):
        with wrap(model(), "ngram", tiers=(0, 3), **(SIZES | options)) as spec:
            request = spec.engine.submit([5] * 17, max_new_tokens=5, eos_token_id=[])
            while not request.new_tokens:
                spec.engine.step()
            use = spec.memory()
            assert (use.page_tokens, use.pages, use.running, use.idle) == expected
            assert use.page_bytes == use.page_tokens * 2 * 2 * 2 * 16 * 4 and use.nbytes == use.pages * use.page_bytes
            request.result()
            assert (spec.memory().running, spec.memory().idle, spec.memory().free) == (
                0,
                expected[2],
                use.pages - expected[2],
            )


@pytest.mark.parametrize("options", [{"tiers": (0, 60), "kv_memory": 8192}, {"max_batch": 8, "kv_memory": 512}])
def test_results_over_pages_are_proved_to_be_deterministic(sizes: dict[str, Any], options: dict[str, Any]) -> None:
    """Also where a context has several pages, and where there are fewer pages than slots."""
    wide = sizes | {"max_len": 300, "tiers": (0, 3), "deterministic": True} | options
    with wrap(model(), "ngram", **wide) as spec:
        assert spec.arena.layout.paging is not None


def test_timing_the_tiers_leaves_a_drafter_s_keys_and_values() -> None:
    sizes = SIZES | {"tiers": (0, 3), "kv_memory": pool(300, 16)}
    with wrap(model(), "draft_target", draft=tiny_llama(vocab=128, seed=1), **sizes) as spec:
        request = spec.engine.submit(PROMPTS[0], max_new_tokens=20, eos_token_id=[])
        while len(request.new_tokens) < 5:
            spec.engine.step()
        kept = {name: spec.arena[name][1:].clone() for name in spec.arena.layout.tensors if name.startswith("drafter_")}
        measure_tiers(spec.arena, spec.engine.tiers)
        assert kept and all(torch.equal(spec.arena[name][1:], tensor) for name, tensor in kept.items())


def test_a_page_that_a_row_holds_is_never_written_by_another() -> None:
    """A running row has read past the prefix, so only the free slot knows a recurrent state at its end."""
    recurrent, found = model_of("qwen3_next"), 0
    sizes = SIZES | {"max_batch": 2, "max_len": 120, "policy": "fixed:3", "kv_memory": pool(400, 16)}
    with wrap(recurrent, "ngram", tiers=(0, 3), **sizes) as spec:
        engine = spec.engine
        assert engine.slots.pool is not None
        for seed in range(20, 40):
            base = periodic(seed)[: 20 + seed % 11]
            first = engine.submit(base, max_new_tokens=34 - len(base), eos_token_id=[])
            text = base + first.result().token_ids
            running = engine.submit([*text[:32], 7, 8, 9], max_new_tokens=20, eos_token_id=[])
            while not running.new_tokens:
                engine.step()
            other = engine.submit([*text[:31], text[31] % 100 + 6, 12, 13], max_new_tokens=5, eos_token_id=[])
            while not other.new_tokens:
                engine.step()
            pages = engine.slots.pool.first_pages(other.slot, 48)[1:]
            found += running.slot >= 0 and not running.finished
            assert not any(map(engine.slots.pool.is_shared, pages)) or other.stats.reused_tokens == 32
            running.result()
            other.result()
    assert found


def test_a_stopped_request_that_was_cancelled_meanwhile_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrap(model(), "none", tiers=(0,), kv_memory=pool(7 * 16, 16), **(SIZES | {"max_len": 80})) as spec:
        engine, stop, stopped = spec.engine, spec.engine.prompts.stop, list[Request]()

        def cancel_and_stop(request: Request) -> None:
            thread = Thread(target=request.cancel)
            thread.start()
            thread.join()
            stopped.append(request)
            stop(request)

        monkeypatch.setattr(engine.prompts, "stop", cancel_and_stop)
        requests = [engine.submit(PROMPTS[0][:10], max_new_tokens=60, eos_token_id=[]) for _ in range(2)]
        assert len(requests[0].result().token_ids) == 60
        engine.step()
        assert stopped == [requests[1]] and engine.waiting.requests == [] and engine.idle
