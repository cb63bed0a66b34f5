"""Finished steps on disk: a wrap that was made before runs no passes over its tiers, and any other does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, LlamaForCausalLM

import speccompile
from speccompile.compiler import step_store as finished
from speccompile.errors import Degraded, PassError
from speccompile.graph.printing import to_python
from speccompile.passes.pipeline import Pipeline
from speccompile.utils import sources
from speccompile.utils.storage import CacheFolder, digest
from support.errors import raises
from support.own_mode import OwnMode
from support.tiny import greedy, random_prompt, tiny_llama

MODEL = "the captured model"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What passes were run over, in order."""
    names: list[str] = []
    check = Pipeline.check

    def noted(self: Pipeline, *args: Any) -> Any:
        names.append(self.tier)
        return check(self, *args)

    monkeypatch.setattr(Pipeline, "check", noted)
    return names


TINY = {"layers": 1}


def wrap(model: LlamaForCausalLM, mode: Any = "ngram", **options: Any) -> speccompile.Speculator:
    given = {"tiers": (0, 2), "backend": "eager", "max_len": 15, **options}
    return speccompile.wrap(model, mode, **given)


def test_a_second_wrap_runs_no_passes_over_tiers(model: LlamaForCausalLM, ran: list[str]) -> None:
    prompt = random_prompt(9)
    expected = greedy(model, prompt, 6)
    first = wrap(model)
    assert {"tier K=0, 1 row", "tier K=2, 1 row", "prefill T=4"} < set(ran)
    ran.clear()
    second = wrap(model)
    assert second.generate(torch.tensor([prompt]), max_new_tokens=6)[0, 9:].tolist() == expected
    assert ran == [MODEL]
    pairs = [*zip(first.engine.tiers.values(), second.engine.tiers.values(), strict=True)]
    pairs += zip(first.engine.prefill_tiers.values(), second.engine.prefill_tiers.values(), strict=True)
    for made, read in pairs:
        assert (read.step.source, read.key) == (made.step.source, made.key)
        assert read.argument_names == made.argument_names
        for port, wanted, tensor in zip(read.ports, made.ports, read.arguments, strict=True):
            assert port == wanted
            weights = second.arena[port.name] if port.role == "state" else wanted.value
            assert weights is not None and tensor.data_ptr() == weights.data_ptr()


def test_stages_of_a_stored_step_are_made_when_somebody_looks(model: LlamaForCausalLM, ran: list[str]) -> None:
    first = wrap(model)
    texts = {name: stage.python for name, stage in first.stages.items()}
    ran.clear()
    second = wrap(model)
    assert {name: stage.python for name, stage in second.stages.items()} == texts
    assert ran == [MODEL, "tier K=2, 1 row"]
    tier = second.tiers[2]
    assert to_python(tier.graph, tier.name) == tier.step.source
    assert "-> commit" in second.explain() and "decoder_layer x1" in second.explain()


def test_steps_of_other_kinds_are_stored_as_well(model: LlamaForCausalLM, ran: list[str]) -> None:
    texts = []
    for expected in (True, False):
        ran.clear()
        with wrap(model) as spec:
            request = spec.engine.submit(random_prompt(9), max_new_tokens=6, do_sample=True, seed=3)
            texts.append(request.result().token_ids)
            assert any("sampled" in name for name in ran) is expected
    assert texts[0] == texts[1]


def test_a_wrap_with_another_tier_makes_that_one_alone(model: LlamaForCausalLM, ran: list[str]) -> None:
    wrap(model, mode="early_exit", exit_layer=1, max_len=15, tiers=(0, 2)).close()
    ran.clear()
    # The arena has to stay as large, since steps print its sizes.
    wrap(model, mode="early_exit", exit_layer=1, max_len=15, tiers=(0, 1, 2)).close()
    assert ran == [MODEL, "tier K=1, 1 row"]


def letters(text: str, add_special_tokens: bool = True) -> BatchEncoding:
    return BatchEncoding({"input_ids": [ord(letter) - ord("a") for letter in text]})


