"""The capture of a head is kept, and read again for a head of the same kind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import modes, wrap
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.store import HeadStore
from speccompile.heads import Eagle3Head, MtpHead, MtpVariant
from speccompile.modes.network import head_network
from speccompile.modes.network.layers import RMSNorm
from speccompile.utils.storage import CacheFolder
from support.tiny import greedy, random_prompt, tiny_llama

ASKED: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
SIZES: dict[str, Any] = {"tiers": (0, 2), "backend": "eager", "max_batch": 1, "max_len": 31, "policy": "fixed:2"}
TAPS = (0, 1, 1)
EAGLE3 = "eagle3_one_model"
#: Whose heads are stored; one module drafts again and again, or each of two once.
MODES = (EAGLE3, "mtp", "mtp_eagle_one_model")


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama()


def head_for(target: LlamaForCausalLM, mode: str) -> Eagle3Head | MtpHead:
    return Eagle3Head.random(target, taps=TAPS) if mode == EAGLE3 else MtpHead.random(target, 2 if mode == "mtp" else 1)


@dataclass
class Kept:
    """What wraps of the target with its heads keep, and each one's acceptance length by its mode."""

    folder: Path
    acceptance: dict[str, float]


@pytest.fixture(scope="module")
def kept(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch:
        made = noted_exports(folder, patch)
        found = {mode: acceptance(target, mode, head_for(target, mode)) for mode in MODES}
    assert made == ["Eagle3Head", "MtpHead", "MtpHead"]
    return Kept(folder, found)


@pytest.fixture
def exports(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of heads, with a cache folder of the test's own that has what is kept."""
    shutil.copytree(kept.folder, tmp_path, dirs_exist_ok=True)
    return noted_exports(tmp_path, monkeypatch)


def noted_exports(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    """Of heads, from now on; ``folder`` is the cache folder."""
    made: list[str] = []
    own = head_network.exported

    def exported(step: Any, *rest: Any) -> Any:
        made.append(type(step.model).__name__)
        return own(step, *rest)

    patch.setattr(head_network, "exported", exported)
    patch.setattr("speccompile.utils.storage.cache_dir", lambda: folder)
    return made


def acceptance(target: LlamaForCausalLM, mode: str, head: torch.nn.Module) -> float:
    """Of a wrap whose text is the target's."""
    prompt = random_prompt(12)
    with wrap(target, mode, draft=head, **SIZES) as spec:
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=16)[0, 12:].tolist() == greedy(target, prompt, 16)
        return spec.stats.acceptance_length


@pytest.mark.parametrize("mode", MODES)
def test_a_head_is_found_again(target: LlamaForCausalLM, kept: Kept, exports: list[str], mode: str) -> None:
    assert acceptance(target, mode, head_for(target, mode)) == kept.acceptance[mode] and not exports


def test_over_other_weights_it_is_the_same_graph(target: LlamaForCausalLM, exports: list[str]) -> None:
    """The check of a capture sees to it."""
    acceptance(target, EAGLE3, Eagle3Head.random(target, taps=TAPS, seed=1))
    assert not exports


def test_a_stored_head_that_computes_something_else_is_captured_again(
    target: LlamaForCausalLM, kept: Kept, exports: list[str], tmp_path: Path
) -> None:
    folder = CacheFolder()
    files = {name: folder.read(name) for name in (f"captures/{path.name}" for path in tmp_path.glob("captures/*"))}
    # The target's has what was observed beside its graph; modules of MTP have a projection of their own.
    ((name, stored),) = [
        (name, data) for name, data in files.items() if data and b'"observed"' not in data and b"eh_proj" not in data
    ]
    assert b"aten.silu.default" in stored
    folder.write(name, stored.replace(b"aten.silu.default", b"aten.relu.default"))
    assert acceptance(target, EAGLE3, head_for(target, EAGLE3)) == kept.acceptance[EAGLE3]
    # What is stored now is found again, as it was before.
    assert exports == ["Eagle3Head"] and folder.read(name) == stored


def test_over_weights_that_the_wrap_frees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads the target's embedding and lm_head, which are packs after the first wrap."""
    exports = noted_exports(tmp_path, monkeypatch)
    options = SIZES | {"tiers": (0, 1), "policy": "fixed:1", "backend": "inductor"}
    for _ in range(2):
        target = tiny_llama()
        with wrap(target, "mtp", draft=MtpHead.random(target, 1), free_originals=True, **options):
            pass
    assert len(exports) == 1


# --- the name of what is stored: what has another one is captured anew -----------------------------------------------


def name_of(target: LlamaForCausalLM, head: Eagle3Head | MtpHead) -> str:
    return HeadStore(head, inspect_model(target)).name


def test_another_process_finds_it(target: LlamaForCausalLM) -> None:
    """Nothing in its name, such as an address or the order of a set, is of one process alone."""
    code = "from test_head_store import *; target = tiny_llama(); print(name_of(target, head_for(target, EAGLE3)))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, **ASKED)
    assert done.stdout.strip() == name_of(target, head_for(target, EAGLE3))


def test_variants_have_names_of_their_own(target: LlamaForCausalLM) -> None:
    modules = MtpHead.random(target, 2)
    variants = [
        Eagle3Head.random(target, taps=TAPS),
        Eagle3Head.random(target, taps=TAPS, norm_before_residual=True),
        modules,
        # One module, used again, is another network.
        modes.create("mtp_eagle_one_model", {"draft": modules}).loaded(target).draft,
        MtpHead.random(target, 2, variant=MtpVariant(hidden_first=True)),
    ]
    assert len({name_of(target, head) for head in variants}) == len(variants)


def test_a_setting_that_no_weight_tells(target: LlamaForCausalLM) -> None:
    head = head_for(target, EAGLE3)
    before = name_of(target, head)
    next(module for module in head.modules() if isinstance(module, RMSNorm)).eps *= 2
    assert name_of(target, head) != before
