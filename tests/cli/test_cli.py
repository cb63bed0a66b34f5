"""The command line, on a tiny model."""

from __future__ import annotations

import io
import json
import re
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from transformers import TextStreamer

from speccompile import Speculator, wrap
from speccompile.cli.models import encode, tiny_model, tiny_tokenizer
from speccompile.cli.progress import count_runs, show_tasks
from speccompile.cli.session import announce_start, parse_options, parse_tiers, session
from speccompile.errors import InvalidOption, InvalidTiers, OutputTruncated, SpecCompileError
from speccompile.utils.progress import listener, task
from support.commands import QUICK, call
from support.errors import raises


def fails(*arguments: str) -> str:
    """The only line on stderr of a call that ends with code 2."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if not line.endswith("...")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    return lines[0]


def test_inspect_without_build_lowers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was lowered")

    for backend in ("Eager", "Inductor"):
        monkeypatch.setattr(f"speccompile.lowering.backends.{backend}.lower", refuse)
    result = call("inspect", "tiny", "--no-build", "--tiers", "0,3", "--max-len", "64")
    assert result.exit_code == 0
    for text in ("capture", "outline", "commit", "tier K=3", "prefill T=16", "1 x 4", "not lowered", "speccompile."):
        assert text in result.stdout, text


def test_inspect_shows_the_tiers_of_all_row_counts() -> None:
    result = call("inspect", "tiny", "--no-build", "--tiers", "0,3", "--max-len", "64", "--max-batch", "3")
    assert result.exit_code == 0
    shapes = re.findall(r"tier K=(\d), \d rows? +(\d) x (\d)", result.stdout)
    assert shapes == [(draft_len, rows, width) for draft_len, width in ("01", "34") for rows in "123"]


def test_inspect_shows_what_was_built() -> None:
    result = call("inspect", "tiny", *QUICK, "--max-len", "64", "--tier", "0", "--option", "max_ngram=2")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for part in (
        "last 2 to 1 tokens",
        "Kernels of K=0",
        "body, run op by op",
        "draft_tokens",
        "KV",
        "drafter",
        "Memory",
    ):
        assert part in text, part
    assert "breaks even at an acceptance length of" in text
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_inspect_bytes_are_those_of_the_arena() -> None:
    result = call("inspect", "tiny", "--no-build", "--tiers", "0", "--max-len", "64", "--mode", "none")
    # Keys of 2 layers, 2 slots, 65 places, 2 heads of 16 numbers, 4 bytes each; and as many values.
    size = f"{2 * 2 * 65 * 2 * 16 * 4:,}"
    assert len(re.findall(rf"float32\[2, 65, 2, 16\] +{size} *$", result.stdout, re.MULTILINE)) == 2


def test_inspect_shows_that_packed_weights_are_a_second_copy() -> None:
    linears = [module.weight for module in tiny_model().modules() if isinstance(module, torch.nn.Linear)]
    packed = sum(weight.nbytes for weight in linears)
    result = call("inspect", "tiny", "--no-build", "--tiers", "0", "--max-len", "64", "--mode", "none")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["packed", "copies", str(len(linears)), f"{packed:,}", f"{packed / 2**20:,.1f}"] in lines
    assert ["free_originals=True", "saves", f"{packed:,}", f"{packed / 2**20:,.1f}"] in lines


def test_inspect_prints_all_of_it_as_json() -> None:
    result = call("inspect", "tiny", *QUICK, "--max-len", "64", "--no-measure", "--json")
    data = json.loads(result.stdout)
    assert [tier["name"] for tier in data["tiers"]] == ["K=0", "K=3"]
    assert data["subject"]["explanation"]["mode"].startswith("ngram: ")


def test_inspect_writes_a_report(tmp_path: Path) -> None:
    prompts, path, trace = tmp_path / "prompts.jsonl", tmp_path / "report.html", tmp_path / "trace.jsonl"
    prompts.write_text(json.dumps({"prompt": "abcabcabc"}) + "\n")
    with wrap(tiny_model(), tiers=(0, 3), max_len=64, backend="eager") as spec, spec.record_trace(trace):
        spec.generate(torch.tensor([[1, 2, 3] * 4]), max_new_tokens=8)
    files = ["--html", str(path), "--prompts", str(prompts), "--new-tokens", "8", "--trace", str(trace)]
    result = call("inspect", "tiny", *QUICK, "--max-len", "64", *files)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"The report is {path}"
    text = path.read_text()
    assert text.startswith("<!doctype html>") and result.stdout.splitlines()[0] in text


@pytest.mark.parametrize("stage", ["capture", "outline", "commit"])
def test_inspect_stage_is_python_that_runs(stage: str) -> None:
    result = call("inspect", "tiny", "--stage", stage, "--tiers", "0,3", "--tier", "3", "--max-len", "64")
    assert result.exit_code == 0
    namespace: dict[str, object] = {"__name__": "printed"}
    exec(compile(result.stdout, "printed", "exec"), namespace)
    with torch.no_grad():
        namespace["step"](*namespace["make_inputs"]())  # type: ignore[operator]


def test_inspect_refuses() -> None:
    quick = ["--tiers", "0,3", "--max-len", "64"]
    assert "no stage 'nope'" in fails("inspect", "tiny", *quick, "--stage", "nope")
    assert "no tier with draft length 5" in fails("inspect", "tiny", *quick, "--tier", "5")
    assert "no such folder: 'no/such/folder'" in fails("inspect", "no/such/folder", *quick)


def test_generate_streams_and_counts() -> None:
    result = call("generate", "tiny", *QUICK, "--prompt", "abcabcabc", "--max-new-tokens", "12", "--max-len", "64")
    assert result.exit_code == 0
    last = result.stdout.splitlines()[-1]
    assert last.startswith("12 tokens in ")
    assert "tokens/s, acceptance length" in last


def test_generate_prints_text_before_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    monkeypatch.setattr(TextStreamer, "on_finalized_text", lambda *_, stream_end=False: shown.append(stream_end))
    result = call("generate", "tiny", *QUICK, "--prompt", "abcabcabc", "--max-new-tokens", "12", "--max-len", "64")
    assert result.exit_code == 0
    assert shown[:4] == [False] * 4 and shown[-1] is True


def test_generate_draws_as_its_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {}
    given: list[dict[str, object]] = []
    generate = Speculator.generate

    def noted(self: Speculator, *ids: torch.Tensor, **options: object) -> torch.Tensor:
        given.append(options)
        return generate(self, *ids, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(Speculator, "generate", noted)
    sampling = ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "40"]
    for seed in ("1", "2", "1"):
        result = call("generate", "tiny", *QUICK, "--prompt", "abc", "--max-len", "64", *sampling, "--seed", seed)
        assert result.exit_code == 0, result.stderr
        text = result.stdout.rpartition("\n")[0].rpartition("\n")[0]
        assert texts.setdefault(seed, text) == text
    assert texts["1"] != texts["2"]
    wanted = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 1, "do_sample": True}
    assert given[0].items() >= wanted.items()
    greedy = call("generate", "tiny", *QUICK, "--prompt", "abc", "--max-len", "64", "--temperature", "0")
    assert greedy.exit_code == 0, greedy.stderr
    assert given[-1].items() >= {"temperature": 0.0, "do_sample": True}.items()
    refused = call("generate", "tiny", *QUICK, "--prompt", "a", "--temperature", "-1")
    assert refused.exit_code == 2 and "Invalid value for '--temperature'" in refused.stderr


def test_generate_warns_when_the_text_is_cut() -> None:
    result = call("generate", "tiny", *QUICK, "--prompt", "abc", "--max-new-tokens", "60", "--max-len", "32")
    assert result.exit_code == 0
    assert "warning: rows [0] ended at max_len=32" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "telepathy"], "unknown mode 'telepathy'"),
        (["--option", "depth=3"], "does not accept depth"),
        (["--mode", "auto", "--option", "depth=3"], "does not accept depth. It accepts: head, draft, predictions"),
        (["--mode", "none", "--option", "depth=3"], "does not accept depth. It accepts: no options"),
        (["--option", "max_ngram"], "write it as name=value"),
        (["--option", "max_ngram=0"], "max_ngram=0 is not valid"),
        (["--tiers", "1,3"], "0 is missing"),
        (["--tiers", "0,x"], "'x' must be a draft length or a tree"),
        (["--tiers", "0,3,3"], "a draft length occurs twice"),
        (["--policy", "fast"], "'fast' is not the name of a policy"),
        (["--policy", "fixed:5"], "no tier with draft length 5"),
        (["--backend", "magic"], "unknown backend 'magic'"),
        (["--chat"], "the tokenizer has no chat template"),
        (["--prompt", ""], "prompt 0 is empty"),
    ],
)
def test_generate_refuses_in_one_line(arguments: list[str], message: str) -> None:
    assert message in fails("generate", "tiny", "--prompt", "abc", *arguments)


def test_tiny_tokenizer_is_bytes() -> None:
    tokenizer = tiny_tokenizer()
    text = "Grüße, <b>\n"
    ids = encode(tokenizer, text)
    assert ids.shape == (1, len(text.encode()))
    assert tokenizer.decode(ids[0]) == text


def test_tiers_and_options_are_parsed() -> None:
    assert parse_tiers("0, 1,3") == (0, 1, 3)
    assert parse_options(["a=1", "b=x", "c=[1, 2]", "d=a=b"]) == {"a": 1, "b": "x", "c": [1, 2], "d": "a=b"}
    with pytest.raises(InvalidTiers):
        parse_tiers("")
    with raises(InvalidTiers, tiers=(1, 2), reason="0 is missing"):
        parse_tiers("1,2")
    with pytest.raises(InvalidOption):
        parse_options(["=1"])


def test_session_shows_own_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    with session():
        warnings.warn("another library's", stacklevel=1)
        warnings.warn_explicit("ours,\nin two lines", OutputTruncated, "x.py", 1, module="speccompile.cli.generate")
    assert capsys.readouterr().err == "warning: ours, in two lines\n"


def test_a_command_that_begins_late_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("speccompile.cli.session.START_SECONDS", 0.05)
    end = announce_start()
    with session():
        time.sleep(0.2)
    end()
    assert capsys.readouterr().err == ""
    end = announce_start()
    time.sleep(0.2)
    end()
    assert "importing torch" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_work_without_a_listener_is_shown_later_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.utils.slow_progress._SLOW_SECONDS", 0.0)
    for stderr, seconds, shown in ((Terminal(), 9.0, True), (io.StringIO(), 9.0, False), (io.StringIO(), 0.0, True)):
        monkeypatch.setattr("speccompile.utils.slow_progress._SECONDS_IN_LOGS", seconds)
        monkeypatch.setattr(sys, "stderr", stderr)
        with task("capture the model"):
            time.sleep(0.1)
        assert ("capture the model" in stderr.getvalue()) is shown


def test_runs_are_announced_elsewhere_than_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("speccompile.utils.slow_progress._SLOW_SECONDS", 0.0)
    with count_runs("warm up", 3) as advance:
        time.sleep(0.1)
        advance()
    assert capsys.readouterr().err == "warm up ...\n"


def test_tasks_that_fail_leave_no_display(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("speccompile.utils.slow_progress._SLOW_SECONDS", 0.0)
    with pytest.raises(SpecCompileError), show_tasks(), task("think"):
        raise SpecCompileError("no")
    assert listener() is None
    assert "think" in capsys.readouterr().err


def test_inspect_needs_no_tokenizer(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    result = call("inspect", str(tmp_path), "--no-build", "--tiers", "0", "--mode", "none")
    assert result.exit_code == 0, result.output
