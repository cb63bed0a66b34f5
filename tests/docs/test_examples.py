"""The examples run, and stay as short as they promise to be."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import typer
from transformers import LlamaForCausalLM

import speccompile
from speccompile.cli.models import encode, tiny_model, tiny_tokenizer
from speccompile.errors import InvalidOption
from speccompile.modes import registry
from speccompile.policies import Fixed
from speccompile.training.turn_files import read_turns
from support.errors import raises
from support.training_data import write_texts

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def registered_modes_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_modes", dict(registry._modes))


@pytest.fixture(autouse=True)
def the_largest_tier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine takes for it."""
    monkeypatch.setattr("speccompile.compiler.plan.default_policy", lambda draft_lens, **_: Fixed(draft_lens[-1]))


def test_custom_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    source = EXAMPLES / "custom_drafter.py"
    assert len(source.read_text().splitlines()) <= 60
    # Compares with model.generate itself; run by name, its main() would not be called.
    runpy.run_path(str(source))["main"]()
    found = re.search(r"acceptance length ([\d.]+) in (\d+) steps", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) > 2, "the drafter was to be right now and then"
    assert int(found[2]) < 199, "fewer steps than tokens"


def test_prompts_from_texts(tmp_path: Path) -> None:
    passage = " ".join(f"word{number}" for number in range(40))
    ids = encode(tiny_tokenizer(), passage).repeat(2, 1)
    texts = write_texts(tmp_path / "texts", tiny_model(), ids, prompt=0)
    main = runpy.run_path(str(EXAMPLES / "prompts_from_texts.py"))["main"]
    for name in ("first.jsonl", "again.jsonl"):
        main(texts, tmp_path / name, model="tiny", count=60, seed=1)
    prompts = [turns[0] for turns in read_turns(tmp_path / "first.jsonl")]
    assert len(prompts) > 20 and any(passage in prompt for prompt in prompts)
    assert any("function" in prompt for prompt in prompts) and any("How many" in prompt for prompt in prompts)
    assert not any("{" in prompt for prompt in prompts)
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()


def test_prompts_by_topic(tmp_path: Path) -> None:
    main = runpy.run_path(str(EXAMPLES / "prompts_by_topic.py"))["main"]
    for name in ("first.jsonl", "again.jsonl"):
        main(tmp_path / name, count=3000, seed=1)
    with pytest.raises(typer.BadParameter, match=r"must end in \.jsonl"):
        main(tmp_path / "first.txt", count=10, seed=1)
    prompts = [turns[0] for turns in read_turns(tmp_path / "first.jsonl")]
    assert 1000 < len(prompts) == len(set(prompts))
    assert not any("{" in prompt or "}" in prompt for prompt in prompts)
    assert any("Python" in prompt for prompt in prompts) and any("poem" in prompt for prompt in prompts)
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "again.jsonl").read_bytes()


@pytest.mark.real
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    source = EXAMPLES / "quickstart.py"
    code = [line for line in source.read_text().splitlines() if line and not line.startswith(('"""', "import", "from"))]
    assert len(code) <= 10
    runpy.run_path(str(source), run_name="__main__")
    text, _, counted = capsys.readouterr().out.strip().rpartition("\n")
    assert "Speculative decoding drafts several tokens" in text
    # The answer repeats what was asked, so n-grams match.
    assert float(counted.split()[0]) > 2


@pytest.mark.real
def test_custom_pass(capsys: pytest.CaptureFixture[str]) -> None:
    source = EXAMPLES / "custom_pass.py"
    assert len(source.read_text().splitlines()) < 40
    runpy.run_path(str(source), run_name="__main__")
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 23, "one for each new token but the first, which is chosen when the prompt has been read"
    entropies = [float(line.split()[0]) for line in lines]
    assert all(0 <= value < 11 for value in entropies), "in nats, of 49152 tokens"
    assert len(set(entropies)) > 10


@pytest.mark.real
def test_serving(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "serving.py"), run_name="__main__")
    lines = capsys.readouterr().out.strip().splitlines()
    answers = [line for line in lines if "first token after" in line]
    assert [line[:32].rstrip() for line in answers] == [
        "Name three rivers.",
        "Say 'all is well' five times.",
        "What is a prime number?",
        "Count to twenty.",
    ]
    assert all(re.search(r"(eos|stop|max_new_tokens), first token after [\d.]+ s: ['\"]", line) for line in answers)
    assert "free_slots=4" in lines[-1]
    # Streamed, and not one after the other.
    first = [line[:32] for line in lines[:20]]
    assert len(set(first)) > 1


def test_custom_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    source = EXAMPLES / "custom_draft_model.py"
    assert len(source.read_text().splitlines()) <= 60
    # Checks the texts of a chain and of a tree itself, fused and split.
    runpy.run_path(str(source))["main"]()
    found = re.findall(r"fused=(\w+): same text; acceptance length ([\d.]+)", capsys.readouterr().out)
    assert [fused for fused, _ in found] == ["True", "False"]
    assert all(float(length) > 1.1 for _, length in found), "the drafter was to be right now and then"


def test_the_custom_draft_model_applies_its_options_and_refuses_one_that_it_does_not_read(
    model: LlamaForCausalLM,
) -> None:
    mode = runpy.run_path(str(EXAMPLES / "custom_draft_model.py"))["FirstLayers"]
    speccompile.register_mode("first_layers", mode, replace=True)
    options = {"mode": "first_layers", "backend": "eager", "policy": "fixed:3", "tiers": (0, 3), "max_len": 64}
    prompt = torch.tensor([[1, 2, 3, 4]])
    with speccompile.wrap(model, draft_max_len=6, **options) as spec:
        assert spec.check(prompt, max_new_tokens=24)
        assert spec.stats.draft_tokens <= 6, "longer sequences are decoded without drafts"
    for draft in (model, "folder"):
        with raises(
            InvalidOption, where="mode 'first_layers'", name="draft", reason=re.compile("leave the option out")
        ):
            speccompile.wrap(model, draft=draft, **options)
