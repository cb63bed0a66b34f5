"""The kernels that a tier calls, as they are listed: op by op, compiled for the CPU, and as CUDA would take them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import speccompile
from speccompile.acceptance import Relaxed
from speccompile.compiler.option_checks import check_weights
from speccompile.compiler.options import WrapOptions
from speccompile.errors import InvalidOption, UnknownTier
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.heads import Eagle3Head
from speccompile.lowering import kernel_list as called
from speccompile.lowering.kernel_list import DRAFTER, KernelCall, kernels_called
from speccompile.lowering.kernels import ON_CUDA
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.quantized import GroupedWeight, QuantizedWeights
from speccompile.speculator.speculator import Speculator
from support.errors import raises
from support.families import family
from support.tiny import tiny_llama

LAYERS = 2
PROMPTS = [[5, 9, 23, 9, 5], [7, 7, 31]]
ATTENTION = ["partial_attention", "combine_attention"]
#: A cache of so many tokens is cut into several splits.
SPLIT = 256


#: Kernels of the same graph before and after the C++ library is loaded.
BEFORE_AND_AFTER = """
import speccompile
from speccompile.ops.cpu.library import load_cpu_ops
from support.tiny import tiny_llama

def print_kinds():
    print(*sorted(f"{call.name}:{call.kind}" for call in spec.kernels(3) if call.name in NAMES))

NAMES = [f"speccompile.{name}" for name in ("accept_commit_", "choose", "match_ngram")]
with speccompile.wrap(tiny_llama(), "ngram", tiers=(0, 3), max_batch=2, max_len=32, backend="eager") as spec:
    print_kinds()
    assert load_cpu_ops() is None
    print_kinds()
"""


SIZES: dict[str, Any] = {"tiers": (0, 3), "max_batch": 2, "max_len": 32}


def wrapped(backend: str = "eager", **options: Any) -> Speculator:
    return speccompile.wrap(tiny_llama(), "ngram", backend=backend, **{**SIZES, **options})


def names(calls: tuple[KernelCall, ...], caller: str, kind: str) -> dict[str, int]:
    return {call.name: call.calls for call in calls if (call.caller, call.kind) == (caller, kind)}


def test_a_printed_step_lists_its_ops() -> None:
    with wrapped() as spec:
        calls = spec.kernels()
        (body,) = names(calls, "step", "body")
        assert names(calls, "step", "body") == {body: LAYERS}
        assert names(calls, body, "plain") == {"speccompile.attention": 1}
        assert names(calls, body, "stock")["aten.linear"] == 7
        assert not [call for call in calls if call.kind in ("triton", "inductor")] and not names(calls, body, "c++")
        # A view starts no kernel, and neither does arithmetic on sizes.
        assert not [call for call in calls if "view" in call.name or "slice" in call.name or "sym_size" in call.name]
        assert names(spec.kernels(0), "step", "stock") != names(calls, "step", "stock")


def test_the_listed_kernel_of_an_op_is_the_one_that_is_loaded() -> None:
    """C++ kernels after the library is loaded, also for steps that were built before; until then references."""
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", BEFORE_AND_AFTER]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    ops = [f"speccompile.{name}" for name in ("accept_commit_", "choose", "match_ngram")]
    before, after = (line.split() for line in ran.stdout.splitlines())
    assert before == [f"{op}:plain" for op in ops] and after == [f"{op}:c++" for op in ops]


def test_a_split_drafters_are_listed_in_front() -> None:
    draft = tiny_llama(seed=1, layers=1)
    with speccompile.wrap(
        tiny_llama(), "draft_target", draft=draft, fused=False, tiers=(0, 3), max_len=32, backend="eager"
    ) as spec:
        calls = spec.kernels(3)
        assert calls[0].caller == DRAFTER
        (body,) = names(calls, DRAFTER, "body")
        # K forwards draft, after one over the tokens that the drafter has not read.
        assert names(calls, DRAFTER, "body") == {body: 4}
        assert names(calls, body, "plain") == {"speccompile.attention": 1}
        own = names(calls, "step", "body")
        assert body not in own and len(own) == 1
        assert names(calls, *own, "plain") == {"speccompile.attention": 1}
        assert names(spec.kernels(0), DRAFTER, "body") == {} and names(spec.kernels(0), "step", "body") == own


def test_all_segments_of_a_drafter_are_listed() -> None:
    model = tiny_llama()
    head = Eagle3Head.random(model, taps=(0, 1, 1))
    with speccompile.wrap(
        model, "eagle3", draft=head, confidence=True, tiers=(0, 1, 3), max_len=32, backend="eager"
    ) as spec:
        (body,) = names(spec.kernels(3), DRAFTER, "body")
        # The first draft needs the lm_head alone.
        assert names(spec.kernels(3), DRAFTER, "body") == {body: 2}
        assert not names(spec.kernels(1), DRAFTER, "body")
        assert "the policy may stop" in spec.explain()


def test_compiled_for_the_cpu() -> None:
    with wrapped("inductor") as spec:
        assert "ours, in" in spec.explain()
        calls = spec.kernels(3, rows=1)
        (body,) = names(calls, "step", "body")
        ours = names(calls, body, "c++")
        assert ours.pop("speccompile.native_rotary_attention") == 1 and ours and all("linear" in name for name in ours)
        assert names(calls, body, "inductor") == {}
        # Nothing of the layers is left to torch's own ops.
        assert names(calls, body, "stock") == {}
        assert names(calls, "step", "c++")["speccompile.packed_linear"] == 1


def test_kernels_that_inductor_wrote_for_the_cpu() -> None:
    with speccompile.wrap(family("gpt2"), "none", tiers=(0,), max_len=32, backend="inductor") as spec:
        calls = spec.kernels(0, rows=1)
        (body,) = names(calls, "step", "body")
        written = names(calls, body, "inductor")
        assert len(written) > 2 and all(name.startswith("cpp_fused_") for name in written)


def test_as_cuda_would_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    with wrapped(max_len=SPLIT) as spec:
        calls = kernels_called(spec.tiers[3].graph, "cuda", {})
    body = "decoder_layer"
    # The last layer has no norm after it.
    assert names(calls, "step", "body") == {body: 1, f"{body}_1": 1, "prologue": 1, "epilogue": 1}
    assert names(calls, body, "triton") == {f"speccompile.attention: {kernel}": 1 for kernel in ATTENTION}
    step = names(calls, "step", "triton")
    assert step["speccompile.accept_commit_: accept_commit_rows"] == 1
    assert step["speccompile.step_inputs: step_inputs_rows"] == 1
    assert step["speccompile.store_drafts_: store_drafts_rows"] == 1
    assert step["speccompile.match_ngram: match_partial"] == step["speccompile.match_ngram: match_combine"] == 1
    assert not [call for call in calls if call.kind in ("plain", "c++")]


def test_rounded_linears_as_cuda_would_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the CPU's ops compute them, over the same packs."""
    assert load_cpu_ops() is None
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    with wrapped(weights={"*": "int4", "down_proj": "int8", "o_proj": "same"}) as spec:
        calls = kernels_called(spec.tiers[3].graph, "cuda", {})
        assert spec.check(PROMPTS, max_new_tokens=8)
        assert "rounded to int4 in groups of 32" in spec.explain()
    body = "decoder_layer"
    triton = names(calls, body, "triton")
    # One launch for queries, keys and values, and one for gate and up.
    assert triton["speccompile.int4_linears: multiply_rounded"] == 2
    assert triton["speccompile.int8_linear: multiply_rounded"] == 1
    assert triton["speccompile.int4_linears: round_inputs"] == 2
    assert names(calls, body, "stock")["aten.mm"] == 1
    assert not [call for call in calls if call.kind in ("plain", "c++")]


