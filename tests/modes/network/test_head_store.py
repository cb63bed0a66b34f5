"""The capture of a head is kept, and read again for a head of the same kind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import wrap
from speccompile.graph_capture.model_info import inspect_model
from speccompile.graph_capture.store import HeadStore
from speccompile.heads import Eagle3Head, MtpHead, MtpVariant
from speccompile.modes.network import head_network
from speccompile.modes.network.layers import RMSNorm
from speccompile.utils.storage import CacheFolder
from support.eagle3_specs import TAPS
from support.mtp_specs import MODULES
from support.tiny import greedy, random_prompt, tiny_llama

ASKED: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
SIZES: dict[str, Any] = {"tiers": (0, 2), "backend": "eager", "max_batch": 1, "max_len": 31, "policy": "fixed:2"}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama(layers=4)


@pytest.fixture(scope="module")
def of_target(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with what a wrap of the target alone keeps."""
    folder = tmp_path_factory.mktemp("target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.utils.storage.cache_dir", lambda: folder)
        with wrap(target, "none", **SIZES):
            pass
    return folder


@pytest.fixture
def exports(of_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of heads, with a cache folder of the test's own that has the target and no head."""
    shutil.copytree(of_target, tmp_path, dirs_exist_ok=True)
    made: list[str] = []
    own = head_network.exported

    def exported(step: Any, *rest: Any) -> Any:
        made.append(type(step.model).__name__)
        return own(step, *rest)

    monkeypatch.setattr(head_network, "exported", exported)
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    return made


def acceptance(target: LlamaForCausalLM, mode: str, head: torch.nn.Module) -> float:
    """Of a wrap whose text is the target's."""
    prompt = random_prompt(12)
    with wrap(target, mode, draft=head, **SIZES) as spec:
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=16)[0, 12:].tolist() == greedy(target, prompt, 16)
        return spec.stats.acceptance_length


def test_eagle3(target: LlamaForCausalLM, exports: list[str]) -> None:
    head = Eagle3Head.random(target, taps=TAPS)
    first = acceptance(target, "eagle3_one_model", head)
    assert acceptance(target, "eagle3_one_model", head) == first and exports == ["Eagle3Head"]
    # Over other weights it is the same graph; the check of a capture sees to it.
    acceptance(target, "eagle3_one_model", Eagle3Head.random(target, taps=TAPS, seed=1))
    assert len(exports) == 1
    acceptance(target, "eagle3_one_model", Eagle3Head.random(target, taps=TAPS, norm_before_residual=True))
    assert len(exports) == 2


def test_a_stored_head_that_computes_something_else_is_captured_again(
    target: LlamaForCausalLM, exports: list[str], tmp_path: Path
) -> None:
    head = Eagle3Head.random(target, taps=TAPS)
    right = acceptance(target, "eagle3_one_model", head)
    folder = CacheFolder()
    files = {name: folder.read(name) for name in (f"captures/{path.name}" for path in tmp_path.glob("captures/*"))}
    # The target's has what was observed beside its graph.
    ((name, stored),) = [(name, data) for name, data in files.items() if data and b'"observed"' not in data]
    assert b"aten.silu.default" in stored
    folder.write(name, stored.replace(b"aten.silu.default", b"aten.relu.default"))
    for _ in range(2):
        assert acceptance(target, "eagle3_one_model", head) == right
    assert len(exports) == 2 and folder.read(name) == stored


def test_another_process_finds_it(target: LlamaForCausalLM) -> None:
    """Nothing in its name, such as an address or the order of a set, is of one process alone."""
    make = "Eagle3Head.random(target, taps=TAPS)"
    code = f"from test_head_store import *; target = tiny_llama(layers=4); print(name_of(target, {make}))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, **ASKED)
    assert done.stdout.strip() == name_of(target, Eagle3Head.random(target, taps=TAPS))


def name_of(target: LlamaForCausalLM, head: Eagle3Head) -> str:
    return HeadStore(head, inspect_model(target)).name


def test_mtp(target: LlamaForCausalLM, exports: list[str]) -> None:
    head = MtpHead.random(target, MODULES)
    first = acceptance(target, "mtp", head)
    assert acceptance(target, "mtp", head) == first and len(exports) == 1
    # One module, used again, is another network.
    acceptance(target, "mtp_eagle_one_model", head)
    acceptance(target, "mtp_eagle_one_model", head)
    assert len(exports) == 2
    acceptance(target, "mtp", MtpHead.random(target, MODULES, variant=MtpVariant(hidden_first=True)))
    assert len(exports) == 3


def test_over_weights_that_the_wrap_consumes(exports: list[str]) -> None:
    """The head reads the target's embedding and lm_head, which are packs after the first wrap."""
    for _ in range(2):
        target = tiny_llama()
        with wrap(
            target, "mtp", draft=MtpHead.random(target, MODULES), consume=True, **SIZES | {"backend": "inductor"}
        ):
            pass
    assert len(exports) == 1


def test_a_setting_that_no_weight_tells(target: LlamaForCausalLM, exports: list[str]) -> None:
    head = Eagle3Head.random(target, taps=TAPS)
    acceptance(target, "eagle3_one_model", head)
    next(module for module in head.modules() if isinstance(module, RMSNorm)).eps *= 2
    acceptance(target, "eagle3_one_model", head)
    assert len(exports) == 2
