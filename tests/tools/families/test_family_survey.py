"""``speccompile families``, and its survey."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

from speccompile import Speculator, wrap
from speccompile.cli import app
from speccompile.errors import CannotBeTiny, InvalidInput, UnknownFamily, UnsupportedModel
from speccompile.runtime.stats import Stats
from speccompile.tools.families import causal_lm_families, find_families, tiny_model
from speccompile.tools.families.survey import NEW_TOKENS, PERIODS, ROWS, TIERS, FamilyRow, RandomTier, Verdict, survey
from speccompile.utils.progress import listening
from support.errors import raises

NAMES = ["llama", "bloom", "rwkv", "recurrent_gemma", "gemma4_assistant"]
VERDICTS = [Verdict.EXACT, Verdict.EXACT, Verdict.REFUSED, Verdict.REFUSED, Verdict.NOT_MADE]

survey_module = importlib.import_module("speccompile.tools.families.survey")
command_module = importlib.import_module("speccompile.cli.families")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["families", *arguments], catch_exceptions=False)


def surveyed(name: str = "llama") -> FamilyRow:
    return survey(find_families([name])[0])


def reason_column(output: str, family: str) -> str:
    """The last column of a family's row, its lines joined and without spaces."""
    lines = output.splitlines()
    at = next(line.index("reason") for line in lines if line.startswith("family"))
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{family} "))
    own = [lines[first], *lines[first + 1 :]]
    end = next((i for i, line in enumerate(own[1:], 1) if line[:16].strip()), len(own))
    return "".join("".join(line[at:] for line in own[:end]).split())


# --- the command -------------------------------------------------------------------------------


@dataclass
class Called:
    result: Result
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Called:
    path = tmp_path_factory.mktemp("families") / "rows.json"
    result = call(*NAMES, "--json", str(path))
    return Called(result, json.loads(path.read_text()))


def test_the_rows_say_what_became_of_each(called: Called) -> None:
    rows = called.rows
    assert [row["family"] for row in rows] == NAMES
    assert [row["verdict"] for row in rows] == VERDICTS
    assert [row["route"] for row in rows] == ["attention", "eager", None, None, None]
    assert [row["error"] for row in rows] == [None, None, "UnsupportedModel", "UnsupportedModel", "CannotBeTiny"]
    assert rows[0]["model_class"] == "LlamaForCausalLM"
    assert rows[0]["reason"] == ""
    assert "BloomAttention" in rows[1]["reason"]


def test_exact_rows_speculate_behind_a_periodic_prompt(called: Called) -> None:
    assert all(1.1 <= row["acceptance_length"] <= max(TIERS) + 1 for row in called.rows[:2])
    assert all(row["acceptance_length"] is None for row in called.rows[2:])


def test_reasons_are_whole(called: Called) -> None:
    refused, not_made = called.rows[2], called.rows[4]
    with pytest.raises(UnsupportedModel) as refusal:
        wrap(tiny_model(find_families(["rwkv"])[0]), max_len=64)
    with pytest.raises(CannotBeTiny) as failure:
        tiny_model(find_families(["gemma4_assistant"])[0])
    assert refused["reason"] == str(refusal.value)
    assert not_made["reason"] == str(failure.value)
    shown = called.result.stdout
    for error, family in ((refusal.value, "rwkv"), (failure.value, "gemma4_assistant")):
        assert reason_column(shown, family) == "".join(f"{error.fields['reason']}.".split())


def test_the_table_fits_into_a_file(called: Called) -> None:
    assert called.result.exit_code == 0
    lines = called.result.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert transformers.__version__ in lines[0]
    llama = next(line for line in lines if line.startswith("llama")).split()
    assert llama[1:4] == ["LlamaForCausalLM", "attention", "exact"]
    assert llama[4] == f"{called.rows[0]['acceptance_length']:.2f}"
    assert lines[-1].startswith("5 families in ")
    assert lines[-1].endswith(": 2 exact, 2 refused, 1 not made, 0 wrong, 0 broken")


def test_progress_goes_to_stderr_and_nothing_else_does(called: Called) -> None:
    lines = called.result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == NAMES
    assert lines[0].startswith("llama: exact, acceptance length ")


def fake(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, reason: str = "because") -> None:
    def row(family: Any, backend: str, device: torch.device) -> FamilyRow:
        ended = Verdict.EXACT if family.name == "llama" else verdict
        return FamilyRow(family.name, family.model_class.__name__, ended, reason=reason, seconds=1.0)

    monkeypatch.setattr(command_module, "survey", row)