@pytest.mark.parametrize("target", ["same", "int4"])
def test_a_rounded_drafter_as_cuda_would_take_it(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Its layer has two launches for each input of linears; the target keeps its own form."""
    assert load_cpu_ops("rounded") is None
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    draft = tiny_llama(seed=1, layers=1)
    options: dict[str, Any] = {"tiers": (0, 3), "max_len": 32, "backend": "eager", "weights": target}
    with speccompile.wrap(tiny_llama(), "draft_target", draft=draft, draft_weights="int8", **options) as spec:
        calls = kernels_called(spec.tiers[3].graph, "cuda", {})
        assert spec.check(PROMPTS, max_new_tokens=8)
    of_body = {
        body: sum(count for name, count in names(calls, body, "triton").items() if "int8_linear" in name)
        for body in names(calls, "step", "body")
    }
    # Rounding, and a product, for each of four inputs.
    assert sorted(filter(None, of_body.values())) == [8]
    drafter = max(of_body, key=of_body.__getitem__)
    assert "aten.mm" not in names(calls, drafter, "stock")
    products = {body: names(calls, body, "stock").get("aten.mm", 0) for body in of_body.keys() - {drafter}}
    assert set(filter(None, products.values())) == ({4} if target == "same" else set())


def test_a_checkpoints_integers_are_refused_off_the_cpu() -> None:
    weight = GroupedWeight(torch.zeros(64, 64, dtype=torch.int8), 8, torch.ones(64, 2), None, 32)
    packs = QuantizedPacks.of_weights(QuantizedWeights({"model.layers.0.self_attn.q_proj.weight": weight}, "Q8_0"))
    on_cuda = ModelInfo("Llama", 2, 128, 64, torch.float32, torch.device("cuda"))
    with raises(InvalidOption, name="weights", reason=re.compile("only run on a CPU, and the model is on cuda")):
        check_weights(WrapOptions(weights=packs), ON_CUDA, "eager", on_cuda)


def test_relaxed_acceptance_is_an_op_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    with wrapped(acceptance=Relaxed(1, 2), policy="fixed:3") as spec:
        calls = kernels_called(spec.tiers[3].graph, "cuda", {})
    assert names(calls, "step", "triton")["speccompile.is_within_top: within_top_places"] == 1
    assert not [call for call in calls if "topk" in call.name or "sort" in call.name]


CODE = """
class Runner:
    def call(self, args):
        triton_poi_fused_add_0.run(buf0, 64, stream=stream0)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        triton_poi_fused_add_0.run(buf1, 64, stream=stream0)
        buf2 = torch.ops.speccompile.attention.default(buf1)
        buf3 = torch.ops.aten.sort.default(buf2)
        assert_size_stride(buf3, (4, 4), (4, 1))

def benchmark_compiled_module():
    extern_kernels.addmm(a, b, c)
"""


def test_what_inductor_wrote_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: ON_CUDA)
    with wrapped() as spec:
        graph, body = spec.tiers[3].graph, "decoder_layer"
        calls = kernels_called(graph, "cuda", {body: CODE})
    assert names(calls, body, "inductor") == {"triton_poi_fused_add_0": 2}
    assert names(calls, body, "stock") == {"mm": 1, "aten.sort": 1}
    # One split, and nothing to combine.
    assert names(calls, body, "triton") == {"speccompile.attention: partial_attention": 1}


def test_what_there_is_not() -> None:
    with wrapped() as spec:
        with pytest.raises(UnknownTier):
            spec.kernels(5)
        with raises(InvalidOption, name="rows", reason=re.compile(r"there are tiers of \[1, 2\] rows")):
            spec.kernels(3, rows=4)
    assert called.STEP == "step"
