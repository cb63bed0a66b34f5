"""Names of adapters, their places, and what requests, prefixes and packages make of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from speccompile import Adapters, Speculator, load, wrap
from speccompile.errors import AdapterRemoved, AdaptersFull, InvalidAdapter, InvalidOption, UnknownAdapter
from speccompile.runtime.generate import decode
from speccompile.runtime.params import Params
from support.errors import raises
from support.lora import lora_config, own_text, with_adapters
from support.tiny import tiny_llama

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW = 8


@pytest.fixture(scope="module")
def adapted() -> PeftModel:
    return with_adapters({"one": lora_config(8), "two": lora_config(2)})


def select(adapted: PeftModel, name: str) -> PeftModel:
    adapted.set_adapter(name)
    return adapted


@pytest.fixture(scope="module")
def wrapped() -> Iterator[Speculator]:
    with wrap(
        tiny_llama(), "ngram", tiers=(0, 3), max_batch=2, max_len=64, backend="eager", adapters=Adapters(2)
    ) as made:
        yield made


@pytest.fixture
def spec(wrapped: Speculator, adapted: PeftModel) -> Iterator[Speculator]:
    """With the adapters ``one`` and ``two``."""
    for name in ("one", "two"):
        wrapped.add_adapter(name, select(adapted, name))
    yield wrapped
    wrapped.engine.run()
    for name in wrapped.adapters:
        wrapped.remove_adapter(name)


def text(spec: Speculator, adapter: str | None, prompt: list[int] = PROMPT) -> list[int]:
    return spec.engine.submit(prompt, max_new_tokens=NEW, adapter=adapter).result().token_ids


def test_a_removed_adapter_stays_with_the_requests_that_have_it(spec: Speculator, adapted: PeftModel) -> None:
    """Those that wait, too; its place is free when the last one has ended."""
    running = [spec.engine.submit(PROMPT, max_new_tokens=NEW, adapter="one") for _ in range(4)]
    spec.engine.step()
    spec.remove_adapter("one")
    assert spec.adapters == ("two",)
    with raises(UnknownAdapter, name="one", loaded="two"):
        spec.engine.submit(PROMPT, adapter="one")
    with raises(AdaptersFull, name="one", count=2, loaded=1):
        spec.add_adapter("one", select(adapted, "two"))
    assert all(request.result().token_ids == own_text(adapted, "one", PROMPT, NEW) for request in running)
    spec.add_adapter("one", select(adapted, "two"))
    assert text(spec, "one") == own_text(adapted, "two", PROMPT, NEW)


def test_prefixes_are_not_shared_by_adapters(spec: Speculator, adapted: PeftModel) -> None:
    """Nor by two adapters of one name, one after the other."""
    prompt = PROMPT[::-1]  # of no other test
    spec.stats.reset()
    texts = {name: text(spec, name, prompt) for name in (None, "one", "two")}
    assert spec.stats.reused_tokens == 0
    assert text(spec, "two", prompt) == texts["two"] and spec.stats.reused_tokens == len(prompt) - 1
    spec.stats.reset()
    spec.remove_adapter("two")
    spec.add_adapter("two", select(adapted, "one"))
    assert text(spec, "two", prompt) == texts["one"] != texts["two"]
    # "one" has other KV than the "two" that has its weights: it is known by the adapter, not by them.
    assert spec.stats.reused_tokens == 0


def test_a_request_that_is_queued_after_its_place_was_taken_ends(spec: Speculator, adapted: PeftModel) -> None:
    stale = Params(NEW, (), adapter=spec.engine.adapters.find("submit", "one"))
    spec.remove_adapter("one")
    spec.add_adapter("three", select(adapted, "two"))
    with raises(AdapterRemoved, name="one"):
        decode(spec.engine, [PROMPT], stale)
    assert text(spec, "three") == own_text(adapted, "two", PROMPT, NEW)


def test_bad_names_are_refused(spec: Speculator, adapted: PeftModel) -> None:
    with raises(InvalidOption, where="submit", name="adapter", value=3):
        spec.engine.submit(PROMPT, adapter=3)  # type: ignore[arg-type]
    with raises(InvalidOption, where="generate", name="adapter", reason=re.compile("each of the 1 prompts")):
        spec.generate(torch.tensor([PROMPT]), adapter=["one", "two"])
    with raises(InvalidAdapter, name="one", reason=re.compile("an adapter of that name is loaded")):
        spec.add_adapter("one", adapted)
    with raises(InvalidOption, where="add_adapter", name="name", value=""):
        spec.add_adapter("", adapted)
    with raises(UnknownAdapter, name="four", loaded="one, two"):
        spec.remove_adapter("four")


def test_without_room_for_adapters_each_use_says_so(adapted: PeftModel) -> None:
    with wrap(tiny_llama(), "none", tiers=(0,), max_len=64, backend="eager") as spec:
        for where, use in (
            ("submit", lambda: spec.engine.submit(PROMPT, adapter="one")),
            ("add_adapter", lambda: spec.add_adapter("one", adapted)),
            ("remove_adapter", lambda: spec.remove_adapter("one")),
        ):
            with raises(InvalidOption, where=where, name="adapter", reason=re.compile("Adapters\\(count=")):
                use()
        assert spec.adapters == () and "lora" not in spec.stages["outline"].python


def test_explain_and_the_report_name_them(spec: Speculator) -> None:
    line = next(line for line in spec.explain().splitlines() if line.startswith("adapters"))
    assert "buffers for 2 of rank 16 on 14 linears" in line and "one (rank 8, 14 linears), two (rank 2," in line
    report = spec.report(measure=False)
    buffers = [buffer for buffer in report.buffers if buffer.group == "adapters"]
    # Two matrices of each linear; ranks and scales of each layer; the adapter of each slot.
    assert len(buffers) == 2 * 14 + 2 * 2 + 1
    held = [item for item in report.memory.items if item.path[:2] == ("arena", "adapters")]
    assert sum(item.nbytes for item in held) == sum(buffer.nbytes for buffer in buffers)


def test_a_package_keeps_the_room_and_no_adapter(spec: Speculator, adapted: PeftModel, tmp_path: Path) -> None:
    spec.save(tmp_path / "tiny.spec")
    with load(tmp_path / "tiny.spec", tiny_llama()) as loaded:
        assert loaded.adapters == ()
        loaded.add_adapter("one", select(adapted, "one"))
        assert text(loaded, "one") == own_text(adapted, "one", PROMPT, NEW)


def test_a_callback_cannot_exchange_adapters(spec: Speculator) -> None:
    from speccompile.errors import InsideStep

    seen: list[Exception] = []

    class Streamer:
        def put(self, value: object) -> None:
            try:
                spec.remove_adapter("one")
            except InsideStep as error:
                seen.append(error)

        def end(self) -> None: ...

    spec.engine.submit(PROMPT, max_new_tokens=2, streamer=Streamer()).result()
    assert seen and spec.adapters == ("one", "two")
