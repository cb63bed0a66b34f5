"""Benchmarks of serving: their arithmetic, and each of them on a tiny model."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from benchmarks import serve
from benchmarks.servers import serve_engine, serve_in_turn
from benchmarks.serving import Served, Service, Watch, arrivals, fitting_prompts, percentile, unlike
from speccompile import wrap
from speccompile.cli.models import tiny_model, tiny_tokenizer
from speccompile.errors import InvalidOption
from support.errors import raises

PROMPTS = [list(b"abcabcabcabc"), list(b"hello, hello, hello"), list(b"abcabcxyz"), list(b"to be")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ("abcabcabcabc", "hello, hello, hello", "one two three", "a b c a b c", "no, no, no, no")
    objects = ({"question_id": i, "category": "qa", "turns": [text]} for i, text in enumerate(texts))
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return path


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_gaps_of_tokens_that_come_together_are_shared() -> None:
    request = Served(1.0, 1.5, 6.0, [7, 8, 9, 10], [(2.0, 1), (5.0, 2), (6.0, 1)])
    assert request.first_token == 1.0
    assert request.token_gaps == [1.5, 1.5, 1.0]
    assert Served(0.0, moments=[(2.0, 1)]).token_gaps == []


def test_figures_of_a_service() -> None:
    service = Service("x", 2, [Served(0.0, 1.0, 4.0, [1, 2], [(2.0, 2)]), Served(2.0, 2.0, 8.0, [3], [(3.0, 1)])])
    assert (service.makespan, service.tokens_per_second) == (8.0, 3 / 8)
    assert service.slot_use == 9 / 16
    assert service.first_tokens == [2.0, 1.0]
    late = replace(service, requests=[Served(4.0, 5.0, 6.0, [1], [(6.0, 1)])])
    assert late.makespan == 2.0


def test_percentile() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50.0, 99.0, 100.0)
    assert percentile([3.0], 1) == percentile([3.0], 99) == 3.0
    assert math.isnan(percentile([], 50))


def test_arrivals_are_poisson_and_the_same_again() -> None:
    times = arrivals(4.0, 2000, seed=1)
    assert times == arrivals(4.0, 2000, seed=1) != arrivals(4.0, 2000, seed=2)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0 and min(gaps) > 0
    # Of an exponential distribution, deviation and mean are one.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_the_warm_up_shares_no_beginning() -> None:
    made = unlike(PROMPTS, 256)
    assert len(made) == max(map(len, PROMPTS))
    assert made[0] not in {prompt[0] for prompt in PROMPTS}
    assert unlike([[0, 1], [1], [3]], 4) in ([2, token] for token in range(4))


def test_prompts_that_are_too_long_are_left_out(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = fitting_prompts(tiny_tokenizer(), prompts, None, 13)
    assert [prompt.text for prompt, _ in kept] == ["abcabcabcabc", "one two three", "a b c a b c"]
    assert "left out 2" in capsys.readouterr().out
    with raises(InvalidOption, name="--max-len", reason=re.compile("no prompt is that short")):
        fitting_prompts(tiny_tokenizer(), prompts, None, 2)


def test_watch_puts_tokens_of_one_step_together() -> None:
    steps = iter([4, 5, 5, 7])
    watch = Watch(lambda: next(steps))
    watch.put(torch.tensor([[1, 2, 3]]))
    for token in range(4):
        watch.put(torch.tensor([token]))
    watch.end()
    moments = watch.moments(0.0)
    assert [count for _, count in moments] == [1, 2, 1]
    assert [when for when, _ in moments] == sorted(when for when, _ in moments)


# --- serving -----------------------------------------------------------------------------------------------------


def test_the_engine_serves_what_transformers_does() -> None:
    model, times = tiny_model(), [0.0, 0.01, 0.02, 0.03]
    expected = serve_in_turn("one by one", model, PROMPTS, times, 12)
    with wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=64, backend="eager", policy="fixed:3") as spec:
        got = serve_engine("engine", spec, PROMPTS, times, 12)
        stats = spec.stats
    assert not serve.texts_that_differ(model, PROMPTS, expected, got)
    assert sum(got.steps_by_tier.values()) == sum(got.steps_by_rows.values()) == stats.steps
    assert got.acceptance_length > 1.0
    for service in (expected, got):
        assert [request.arrived for request in service.requests] == pytest.approx(times, abs=0.2)
        for request in service.requests:
            assert sum(count for _, count in request.moments) == len(request.tokens) == 12
            assert request.arrived <= request.begun <= request.moments[0][0]
            assert request.moments[-1][0] <= request.ended
            assert len(request.token_gaps) == 11
        assert 0 < service.slot_use <= 1
    # Of what the engine speculated, some tokens came together; one by one, none did.
    assert any(count > 1 for request in got.requests for _, count in request.moments)
    assert all(count == 1 for request in expected.requests for _, count in request.moments)


def test_a_wrong_text_is_told() -> None:
    model = tiny_model()
    expected = serve_in_turn("one by one", model, PROMPTS[:2], [0.0, 0.0], 6)
    broken = [replace(request, tokens=list(request.tokens)) for request in expected.requests]
    broken[1].tokens[3] = (broken[1].tokens[3] + 1) % 256
    wrong = replace(expected, requests=broken)
    (difference,) = serve.texts_that_differ(model, PROMPTS[:2], expected, wrong)
    assert (difference.prompt, difference.position) == (1, 3)
    line = serve.figures(wrong, [difference])
    assert line["same_texts"] == 1 and line["largest_logit_change"] == difference.logit_change > 1e-3


def test_serve(folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    policies = ["fixed:0", "schedule:1=3,2=0"]
    serve.main(
        model=folder,
        prompts=prompts,
        rate=100.0,
        new_tokens=10,
        slots=2,
        tiers="0,3",
        policy=policies,
        budget=[8],
        backend="eager",
        max_len=64,
        json_file=file,
    )
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    names = [serve.IN_TURN, serve.BATCHING, *(f"speccompile {policy}, prefill_budget=8" for policy in policies)]
    assert [row["variant"] for row in report["variants"]] == names
    for row in report["variants"]:
        assert row["variant"] in printed
        assert row["same_texts"] == 5, row
        assert row["tokens_per_second"] == pytest.approx(50 / row["makespan_seconds"])
        assert 0 < row["token_p50"] <= row["token_p99"]
        assert 0 < row["first_token_p50"] <= row["first_token_p99"]
    plain, scheduled = report["variants"][2:]
    assert plain["steps_by_tier"] == {"0": 1.0}
    assert sum(scheduled["steps_by_rows"].values()) == pytest.approx(1.0)
    assert set(scheduled["steps_by_rows"]) <= {"1", "2"}
    by_variant = {name: [item for item in report["requests"] if item["variant"] == name] for name in names}
    texts = [[item["tokens"] for item in items] for items in by_variant.values()]
    assert texts == [texts[0]] * 4 and len(texts[0]) == 5
    assert report["machine"]["torch_threads"] and report["settings"]["policies"] == policies


def test_serve_refuses_before_it_loads_anything() -> None:
    with pytest.raises(typer.Exit):
        serve.main(model="no such model", policy=["fixed:5"])
