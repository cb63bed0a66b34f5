"""Which bodies are compiled again: by what they compute and by the code that compiles them; and compilers that fail."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import speccompile
from speccompile.errors import LoweringError
from speccompile.graph.body import Body
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering import artifacts, compiled_bodies, inductor
from speccompile.lowering.backends import Inductor
from speccompile.lowering.compiled_bodies import CompiledBodies
from speccompile.utils import sources
from speccompile.utils.storage import CacheFolder, PackageStorage
from support.errors import raises
from support.tiny import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture
def nothing_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)


@dataclass
class Artifact:
    """What a stub compiler leaves; its source is ``source_code``."""

    source_code: str

    def is_saveable(self) -> bool:
        return False


@pytest.fixture
def stub(nothing_stored: None, monkeypatch: pytest.MonkeyPatch) -> list[Body]:
    """Nothing is stored yet, and a compiler only counts."""
    compiled: list[Body] = []

    def compile_body(body: Body, device: torch.device) -> Artifact:
        compiled.append(body)
        return Artifact("compiled here")

    monkeypatch.setattr(compiled_bodies, "compile_body", compile_body)
    monkeypatch.setattr(compiled_bodies, "read_artifact", lambda name, data: Artifact(data.decode()))
    monkeypatch.setattr(compiled_bodies, "compiled_function", lambda artifact: (list, artifact.source_code))
    return compiled


def outlined(max_len: int = 16, **config: Any) -> StepGraph:
    model = tiny_llama(**config)
    return speccompile.wrap(model, "none", tiers=(0,), max_len=max_len, backend="eager").stages["outline"].graph


def test_another_function_is_another_artifact(stub: list[Body]) -> None:
    graph, bodies = outlined(), CompiledBodies(CacheFolder())
    first = bodies.functions(graph)
    assert bodies.functions(graph.copy()) == first
    assert bodies.functions(outlined(seed=4, layers=1)) == first
    # The arena's sizes are symbolic too.
    assert bodies.functions(outlined(max_len=20)) == first
    assert len(stub) == 1
    others = [outlined(layers=1, rms_norm_eps=1e-5), outlined(layers=1, dtype=torch.bfloat16)]
    for count, other in enumerate(others, start=2):
        bodies.functions(other)
        assert len(stub) == count


def test_a_wrap_sees_the_files_of_its_own_package_alone(stub: list[Body]) -> None:
    graph = outlined()
    name = artifacts.artifact_name(graph.bodies["decoder_layer"], CPU)
    backend, packages = Inductor("a test"), [PackageStorage({name: data}) for data in (b"first", b"second")]
    first, second, without = [backend.with_storage(storage) for storage in (*packages, CacheFolder())]
    for _ in range(2):
        for each, source in ((first, "first"), (second, "second"), (without, "compiled here")):
            each.bodies.functions(graph)
            assert each.compiled_code(graph) == {"decoder_layer": source}
    assert len(stub) == 1


def test_code_that_compiles_bodies_is_in_their_names_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    digests = []
    for package in ("", "cli", "runtime", *artifacts.PACKAGES):
        Path(tmp_path, package).mkdir(exist_ok=True)
        Path(tmp_path, package, "file.py").write_text("edited")
        digests.append(sources.sources.__wrapped__(*artifacts.PACKAGES))
    assert len(set(digests[:3])) == 1 and len(set(digests)) == 1 + len(artifacts.PACKAGES)


def test_a_failing_compiler_is_reported_and_not_remembered(
    nothing_stored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no such instruction")

    graph = outlined()
    monkeypatch.setattr(inductor, "standalone_compile", broken)
    for _ in range(2):
        with raises(LoweringError, body="decoder_layer", reason="RuntimeError: no such instruction"):
            CompiledBodies(CacheFolder()).functions(graph)
    with raises(LoweringError, reason="RuntimeError: no such instruction"):
        speccompile.wrap(tiny_llama(), "none", tiers=(0, 1, 3), max_batch=2, max_len=36, backend="inductor")


def test_example_sizes_are_no_size_of_the_body() -> None:
    # Head dim and widths right where the first sizes would be taken.
    body = outlined(heads=2, kv_heads=1, hidden=24, intermediate_size=13).bodies["decoder_layer"]
    fixed = {size for dims in body.dims for size in dims if isinstance(size, int)}
    assert {12, 13} <= fixed
    sizes = inductor._example_sizes(body)
    assert {size for dims in body.dims for size in dims if isinstance(size, str)} <= set(sizes)
    assert len(set(sizes.values())) == len(sizes) and not fixed & set(sizes.values())


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_body_is_made_again_in_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replaced: bool, stored: bool
) -> None:
    """A folder that cannot be written: loading a stored artifact also writes into it."""
    outcomes = [LoweringError("No space left on device"), SimpleNamespace(is_saveable=lambda: False)]

    def make(*_: object) -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(compiled_bodies, "read_artifact" if stored else "compile_body", make)
    monkeypatch.setattr(compiled_bodies, "replace_inductor_folder_after", lambda failure: replaced)
    monkeypatch.setattr(compiled_bodies, "artifact_name", lambda body, device: "compiled/x.bin")
    monkeypatch.setattr(compiled_bodies, "compiled_function", lambda artifact: (artifact, "code"))
    monkeypatch.setattr(compiled_bodies, "_direct", lambda compiled, body: compiled)
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    body: Any = SimpleNamespace(name="layer", layers=())
    if stored:
        CacheFolder().write("compiled/x.bin", b"data")
    with contextlib.nullcontext() if replaced else pytest.raises(LoweringError):
        assert CompiledBodies(CacheFolder())._load(body, CPU).code == "code"
    assert len(outcomes) == (0 if replaced else 1)


def test_the_folder_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifacts.CompiledArtifact, "load", load)
    with pytest.raises(LoweringError, match=f"Set TORCHINDUCTOR_CACHE_DIR .* {inductor.inductor_cache_dir()} cannot"):
        artifacts.read_artifact("compiled/x.bin", b"data")
