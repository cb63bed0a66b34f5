"""Packages: what was wrapped comes back without being made again, and nothing that does not fit is taken."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile.acceptance import Exact, Typical
from speccompile.compiler import attempts, package
from speccompile.compiler import frontend as stages_module
from speccompile.errors import CannotSave, Closed, CorruptPackage, ForeignPackage, LoweringError, ModelInTraining
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering import artifacts, compiled_bodies
from speccompile.passes.pipeline import Pipeline
from speccompile.runtime.policy_controller import Fixed
from speccompile.tools.families import find_families, tiny_model
from speccompile.utils.storage import CacheFolder, PackageStorage
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama

OPTIONS: dict[str, Any] = {"tiers": (0, 2), "backend": "eager", "max_len": 31}


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """An empty cache folder, and another empty one at each call."""
    folders = [tmp_path / "cache"]
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: folders[-1])
    return lambda: folders.append(tmp_path / f"cache{len(folders)}")


@pytest.fixture(scope="module")
def saved(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the eager backend."""
    path = tmp_path_factory.mktemp("packages") / "tiny.spec"
    with speccompile.wrap(model, "ngram", **OPTIONS) as spec:
        spec.save(path)
    return path


def text_of(spec: speccompile.Speculator, prompt: list[int], new: int = 16) -> list[int]:
    return spec.generate(torch.tensor([prompt]), max_new_tokens=new)[0, len(prompt) :].tolist()


# --- what comes back -----------------------------------------------------------------------------