def test_of_composed_drafters_the_tokenizer_says_nothing_of_steps(model: LlamaForCausalLM, ran: list[str]) -> None:
    texts = {"mode": ["suffix", "ngram"], "max_depth": 4, "corpus": ["abcabd"], "tokenizer": letters}
    wrap(model, **texts).close()
    ran.clear()
    wrap(model, **texts).close()
    assert ran == [MODEL]
    wrap(model, **texts | {"min_score": 2.0}).close()
    assert "tier K=2, 1 row" in ran


def test_other_options_are_other_steps(model: LlamaForCausalLM, ran: list[str]) -> None:
    wrap(model).close()
    for change in (
        {"max_ngram": 2},
        {"max_len": 20},
        {"max_batch": 2},
        {"acceptance": "typical"},
        {"tiers": (0, 3)},
        {"mode": "none"},
    ):
        ran.clear()
        wrap(model, **change).close()
        assert "prefill T=4" in ran or "tier K=2, 1 row" in ran, change


def test_another_graph_or_other_code_is_another_step(
    model: LlamaForCausalLM, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap(model).close()
    everything = len(ran)
    ran.clear()
    wrap(tiny_llama(layers=1, rms_norm_eps=1e-3)).close()
    assert len(ran) == everything
    ran.clear()
    monkeypatch.setattr(finished, "sources", lambda: "edited")
    wrap(model).close()
    assert len(ran) == everything


def test_the_digest_of_the_code_covers_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path, "inner").mkdir()
    file = Path(tmp_path, "inner", "a_pass.py")
    file.write_text("x = 1\n")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    digests = set()
    for change in (lambda: None, lambda: file.write_text("x = 2\n"), lambda: file.rename(Path(tmp_path, "b.py"))):
        change()
        digests.add(sources.sources.__wrapped__())
    Path(tmp_path, "kernel.cpp").touch()
    assert len(digests | {sources.sources.__wrapped__()}) == 4


def test_a_damaged_step_is_made_again(model: LlamaForCausalLM, own_cache: Path, ran: list[str]) -> None:
    wrap(model).close()
    everything = len(ran)
    damages: list[Callable[[str], str]] = [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("aten", "atem"),
        lambda text: "",
    ]
    for damage in damages:
        for path in own_cache.glob("steps/*.json"):
            path.write_text(damage(path.read_text()))
        ran.clear()
        wrap(model).close()
        assert len(ran) == everything
        ran.clear()
        wrap(model).close()
        assert ran == [MODEL]


def test_a_stored_step_that_its_passes_do_not_make_is_told(model: LlamaForCausalLM, own_cache: Path) -> None:
    wrap(model).close()
    for path in own_cache.glob("steps/*.json"):
        _, _, text = path.read_text().partition("\n")
        data = json.loads(text)
        data["source"] += "# more\n"
        text = json.dumps(data)
        path.write_text(f"{digest(text)}\n{text}")
    spec = wrap(model)
    with raises(PassError, tier="tier K=2, 1 row", file=re.compile(r"^steps/\w+\.json$")):
        _ = spec.stages["commit"]


def test_a_folder_that_cannot_be_written_is_told(
    model: LlamaForCausalLM, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = own_cache / "file"
    file.touch()
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: file)
    monkeypatch.setattr("speccompile.utils.storage._spare", [])
    with pytest.warns(Degraded, match="cannot be written .* SPECCOMPILE_CACHE") as warned:
        wrap(model).close()
    assert len(warned) == 1
    # What was built is there for the next wrap of this process.
    assert wrap(model)._build.model["capture"].note == "read from the store"


# --- what has no key -----------------------------------------------------------------------------


def test_code_from_outside_is_run_every_time(
    model: LlamaForCausalLM, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(speccompile.modes.registry._modes, "own", OwnMode)
    for options in ({"mode": "own"}, {"logits_processor": lambda ids, scores: scores * 2}):
        counts = []
        for _ in range(2):
            ran.clear()
            wrap(model, **options).close()
            counts.append(len(ran))
        assert counts[0] == counts[1] > 1


def test_names_are_of_the_cache_folder(own_cache: Path) -> None:
    folder = CacheFolder()
    folder.write("a/b.bin", b"one\ntwo\xff")
    assert folder.read("a/b.bin") == b"one\ntwo\xff" and folder.read("a/c.bin") is None
    assert [path.name for path in own_cache.rglob("*") if path.is_file()] == ["b.bin"]