@pytest.mark.parametrize(
    ("verdict", "code"), [("exact", 0), ("refused", 0), ("not made", 0), ("wrong", 1), ("broken", 1)]
)
def test_exit_code_is_one_for_wrong_and_broken_families(
    monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    fake(monkeypatch, Verdict(verdict))
    result = call("llama", "gemma2", "--only", "exact")
    assert result.exit_code == code
    assert ("gemma2" in result.stdout) == (verdict == "exact")
    assert f"{2 if verdict == 'exact' else 1} {verdict}" in result.stdout.splitlines()[-1]


def test_all_families_without_a_name_and_each_once_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, Verdict.REFUSED)
    path = tmp_path / "rows.json"
    assert call("--json", str(path)).exit_code == 0
    assert [row["family"] for row in json.loads(path.read_text())] == [family.name for family in causal_lm_families()]
    assert call("llama", "llama").stdout.splitlines()[-1].startswith("1 family in 1 s: 1 exact")


def test_what_looks_like_markup_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, Verdict.REFUSED, reason="sizes [rows, width] of [/other]")
    assert reason_column(call("gemma2").stdout, "gemma2") == "sizes[rows,width]of[/other]"


def test_rows_so_far_outlive_an_interruption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, Verdict.REFUSED)
    first = command_module.survey

    def row(family: Any, backend: str, device: torch.device) -> FamilyRow:
        if family.name == "gemma2":
            raise KeyboardInterrupt
        result: FamilyRow = first(family, backend, device)
        return result

    monkeypatch.setattr(command_module, "survey", row)
    path = tmp_path / "rows.json"
    assert call("llama", "gemma2", "--json", str(path)).exit_code != 0
    assert [row["family"] for row in json.loads(path.read_text())] == ["llama"]


