"""The folders of the package import one another in one direction, as ``docs/architecture.md`` draws it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "speccompile"

#: Each folder and those that it may import. Every folder may import ``errors``, and all but that one ``utils``.
ALLOWED = {
    "errors": "",
    "utils": "",
    "quantized": "",
    "ops": "quantized",
    "graph": "ops",
    "guides": "",
    "sampling": "graph ops guides",
    "graph_capture": "graph ops",
    "adapters": "graph ops graph_capture",
    "multimodal": "graph ops graph_capture",
    "passes": "graph ops sampling graph_capture adapters multimodal",
    "hidden_states": "graph ops graph_capture passes",
    "calibration": "graph_capture hidden_states",
    "acceptance": "graph ops graph_capture passes",
    "policies": "",
    "pretrained": "quantized ops",
    "modes": "quantized graph ops sampling graph_capture passes hidden_states pretrained",
    "heads": "modes passes",
    "backends": "lowering",
    "lowering": "graph ops sampling graph_capture",
    "ranks": "graph ops lowering",
    "runtime": (
        "ranks graph ops sampling graph_capture adapters multimodal hidden_states acceptance policies modes lowering"
    ),
    "compiler": (
        "quantized graph ops sampling graph_capture adapters multimodal passes hidden_states calibration acceptance "
        "policies modes lowering ranks runtime"
    ),
    "report": "graph ops sampling graph_capture adapters passes policies lowering runtime compiler",
    "speculator": (
        "graph ops sampling graph_capture adapters multimodal passes hidden_states policies modes lowering runtime "
        "compiler report"
    ),
    "wrapping": (
        "quantized ops sampling passes graph_capture adapters hidden_states calibration acceptance modes lowering "
        "ranks runtime compiler speculator"
    ),
    "traces": "graph passes modes policies runtime",
    "quantization": "ops graph_capture calibration quantized modes compiler",
    "__init__": (
        "backends graph passes sampling lowering guides adapters calibration acceptance hidden_states policies "
        "pretrained quantized modes heads speculator wrapping quantization training traces"
    ),
    "tools": "__init__ graph_capture policies modes runtime",
    "bench": "__init__ graph policies modes runtime report traces",
    "training": "graph_capture sampling hidden_states policies modes heads runtime speculator wrapping",
    "serve": "__init__ graph guides modes multimodal runtime speculator",
    "cli": (
        "__init__ ops graph adapters hidden_states calibration policies pretrained quantized modes lowering runtime "
        "compiler report speculator serve tools traces bench training"
    ),
    "__main__": "cli",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports_of(path: Path, modules: frozenset[str]) -> list[tuple[int, str]]:
    """Lines and modules of this package that a file imports, inside of functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = [ROOT.name, *path.relative_to(ROOT).parent.parts]
                base = ".".join(filter(None, [*parents[: len(parents) - node.level + 1], base]))
            if base.partition(".")[0] != ROOT.name:
                continue
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.append((node.lineno, whole if whole in modules else base))
        elif isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names if a.name.partition(".")[0] == ROOT.name]
    return found


def test_no_folder_imports_one_above_it() -> None:
    files = {module_of(path): path for path in ROOT.rglob("*.py")}
    modules = frozenset(files)
    wrong = []
    for module, path in files.items():
        own = folder_of(module)
        allowed = {own, *({"errors"} if own == "errors" else {"errors", "utils"}), *ALLOWED[own].split()}
        wrong += [
            f"{path.relative_to(ROOT.parent)}:{line}: {own} imports {imported}"
            for line, imported in imports_of(path, modules)
            if folder_of(imported) not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_the_allowed_directions_have_no_circle() -> None:
    folders = {own: {"errors", "utils", *above.split()} - {own} for own, above in ALLOWED.items()}
    folders["utils"] = {"errors"}
    folders["errors"] = set()
    assert set(TopologicalSorter(folders).static_order()) == set(ALLOWED)


def test_no_two_folders_of_a_folder_import_each_other() -> None:
    """A folder's own files may import its folders, and be imported by them: a registry its modes, a mode its base."""
    files = {module_of(path): path for path in ROOT.rglob("*.py")}
    modules = frozenset(files)
    folder = {module: str(path.parent.relative_to(ROOT)) for module, path in files.items()}
    arrows = {
        (folder[module], folder[imported])
        for module, path in files.items()
        for _, imported in imports_of(path, modules)
        if imported in modules
    }
    both = {(own, other) for own, other in arrows if own < other and (other, own) in arrows}
    assert not [(own, other) for own, other in both if Path(own).parent == Path(other).parent != Path(".")]


def test_the_architecture_page_lists_packages_in_that_order() -> None:
    """It states that a package imports packages above it in the table."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    folders = [name for row in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", row) if name in ALLOWED]
    assert len(folders) > 20
    for own in folders:
        below = [name for name in ALLOWED[own].split() if name in folders and folders.index(name) > folders.index(own)]
        assert not below, (own, below)


@pytest.mark.parametrize(
    "line",
    [
        "import speccompile.cli",
        "from speccompile import cli",
        "from speccompile.cli import app",
        "from .. import cli",
        "from ..cli import app",
    ],
)
def test_every_form_of_an_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path / "speccompile")
    file = tmp_path / "speccompile" / "ops" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def late():\n    {line}\n")
    seen = imports_of(file, frozenset({"speccompile", "speccompile.cli"}))
    assert [(number, folder_of(name)) for number, name in seen] == [(2, "cli")]


def test_every_folder_is_in_the_table() -> None:
    folders = {path.name if path.is_dir() else path.stem for path in ROOT.iterdir() if path.suffix in ("", ".py")}
    assert folders - {"__pycache__"} == set(ALLOWED)


def test_what_runs_over_other_versions_imports_no_extra() -> None:
    """``make test-versions`` installs no extra, so a test there that imports the server or guides fails."""
    tests = ROOT.parent / "tests"
    listed = re.search(r"VERSION_TESTS := (.*?)\nPAIR", (ROOT.parent / "Makefile").read_text(), re.DOTALL)
    assert listed
    paths = [ROOT.parent / name.strip('"').partition("::")[0] for name in listed[1].split() if name != "\\"]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    assert files and all(path.exists() for path in paths)
    wrong = [
        f"{file.relative_to(tests)}:{line}: {imported}"
        for file in files
        for line, imported in imports_of(file, frozenset())
        if imported.startswith(("speccompile.serve", "speccompile.guides.regex", "speccompile.guides.json"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_pass_that_inserts_an_op_defines_it() -> None:
    """A command may import less than a test does."""
    program = [sys.executable, "-m", "support.undefined_ops", "passes"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT.parent), str(ROOT.parent / "tests")])}
    run = subprocess.run(program, cwd=ROOT.parent, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