def test_a_package_is_all_that_a_load_needs(
    model: LlamaForCausalLM, saved: Path, fresh: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    follow = Pipeline.check
    monkeypatch.setattr(Pipeline, "check", lambda self, *args: ran.append(self.tier) or follow(self, *args))
    monkeypatch.setattr(stages_module, "capture", lambda *args: pytest.fail("captured again"))
    checked: list[int] = []
    check = attempts.check_capture
    monkeypatch.setattr(attempts, "check_capture", lambda *args: checked.append(1) or check(*args))
    fresh()
    with speccompile.load(saved, model) as spec:
        assert ran == ["the captured model"] and checked == [1]
        assert list(spec.tiers) == [0, 2] and spec.arena.layout.max_len == 31 and spec.backend.name == "eager"
        prompt = random_prompt(12)
        assert text_of(spec, prompt) == greedy(model, prompt, 16)
        assert "propose" in spec.stages


def test_options_are_those_of_the_wrap(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "tiny.spec"
    options = {
        "tiers": [0, 2],
        "max_batch": 2,
        "max_len": 15,
        "policy": "schedule:1=2,2=0",
        "acceptance": Typical(threshold=0.25),
        "max_waiting": 5,
        "prefill_budget": 7,
        "prefix_reuse": False,
        "sampling": True,
        "scores": True,
        "max_ngram": 2,
        "deterministic": True,
    }
    with speccompile.wrap(model, "NGram", backend="eager", **options) as spec:
        spec.save(path)
        wanted = spec.explain()
        with speccompile.load(str(path), model) as again:
            assert again._config == spec._config and again._options == spec._options
            assert again.engine.options == spec.engine.options and str(again.policy) == str(spec.policy)
            assert again.engine.tiers.keys() == spec.engine.tiers.keys()
            assert any(kind == "sampled" for _, _, kind in again.engine.tiers)
            lines = [text.splitlines()[:-1] for text in (again.explain(), wanted)]
            assert lines[0] == lines[1]
            again.save(path)
        speccompile.load(path, model).close()


def test_steps_that_requests_asked_for_are_saved_too(
    model: LlamaForCausalLM, tmp_path: Path, fresh: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.spec"
    wish = {"max_new_tokens": 8, "do_sample": True, "seed": 1}
    with speccompile.wrap(model, "ngram", **OPTIONS) as spec:
        expected = spec.engine.submit(random_prompt(8), **wish).result().token_ids
        spec.save(path)
    fresh()
    with speccompile.load(path, model) as spec:
        monkeypatch.setattr(Pipeline, "check", lambda *args: pytest.fail("passes ran again"))
        assert spec.engine.submit(random_prompt(8), **wish).result().token_ids == expected


def test_weights_may_have_other_values(saved: Path) -> None:
    other = tiny_llama(seed=7)
    with speccompile.load(saved, other) as spec:
        prompt = random_prompt(12)
        assert text_of(spec, prompt) == greedy(other, prompt, 16)


def test_a_package_holds_no_weights(model: LlamaForCausalLM, saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        whole = b"".join(archive.read(name) for name in archive.namelist())
    weight = model.lm_head.weight
    assert weight[0].detach().numpy().tobytes() not in whole


# --- what cannot be saved ------------------------------------------------------------------------


class OwnPolicy:
    def choose(self, live_rows: int) -> int:
        return 0


@dataclass(frozen=True)
class OwnRule(Exact):
    name: ClassVar[str] = "own"


@pytest.mark.parametrize(
    ("name", "value"),
    [("logits_processor", [lambda ids, scores: scores]), ("policy", OwnPolicy()), ("acceptance", OwnRule())],
    ids=["logits_processor", "policy", "acceptance"],
)
def test_code_of_the_users_own_is_named_before_anything_is_compiled(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    spec = speccompile.wrap(model, "ngram", **OPTIONS, **{name: value})
    # Known before anything is compiled for it.
    monkeypatch.setattr("speccompile.speculator.speculator.saved_files", pytest.fail)
    with raises(CannotSave, name=name):
        spec.save(tmp_path / "tiny.spec")
    assert not list(tmp_path.glob("*.spec*")) and not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written_is_known_before_anything_is_compiled(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speccompile.speculator.speculator.saved_files", pytest.fail)
    with speccompile.wrap(model, "ngram", **OPTIONS) as spec:
        with pytest.raises(FileNotFoundError, match=r"tiny\.spec"):
            spec.save(tmp_path / "no folder" / "tiny.spec")
        with pytest.raises(IsADirectoryError, match="a package is a file"):
            spec.save(tmp_path)


def test_policies_of_this_package_can_be_saved(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with speccompile.wrap(model, "ngram", **OPTIONS, policy=Fixed(0)) as spec:
        spec.save(tmp_path / "tiny.spec")
    with speccompile.load(tmp_path / "tiny.spec", model) as spec:
        assert spec.policy == Fixed(0)


def test_a_closed_speculator_saves_nothing(model: LlamaForCausalLM, tmp_path: Path) -> None:
    spec = speccompile.wrap(model, "ngram", **OPTIONS)
    spec.close()
    with pytest.raises(Closed):
        spec.save(tmp_path / "tiny.spec")


def test_a_package_is_written_whole_or_not_at_all(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "tiny.spec"
    with speccompile.wrap(model, "ngram", **OPTIONS) as spec:
        with pytest.raises(FileNotFoundError):
            spec.save(path)
        path.parent.mkdir()
        spec.save(path)
        before = path.read_bytes()
        write = zipfile.ZipFile.writestr

        def full(self: zipfile.ZipFile, name: str, data: Any) -> None:
            if name.startswith("steps/"):
                raise OSError("no space left on device")
            write(self, name, data)

        monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
        with pytest.raises(OSError, match="no space left"):
            spec.save(path)
    assert path.read_bytes() == before and [file.name for file in path.parent.iterdir()] == ["tiny.spec"]


# --- what is damaged -----------------------------------------------------------------------------


def rewritten(source: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A proper zip file of the files of ``source`` after ``change``."""
    with zipfile.ZipFile(source) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target


def first(files: dict[str, bytes], folder: str) -> str:
    return next(name for name in files if name.startswith(folder))


def manifest_with(**fields: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        files["manifest.json"] = json.dumps(json.loads(files["manifest.json"]) | fields).encode()

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda files: files.update({first(files, "steps/"): b"{}"}), r"steps/\w+\.json is not what was written"),
        (lambda files: files.update({first(files, "captures/"): b""}), r"captures/\w+\.json is not what was written"),
        (lambda files: files.pop(first(files, "captures/")), r"captures/\w+\.json is missing"),
        (lambda files: files.update({"steps/more.json": b"{}"}), r"steps/more\.json is not in its manifest"),
        (lambda files: files.update({"../../more.json": b"{}"}), "outside of its folder"),
        (lambda files: files.pop("manifest.json"), "its manifest.json is missing or cannot be read"),
        (lambda files: files.update({"manifest.json": b"[]"}), "its manifest.json is missing or cannot be read"),
        (lambda files: files.update({"manifest.json": b"{"}), "its manifest.json is missing or cannot be read"),
        (manifest_with(format=2), "its format is 2, and this version reads 1"),
    ],
    ids=["step", "capture", "missing", "added", "outside", "no manifest", "list", "no JSON", "format"],
)
def test_changed_packages_are_refused(
    model: LlamaForCausalLM, saved: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], None], what: str
) -> None:
    path = rewritten(saved, tmp_path / "changed.spec", change)
    with raises(CorruptPackage, path=str(path), what=re.compile(what)):
        speccompile.load(path, model)


def test_every_cut_and_most_flipped_bytes_are_seen(model: LlamaForCausalLM, saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    path = tmp_path / "damaged.spec"
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptPackage):
            speccompile.load(path, model)
    for place in range(60, len(whole) // 2, len(whole) // 9):  # in contents; after them comes the directory
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptPackage):
            speccompile.load(path, model)


def test_what_is_no_file_is_told(model: LlamaForCausalLM, tmp_path: Path) -> None:
    for path in (tmp_path / "none.spec", tmp_path):
        with raises(CorruptPackage, what=re.compile("there is no such file")):
            speccompile.load(path, model)


# --- what is foreign -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "what", "theirs", "ours"),
    [
        (lambda: tiny_llama(layers=3), r"model\.layers\.2\.\S+$", "^None$", "^float32"),
        (lambda: tiny_llama(layers=1), r"model\.layers\.1\.\S+$", "^float32", "^None$"),
        (
            lambda: tiny_llama(vocab=96),
            r"model\.embed_tokens\.weight$",
            r"^float32\[128, 64\]$",
            r"^float32\[96, 64\]$",
        ),
        (lambda: tiny_llama(dtype=torch.bfloat16), r"\.weight$", r"^float32\[128, 64\]$", r"^bfloat16\[128, 64\]$"),
        (lambda: tiny_llama(rms_norm_eps=1e-3), "^configuration$", "^[0-9a-f]{16}$", "^[0-9a-f]{16}$"),
        (
            lambda: tiny_model(find_families(["gpt2"])[0]),
            "^model class$",
            r"LlamaForCausalLM$",
            r"GPT2LMHeadModel$",
        ),
    ],
    ids=["more layers", "fewer layers", "shape", "dtype", "configuration", "class"],
)
def test_another_model_is_refused(saved: Path, other: Callable[[], Any], what: str, theirs: str, ours: str) -> None:
    with raises(ForeignPackage, what=re.compile(what), theirs=re.compile(theirs), ours=re.compile(ours)):
        speccompile.load(saved, other())


@pytest.mark.parametrize("name", ["torch", "transformers", "speccompile's sources"])
def test_other_versions_are_refused(
    model: LlamaForCausalLM, saved: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = package._versions
    monkeypatch.setattr(package, "_versions", lambda: versions() | {name: "9.9"})
    with raises(ForeignPackage, what=name, theirs=versions()[name], ours="9.9", advice=re.compile("install those")):
        speccompile.load(saved, model)


def test_a_model_of_other_modules_is_refused(saved: Path) -> None:
    other = tiny_llama()
    other.model.norm = torch.nn.Identity.__new__(type("Changed", (type(other.model.norm),), {}))
    other.model.norm.__dict__.update(tiny_llama().model.norm.__dict__)
    with raises(
        ForeignPackage,
        what=re.compile("the model's code and modules"),
        advice=re.compile("Load the model that was wrapped"),
    ):
        speccompile.load(saved, other)


def test_a_model_that_no_wrap_takes_is_told(saved: Path) -> None:
    with pytest.raises(ModelInTraining):
        speccompile.load(saved, tiny_llama().train())


# --- compiled code -------------------------------------------------------------------------------


def test_compiled_code_is_brought_along(
    model: LlamaForCausalLM, tmp_path: Path, fresh: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.spec"
    options = OPTIONS | {"backend": "inductor"}
    prompt = random_prompt(12)
    with speccompile.wrap(model, "ngram", **options) as spec:
        spec.save(path)
        expected = text_of(spec, prompt)
    with zipfile.ZipFile(path) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
    assert libraries
    # As in another process on a machine where Inductor has never run.
    fresh()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(compiled_bodies, "compile_body", lambda *args: pytest.fail("compiled again"))
    with speccompile.load(path, model) as spec:
        assert spec.backend.name == "inductor"
        assert text_of(spec, prompt) == expected == greedy(model, prompt, 16)
        # What the package brought is this wrap's alone.
        with pytest.raises(pytest.fail.Exception, match="compiled again"):
            speccompile.wrap(model, "ngram", **options)
    installed = {str(found.relative_to(tmp_path / "inductor")) for found in Path(tmp_path, "inductor").rglob("*.so")}
    assert {f"machine_code/{name}" for name in installed} == set(libraries)
    machine = package.machine
    monkeypatch.setattr(package, "machine", lambda device: machine(device) | {"torch threads": "99"})
    with raises(ForeignPackage, what=re.compile("torch threads"), theirs="1", ours="99"):
        speccompile.load(path, model)


@pytest.fixture(scope="module")
def graph(model: LlamaForCausalLM) -> StepGraph:
    with speccompile.wrap(model, "ngram", **OPTIONS) as spec:
        return spec.stages["outline"].graph


def test_an_artifact_that_inductor_does_not_take_is_told(graph: StepGraph, fresh: Callable[[], None]) -> None:
    name = artifacts.artifact_name(graph.bodies["decoder_layer"], graph.device)
    bodies = compiled_bodies.CompiledBodies(PackageStorage({name: b"something else"}))
    with raises(LoweringError, file=name):
        bodies.functions(graph)


def test_where_inductor_keeps_nothing_nothing_is_saved(
    graph: StepGraph, fresh: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Artifact:
        def is_saveable(self) -> bool:
            return False

    monkeypatch.setattr(compiled_bodies, "compile_body", lambda *args: Artifact())
    with raises(LoweringError, unsaved="decoder_layer"):
        compiled_bodies.CompiledBodies(CacheFolder()).files(graph)