def test_captures_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    seen: list[Path] = []

    def row(family: Any, backend: str, device: torch.device) -> FamilyRow:
        seen.append(Path(os.environ["SPECCOMPILE_CACHE"]))
        assert seen[-1].is_dir()
        return FamilyRow(family.name, "", Verdict.EXACT)

    monkeypatch.setattr(command_module, "survey", row)
    assert call("llama").exit_code == 0
    assert seen[0] != tmp_path
    assert not seen[0].exists()
    assert os.environ["SPECCOMPILE_CACHE"] == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama", "llama", "GPT-NeoX"], "no causal-LM family 'lama', 'GPT-NeoX'. Close: llama, "),
        (["telepathy"], "A family is named by the model_type of its config."),
        (["llama", "--backend", "magic"], "unknown backend 'magic'"),
        (["llama", "--json", "no/such/folder/rows.json"], "there is no folder 'no/such/folder'; create it"),
    ],
)
def test_it_refuses_in_one_line_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(command_module, "survey", None)
    result = call(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_close_names_are_those_of_families() -> None:
    with raises(UnknownFamily, names="'GPT-NeoX'", advice=re.compile(r"gpt_neox.* \(for GPT-NeoX\)")):
        find_families(["GPT-NeoX"])


def test_families_by_name_are_those_of_the_list() -> None:
    """Found by name, they are imported alone."""
    for family in causal_lm_families():
        assert find_families([family.name]) == [family]


def test_every_causal_lm_class_is_listed() -> None:
    listed = {family.model_class.__name__ for family in causal_lm_families()}
    public = {name for name in dir(transformers) if name.endswith("ForCausalLM")} - {"AutoModelForCausalLM"}
    assert public <= listed
    assert {"GPT2LMHeadModel", "Mistral4ForCausalLM"} <= listed


# --- the survey --------------------------------------------------------------------------------


@pytest.fixture
def new_tokens(monkeypatch: pytest.MonkeyPatch) -> int:
    """Texts too short to outgrow windows, for tests of what is made of them; those of the command are whole."""
    assert NEW_TOKENS > 12
    monkeypatch.setattr(survey_module, "NEW_TOKENS", 12)
    return 12


class Generating:
    """Stands in for ``Speculator.generate``, counts its calls and changes a token of one row in one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, new_tokens: int, tampered: int = -1) -> None:
        self.rows: list[int] = []
        self.new_tokens, self.tampered = new_tokens, tampered
        self._generate = Speculator.generate
        monkeypatch.setattr(Speculator, "generate", lambda spec, *given, **named: self(spec, *given, **named))

    def __call__(self, spec: Speculator, ids: torch.Tensor, mask: torch.Tensor, **named: Any) -> torch.Tensor:
        texts = self._generate(spec, ids, mask, **named)
        if len(self.rows) == self.tampered:
            texts[-1, ids.shape[1] + 7] = (texts[-1, ids.shape[1] + 7] + 1) % 100
        self.rows.append(len(ids))
        assert texts.shape[1] == ids.shape[1] + self.new_tokens
        return texts


def test_batches_are_ragged_and_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    generating = Generating(monkeypatch, NEW_TOKENS)
    assert surveyed().verdict == "exact"
    assert generating.rows == [*range(1, ROWS + 1), 1]


@pytest.mark.parametrize(("tampered", "place"), [(2, "batch of 3 rows, prompt 2"), (4, "batch of 1 row, prompt 0")])
def test_another_text_is_wrong(monkeypatch: pytest.MonkeyPatch, new_tokens: int, tampered: int, place: str) -> None:
    Generating(monkeypatch, new_tokens, tampered)
    row = surveyed()
    assert row.verdict == "wrong"
    assert row.route == "attention"
    assert row.acceptance_length is None
    assert f"not the text of transformers: in a {place}: new token 7 is " in row.reason
    assert "explained by a logit change of" in row.reason


def failing(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_an_error_of_somebody_elses_is_broken_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.compiler.plan.inspect_model", failing(KeyError("head_dim")))
    row = surveyed()
    assert (row.verdict, row.error) == ("broken", "KeyError")
    assert row.reason.startswith("KeyError: 'head_dim' (speccompile/compiler/plan.py:")


@pytest.mark.usefixtures("new_tokens")
def test_a_refusal_after_wrap_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculator, "generate", failing(InvalidInput(name="input_ids", reason="it is late")))
    row = surveyed()
    assert (row.verdict, row.error) == ("broken", "InvalidInput")
    assert row.reason.startswith(
        "InvalidInput: input_ids is not valid: it is late (speccompile/tools/families/survey.py:"
    )


def test_without_transformers_text_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "transformers_greedy", failing(TypeError("no cache")))
    row = surveyed()
    assert (row.verdict, row.error) == ("not made", "TypeError")
    assert row.reason == "transformers' own generate fails on the tiny model: TypeError: no cache."


@pytest.mark.usefixtures("new_tokens")
def test_the_speculator_is_closed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Speculator] = []
    monkeypatch.setattr(Speculator, "close", lambda spec: closed.append(spec))
    monkeypatch.setattr(Speculator, "generate", failing(KeyError()))
    assert surveyed().error == "KeyError"
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("lengths", "best"), [([1.0, 1.05, 1.5, 2.0], 1.5), ([1.0] * 6, 1.0), ([1.05, *[1.0] * 5], 1.05)]
)
def test_other_patterns_are_tried_until_drafts_are_accepted(
    monkeypatch: pytest.MonkeyPatch, new_tokens: int, lengths: list[float], best: float
) -> None:
    generating = Generating(monkeypatch, new_tokens)
    # The first are those of the ragged batches.
    monkeypatch.setattr(Stats, "acceptance_length", property(lambda _: lengths[len(generating.rows) - 1 - ROWS]))
    row = surveyed()
    assert row.verdict == "exact"
    assert row.acceptance_length == best
    assert len(generating.rows) - ROWS == (3 if best == 1.5 else len(PERIODS))
    assert row.reason == ("no draft was accepted after 6 periodic prompts" if best == 1.0 else "")


def test_any_tier_may_come_next() -> None:
    policy = RandomTier()
    pairs = [(policy.choose(1), policy.choose(1)) for _ in range(100)]
    assert len(set(pairs)) == len(TIERS) ** 2


@pytest.mark.usefixtures("new_tokens")
def test_it_is_quiet_and_leaves_logging_as_it_was(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy(model: Any, *_: object) -> list[int]:
        print("a warning that is printed")
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("transformers").error("an error")
        return []

    monkeypatch.setattr(survey_module, "transformers_greedy", noisy)
    # On a busy machine a capture is slow work, which is shown where nothing listens.
    with listening(lambda *_: None):
        assert surveyed("bloom").verdict == "wrong"
        surveyed("dbrx")
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == logging.NOTSET
