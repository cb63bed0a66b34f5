"""The load of short and long prompts: it runs, and what it would not pass."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from benchmarks import first_token
from benchmarks.first_token import ALONE, BESIDE, Answer, Run, ratio
from speccompile.cli.models import tiny_model, tiny_tokenizer


def run(**options: Any) -> int:
    with pytest.raises(typer.Exit) as caught:
        first_token.main(quick=True, **{"most": 1000.0, **options})
    return caught.value.exit_code


def test_a_quick_load(capsys: pytest.CaptureFixture[str]) -> None:
    code = run()
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    assert BESIDE in shown.out and ALONE in shown.out and "wrong texts" in shown.out


def test_the_ratio_is_that_of_short_prompts_at_p95() -> None:
    def of(name: str, *short: float) -> Run:
        answers = [Answer("a", False, False, seconds) for seconds in short]
        return Run(name, [*answers, Answer("b", True, False, 100.0), Answer("c", False, True)], [])

    assert ratio([of(BESIDE, 1.0, 6.0), of(ALONE, 1.0, 2.0)]) == 3.0


def test_a_wrong_text_is_found_and_a_client_that_left_has_a_beginning() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def wrong(left: bool, change: Any) -> list[str]:
        ids = list(tokenizer("the old mill")["input_ids"])
        (tokens,) = first_token._generate(model, [ids], 6)
        text = str(tokenizer.decode(tokens))
        return first_token.wrong_texts(model, tokenizer, [Answer("the old mill", False, left, 0.1, change(text))], 6)

    assert not wrong(False, lambda text: text) and not wrong(True, lambda text: text[:2])
    assert wrong(False, lambda text: text[:2]) or wrong(False, lambda text: text + "x")
    assert wrong(True, lambda text: "x" + text)
