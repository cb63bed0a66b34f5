"""``speccompile bench``: one command from prompts to tables, a page and files of figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from speccompile.cli import bench as command
from speccompile.cli.models import tiny_model
from speccompile.heads import Eagle3Head, save_eagle3
from support.commands import call

PROMPTS = [
    {"question_id": 1, "category": "writing", "turns": ["abcabcabcabc", "more abcabc"]},
    {"question_id": 2, "category": "qa", "turns": ["hello hello hello"]},
    {"question_id": 3, "category": "qa", "turns": ["what what what"]},
]
QUICK = ["--backend", "eager", "--max-new-tokens", "12"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    (tmp_path / "drafters_of_a_user.py").write_text("def repeat(tokens, draft_len):\n    return tokens[-draft_len:]\n")
    return tmp_path


def answers(path: Path) -> list[dict[str, object]]:
    return [data for data in map(json.loads, path.read_text().splitlines()) if data["kind"] == "answer"]


def test_one_command_compares_methods(folder: Path) -> None:
    model = tiny_model()
    save_eagle3(Eagle3Head.random(model, taps=(0, 1, 1)), folder / "head")
    methods = ["ngram", "suffix", "eagle3_one_model=head", "drafters_of_a_user:repeat"]
    chosen = [argument for method in methods for argument in ("--method", method)]
    outputs = ["--html", "page.html", "--csv", "table.csv", "--json", "figures.json"]
    result = call("bench", "tiny", *chosen, "--prompts", "question.jsonl", *QUICK, *outputs)
    assert result.exit_code == 0, result.output
    names = ["K=0", *(f"{method} K=3" for method in methods), "transformers generate"]
    for name in names[1:]:
        assert any(
            line.startswith(name) and line.endswith("4 of 4") for line in map(str.rstrip, result.stdout.split("\n"))
        )
    assert len(answers(folder / "bench.jsonl")) == 4 * len(names)
    summary = json.loads((folder / "figures.json").read_text())
    assert [line["name"] for line in summary["machines"][0]["lines"]] == names
    head = summary["machines"][0]["lines"][3]
    assert head["figures"]["acceptance_length"]["value"] >= 1 and set(head["categories"]) == {"writing", "qa"}
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["line"], row["category"]) for row in rows[:3]] == [("K=0", "all"), ("K=0", "writing"), ("K=0", "qa")]
    assert float(rows[3]["speed_over_k0"]) > 0 and rows[3]["prompts"] == "3"
    assert "speccompile bench" in (folder / "page.html").read_text()


def test_a_stopped_run_continues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["bench", "tiny", "--prompts", "question.jsonl", *QUICK, "--no-transformers"]
    run = command.run_bench

    def stopped(*given: object) -> None:
        count = 0

        def stop() -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise KeyboardInterrupt

        run(*given[:-1], stop)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "run_bench", stopped)
    result = call(*arguments)
    assert result.exit_code == 130
    assert "stopped; the same command continues from bench.jsonl" in result.stderr
    before = answers(folder / "bench.jsonl")
    monkeypatch.setattr(command, "run_bench", run)
    result = call(*arguments)
    assert result.exit_code == 0 and "bench.jsonl has 3 answers; 5 are missing" in result.stderr
    assert answers(folder / "bench.jsonl")[:3] == before and len(answers(folder / "bench.jsonl")) == 8
    # A whole file is only shown.
    monkeypatch.setattr(command, "run_bench", None)
    assert call(*arguments).exit_code == 0
    # A further method measures only itself.
    monkeypatch.setattr(command, "run_bench", run)
    result = call(*arguments, "--method", "ngram", "--method", "suffix")
    assert "bench.jsonl has 8 answers; 4 are missing" in result.stderr
    result = call(*arguments, "--temperature", "1")
    assert result.exit_code == 2 and "its settings differ: temperature is 0.0 and 1.0" in result.stderr


def test_files_are_joined(folder: Path) -> None:
    for number, prompt in enumerate(PROMPTS[:2]):
        (folder / f"{number}.jsonl").write_text(json.dumps(prompt) + "\n")
        prompts = ["--prompts", f"{number}.jsonl", "--output", f"bench{number}.jsonl"]
        assert call("bench", "tiny", *QUICK, *prompts, "--no-transformers").exit_code == 0
    result = call("bench-report", "bench0.jsonl", "bench1.jsonl", "--json", "all.json", "--html", "all.html")
    assert result.exit_code == 0 and "2 prompts" in result.stdout
    (machine,) = json.loads((folder / "all.json").read_text())["machines"]
    assert machine["lines"][1]["figures"]["prompts"] == 2
    result = call("bench-report", "0.jsonl")
    assert result.exit_code == 2 and "0.jsonl cannot be used: line 1 is not of a file of results" in result.stderr


def test_policies_trees_and_rules(folder: Path) -> None:
    shared = [
        "bench",
        "tiny",
        "--prompts",
        "question.jsonl",
        *QUICK,
        "--no-transformers",
        "--count",
        "2",
        "--turns",
        "1",
    ]
    trees = call(*shared, "--tiers", "0,2,tree:4:3:2", "--output", "trees.jsonl", "--option", "max_ngram=2")
    assert trees.exit_code == 0, trees.output
    assert {each["line"] for each in answers(folder / "trees.jsonl")} == {"K=0", "ngram K=2", "ngram tree:4:3:2"}
    adaptive = call(*shared, "--policy", "cost", "--policy", "fixed:3", "--output", "policies.jsonl", "--rounds", "2")
    assert adaptive.exit_code == 0, adaptive.output
    found = answers(folder / "policies.jsonl")
    assert {each["line"] for each in found} == {"K=0", "ngram cost", "ngram fixed:3"} and len(found) == 3 * 2 * 2
    sampled = ["--temperature", "0.8", "--acceptance", "rejection", "--option", "kv=float16", "--output", "drawn.jsonl"]
    drawn = call(*shared, *sampled)
    assert drawn.exit_code == 0, drawn.output
    settings = json.loads((folder / "drawn.jsonl").read_text().splitlines()[0])["settings"]
    assert (settings["acceptance"], settings["temperature"], settings["kv"]) == ("rejection", 0.8, "float16")


def test_options_that_have_no_effect_are_refused(folder: Path) -> None:
    shared = ["bench", "tiny", *QUICK]
    result = call(*shared, "--option", "max_depth=3")
    assert result.exit_code == 2 and "neither an option of wrap nor of one of the methods" in result.stderr
    result = call(*shared, "--prompts", "question.jsonl", "--prompts", "question.jsonl")
    assert result.exit_code == 2 and "two prompts have the name '1'" in result.stderr
    result = call(*shared, "--prompts", "question.jsonl", "--max-len", "20")
    assert result.exit_code == 2 and "no prompt fits with its answers; the shortest needs 26 tokens" in result.stderr
    result = call(*shared, "--prompts", "question.jsonl", "--max-len", "32", "--no-transformers")
    assert result.exit_code == 0 and "left out 1 prompts that need more than 32 tokens" in result.stderr
    assert not (folder / "bench.jsonl.partial").exists()
