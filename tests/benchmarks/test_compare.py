"""The benchmark: readers of prompt files, choice of prompts, and a small comparison."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import typer

from benchmarks import isolated, sampled_exactness
from benchmarks.compare import LOOKUP, compare, make_variants, parse_variants
from benchmarks.machine import cpu_name
from benchmarks.prompts import choose_prompts, spread
from benchmarks.report import categories_table, runs_table
from speccompile import wrap
from speccompile.cli.measure import TRANSFORMERS, Run, Summary, TokenTimer, Variant, measure, tier_name
from speccompile.cli.models import encode, max_len_for, tiny_model, tiny_tokenizer
from speccompile.cli.prompts import BUILT_IN, NamedPrompt, read_prompts
from speccompile.errors import InvalidInput, InvalidOption
from speccompile.runtime.policy_controller import Fixed
from support.errors import raises

SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a haiku.", "Now another."]}
HUMAN_EVAL = {"task_id": "HumanEval/0", "prompt": "def one():\n", "entry_point": "one"}


def lines(*objects: object) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


def test_spec_bench_lines(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(lines(SPEC_BENCH) + "\n" + lines({**SPEC_BENCH, "question_id": 82, "category": "qa"}))
    first, second = read_prompts(path)
    assert first == NamedPrompt("81", "writing", "Write a haiku.", None)
    assert (second.name, second.category) == ("82", "qa")


@pytest.mark.parametrize("zipped", [False, True])
def test_human_eval_lines(tmp_path: Path, zipped: bool) -> None:
    data = lines(HUMAN_EVAL).encode()
    path = tmp_path / ("HumanEval.jsonl.gz" if zipped else "HumanEval.jsonl")
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert read_prompts(path) == [NamedPrompt("HumanEval/0", "HumanEval", "def one():\n", False)]


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Write a haiku.\n\n  {braces}\n")
    assert read_prompts(path) == [
        NamedPrompt("prompts.txt:1", "prompts", "Write a haiku."),
        NamedPrompt("prompts.txt:3", "prompts", "{braces}"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "it is not JSON (Expecting property name"),
        ("Write a haiku.", 'it must be like {"turns": '),
        ("[1, 2]", "not a JSON object with 'turns'"),
        ('{"question": "?"}', "not a JSON object with 'turns'"),
        ('{"turns": []}', "'turns' must be a list with at least one text"),
        ('{"turns": "text"}', "'turns' must be a list with at least one text"),
        ('{"turns": [3]}', "its prompt must be a text"),
        ('{"prompt": "  "}', "its prompt must be a text that is not empty"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines(SPEC_BENCH) + line + "\n")
    with raises(InvalidInput, name=re.compile("line 2 of the prompt file"), reason=re.compile(re.escape(reason))):
        read_prompts(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with raises(InvalidInput, reason=re.compile("cannot be read")):
        read_prompts(tmp_path / "missing.jsonl")
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text(lines(SPEC_BENCH))
    with raises(InvalidInput, reason=re.compile("cannot be read")):
        read_prompts(plain)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(lines(*[SPEC_BENCH] * 50).encode())[:-12])
    with raises(InvalidInput, reason=re.compile("cannot be read")):
        read_prompts(cut)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "\xe4"}\n')
    with raises(InvalidInput, reason=re.compile("cannot be read")):
        read_prompts(latin)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with raises(InvalidInput, reason=re.compile("holds no prompts")):
        read_prompts(empty)


def test_prompts_are_spread_over_categories() -> None:
    prompts = [NamedPrompt(str(i), category, "text") for i, category in enumerate("aaabbc")]
    assert [prompt.name for prompt in spread(prompts, 4)] == ["0", "3", "5", "1"]
    assert len(spread(prompts, 100)) == 6
    assert choose_prompts(None, None) == list(BUILT_IN)
    assert len(choose_prompts(None, 2)) == 2


def test_summary_separates_the_first_token() -> None:
    runs = [Run([1, 2, 3], 1.0, 2.0, 1, 2), Run([1], 0.5, 0.5, 0, 0)]
    summary = Summary(runs)
    assert summary.tokens_per_second == pytest.approx(4 / 2.5)
    assert summary.decode_tokens_per_second == pytest.approx(2.0)
    assert summary.first_seconds == pytest.approx(0.75)
    assert summary.acceptance_length == 2.0
    nothing = Summary(runs[1:])
    assert (nothing.decode_tokens_per_second, nothing.acceptance_length) == (0.0, 0.0)


def test_runs_are_interleaved() -> None:
    order: list[tuple[str, int]] = []

    def variant(name: str) -> Variant:
        def generate(ids, new_tokens, clock):  # type: ignore[no-untyped-def]
            order.append((name, ids.shape[1]))
            return ids

        return Variant(name, generate)

    tokenizer = tiny_tokenizer()
    ids = [encode(tokenizer, text) for text in ("a", "bb", "ccc")]
    measure([variant("x"), variant("y")], ids, 4)
    assert order == [("x", 3), ("y", 3), ("x", 1), ("y", 1), ("y", 2), ("x", 2), ("x", 3), ("y", 3)]


def test_compare_on_a_tiny_model() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    prompts = [NamedPrompt("a", "one", "abcabcabcabc"), NamedPrompt("b", "two", "hello, hello, hello")]
    ids = [encode(tokenizer, prompt.text) for prompt in prompts]
    with wrap(model, "ngram", tiers=(0, 3), max_len=max_len_for(ids, 12), backend="eager", prefix_reuse=False) as spec:
        variants = make_variants(model, spec, parse_variants("lookup,ours"))
        calls: list[int] = []
        result = compare(model, variants, prompts, ids, 12, lambda: calls.append(1))
    names = [TRANSFORMERS, LOOKUP, tier_name(0), tier_name(3)]
    assert [row["variant"] for row in result.rows()] == names
    assert len(calls) == len(names) * 3
    rows = {row["variant"]: row for row in result.rows()}
    for row in rows.values():
        assert row["same_tokens"], row
        assert row["tokens_per_second"] > 0
        assert row["decode_tokens_per_second"] > row["tokens_per_second"] * 0.5
    assert rows[TRANSFORMERS]["ratio"] == 1.0
    assert rows[TRANSFORMERS]["acceptance_length"] == rows[tier_name(0)]["acceptance_length"] == 1.0
    assert rows[tier_name(3)]["acceptance_length"] >= 1.0
    report = json.loads(json.dumps(result.as_json()))
    assert len(report["runs"]) == len(names) * 2
    assert {run["new_tokens"] for run in report["runs"]} == {12}
    assert runs_table(result).row_count == len(names)
    assert categories_table(result).row_count == 2


def test_a_different_text_is_explained() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = [encode(tokenizer, "abc")]
    reference = make_variants(model, None, [])[0]  # type: ignore[arg-type]

    def wrong(prompt, new_tokens, clock):  # type: ignore[no-untyped-def]
        result = reference.generate(prompt, new_tokens, clock).clone()
        result[0, prompt.shape[1] + 2] = (result[0, prompt.shape[1] + 2] + 1) % 256
        return result

    result = compare(model, [reference, Variant("wrong", wrong)], [NamedPrompt("a", "one", "abc")], ids, 6)
    (row,) = [row for row in result.rows() if row["variant"] == "wrong"]
    assert not row["same_tokens"]
    (difference,) = result.differences["wrong"]
    assert difference.position == 2
    assert difference.logit_change == row["largest_logit_change"] > 1e-3


def test_unknown_variant() -> None:
    with raises(InvalidOption, name="--variants", reason=re.compile("static, lookup, ours")):
        parse_variants("ours,fast")


def test_clock_counts_passes_behind_the_prompt() -> None:
    model = tiny_model()
    clock = TokenTimer()
    ids = encode(tiny_tokenizer(), "abc")
    make_variants(model, None, [])[0].generate(ids, 5, clock)  # type: ignore[arg-type]
    assert (clock.passes, clock.emitted) == (4, 4)
    assert 0 < clock.first_seconds < clock.seconds


def drawn(modes: list[str]) -> int:
    """The exit code of the benchmark of drawn texts on a tiny model."""
    with pytest.raises(typer.Exit) as ended:
        sampled_exactness.main(model="tiny", count=3, new_tokens=12, mode=modes, tiers="0,2", backend="eager")
    return ended.value.exit_code


def test_sampled_exactness(capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn(["ngram", "early_exit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 requests, 36 tokens of plain decoding"
    runs = ["K=0, together", "K=2, together", "K at random, together", "K at random, alone"]
    printed = [line.partition(": ") for line in lines[1:]]
    assert [what for what, _, _ in printed] == [f"{mode}, {run}" for mode in ("ngram", "early_exit") for run in runs]
    assert all(figures.startswith("3 of 3 texts equal, acceptance length ") for _, _, figures in printed)
    assert printed[0][2].endswith(" 1.00") and not printed[5][2].endswith(" 1.00"), (
        "early exit drafts something that stays"
    )


def test_a_drawn_text_that_differs_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = sampled_exactness.texts

    def wrong(spec, policy, asked, *, alone):  # type: ignore[no-untyped-def]
        got = texts(spec, policy, asked, alone=alone)
        got[1][-1] += policy == Fixed(2)
        return got

    monkeypatch.setattr(sampled_exactness, "texts", wrong)
    assert drawn(["none"]) == 1
    out = capsys.readouterr().out
    assert "none, K=2, together: 2 of 3 texts equal" in out and "none, K=0, together: 3 of 3 texts equal" in out


def test_cpu_name(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 1 GHz\n")
    assert cpu_name(path) == "Some CPU @ 1 GHz"
    assert isinstance(cpu_name(tmp_path / "missing"), str)


def test_isolated_build(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--tiers", "0,1", "--max-len", "64", "--backend", "eager"]
    result = isolated.run(isolated.SPECULATOR, "tiny", arguments, {})
    assert result["seconds"] > 0
    assert result["peak_rss_bytes"] > 10 * 2**20
    monkeypatch.setattr(isolated, "COMMAND", ["-c", "import sys; sys.exit('it went wrong')"])
    with pytest.raises(RuntimeError, match="it went wrong"):
        isolated.run(isolated.SPECULATOR, "tiny", arguments, {})
