"""The command line before a model is loaded: help, version and errors need neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import speccompile
from speccompile import modes, pretrained
from speccompile.cli import arguments, tool_commands
from speccompile.errors import PretrainedError, UnknownFamily
from speccompile.lowering.backends import BACKENDS
from speccompile.modes.registry import BUILT_IN
from speccompile.tools.families import causal_lm_families
from speccompile.tools.families.survey import Verdict
from speccompile.utils.mode_names import CLASSES
from speccompile.utils.model_names import check_families, check_tokenizer
from support.errors import raises

#: Runs commands by their arguments, each in a fork of a process that has imported the command line and nothing else.
PROGRAM = """
import json, os, sys
from speccompile.cli import app

for number, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream.fileno())
        try:
            app(arguments, prog_name="speccompile")
        finally:
            print("heavy", sorted({"torch", "transformers", "tokenizers"} & sys.modules.keys()))
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True)
class Run:
    code: int
    stdout: str
    stderr: str


def run(commands: list[list[str]], folder: Path) -> list[Run]:
    """What each command returned and printed; ``folder`` is where they run."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=True)
    return [
        Run(int(code), *((folder / f"{number}.{name}").read_text() for name in ("stdout", "stderr")))
        for number, code in enumerate(done.stdout.split())
    ]


COMMANDS = [
    "demo",
    "generate",
    "inspect",
    "bench",
    "bench-report",
    "bench-replay",
    "families",
    "policy-lab",
    "calibrate",
    "measure-weights",
    "save-hidden-states",
    "make-texts",
    "train-head",
]
ERRORS = [
    (["generate", "tiny"], "--prompt"),
    (["generate", "tiny", "--prompt", "a", "--mode", "telepathy"], "unknown mode 'telepathy'"),
    (["generate", "tiny", "--prompt", "a", "--policy", "fast", "--tiers", "0,1"], "'fast' is not the name of a policy"),
    (["generate", "tiny", "--prompt", "a", "--backend", "magic"], "unknown backend 'magic'"),
    (["generate", "tiny", "--prompt", "a", "--policy", "fast"], "'fast' is not the name of a policy"),
    (
        ["generate", "tiny", "--prompt", "a", "--device", "tpu"],
        "device 'tpu' cannot be used: speccompile has no kernels",
    ),
    (["calibrate", "tiny", "--texts", ".", "--output", "x", "--device", "gpu"], "it is not the name of a device"),
    (["generate", "tiny", "--prompt", "a", "--top-p", "3"], "Invalid value for '--top-p'"),
    (["generate", "tiny", "--prompt", "a", "--top-p", "0"], "--top-p=0 is not valid: it must be above 0"),
    (["generate", "tiny", "--prompt", "a", "--weights", "int3"], "choose from same, int8, int4, stored"),
    (["generate", "tiny", "--prompt", "a", "--mode", "suffix+telepathy"], "unknown mode 'telepathy'"),
    (["inspect", "tiny", "--html", "nowhere/report.html"], "there is no folder 'nowhere'; create it"),
    (["calibrate", "tiny", "--texts", ".", "--output", "nowhere/x"], "there is no folder 'nowhere'; create it"),
    (["bench", "tiny", "--html", "nowhere/page.html"], "there is no folder 'nowhere'; create it"),
    (["bench-replay", "0.stdout", "--method", "telepathy"], "unknown mode 'telepathy'"),
    (["bench", "tiny", "--method", "telepathy"], "unknown mode 'telepathy'"),
    (["bench", "tiny", "--method", "ngram", "--method", "ngram"], "two methods have the name 'ngram'"),
    (["bench", "tiny", "--method", "none"], "a run always has the line K=0"),
    (["bench", "tiny", "--tiers", "0"], "no tier drafts; add a draft length"),
    (["bench", "tiny", "--policy", "fast"], "'fast' is not the name of a policy"),
    (["bench", "tiny", "--top-k", "3"], "temperature 0 does not; add --temperature, or leave out --top-k"),
    (["families", "llama", "--json", "nowhere/x"], "there is no folder 'nowhere'; create it"),
    (["make-texts", "tiny", "--output", "0.stdout"], "is a file"),
    (["demo", "--prompts", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
    (["save-hidden-states", "tiny", "--data", "nowhere.jsonl", "--output", "x"], "'nowhere.jsonl' does not exist"),
    (["make-texts", "tiny", "--output", "x", "--exclude", "nowhere.txt"], "there is no such file"),
    (["make-texts", "tiny", "--output", "x", "--top-p", "3"], "must be a number of at least 0 and at most 1"),
    (["train-head", "tiny", "--texts", "nowhere", "--output", "x"], "'nowhere' does not exist"),
    (["train-head", "tiny", "--texts", ".", "--output", "x", "--kind", "medusa"], "choose from eagle3"),
    (["generate", "tiny", "--prompt", ""], "prompt 0 is empty"),
    (["generate", "tiny", "--prompt", "a", "--greedy", "--top-k", "3"], "leave out --greedy or --top-k"),
    (["generate", "./nowhere", "--prompt", "a"], "no such folder: './nowhere'"),
    (["generate", "nowhere.gguf", "--prompt", "a"], "no such file: 'nowhere.gguf'"),
    (["demo", "--model", "/no/where"], "no such folder: '/no/where'"),
    (["inspect", "tiny", "--tiers", "1,3"], "0 is missing"),
    (["families", "lama", "llama"], "has no causal-LM family 'lama'. Close: llama"),
]


HELP = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Run]:
    """The commands of ``HELP`` and ``ERRORS``, by their arguments."""
    commands = [*HELP, *(arguments for arguments, _ in ERRORS)]
    return dict(zip(map(tuple, commands), run(commands, tmp_path_factory.mktemp("runs")), strict=True))


@pytest.mark.parametrize("arguments", HELP)
def test_help_and_version_import_no_torch(runs: dict[tuple[str, ...], Run], arguments: list[str]) -> None:
    done = runs[*arguments]
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy []"


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_errors_in_the_arguments_import_no_torch(
    runs: dict[tuple[str, ...], Run], arguments: list[str], message: str
) -> None:
    done = runs[*arguments]
    assert done.code == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "heavy []"


def test_a_folder_without_a_tokenizer_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    (done,) = run([["generate", str(tmp_path), "--prompt", "a"]], tmp_path)
    assert done.code == 2
    assert f"'{tmp_path}' has no tokenizer, and text needs one. Save the model's tokenizer" in done.stderr
    assert done.stdout.splitlines()[-1] == "heavy []"
    with raises(PretrainedError, source=str(tmp_path), reason="it has no tokenizer"):
        pretrained.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "spiece.model", "qwen.tiktoken"])
def test_a_folder_with_a_file_of_a_tokenizer_is_not_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).touch()
    check_tokenizer(str(tmp_path))


def test_no_family_that_exists_is_refused_by_name() -> None:
    check_families([family.name for family in causal_lm_families()])
    with raises(UnknownFamily, names="'nosuch'"):
        check_families(["llama", "nosuch"])


def test_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "speccompile", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"speccompile {speccompile.__version__}\n"


def test_names_that_arguments_accept_are_those_that_exist() -> None:
    assert arguments.modes() == modes.available()
    assert [mode.name for mode in BUILT_IN] == list(CLASSES)
    assert sorted(arguments._BACKENDS) == sorted(["auto", *BACKENDS])
    verdicts = get_type_hints(tool_commands.families)["only"]
    assert set(get_args(get_args(verdicts)[0])) == set(Verdict)


PUBLIC = """
import sys, speccompile
assert "torch" not in sys.modules
names = sorted(speccompile.__all__)
assert set(names) <= set(dir(speccompile))
import speccompile.wrapping
for name in names:
    getattr(speccompile, name)
print(speccompile.wrap.__name__, speccompile.load.__name__, speccompile.register_mode.__name__)
try:
    speccompile.unwrap
except AttributeError as error:
    print(error)
"""


def test_public_names_are_imported_at_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", PUBLIC], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["wrap load register", "module 'speccompile' has no attribute 'unwrap'"]
