"""``consume=True``: the model's weights become the packs, and there is one copy."""

from __future__ import annotations

import copy
import gc
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import speccompile
from benchmarks import isolated
from speccompile.errors import (
    CannotSave,
    CaptureMismatch,
    ConsumeUnavailable,
    InvalidOption,
    ModelConsumed,
    WeightsReplaced,
)
from speccompile.lowering import kernels
from speccompile.lowering.cpu import packing
from speccompile.lowering.cpu.give_back import release_file_pages
from speccompile.lowering.kernels import Kernels
from speccompile.pretrained import fetch_smollm2
from speccompile.speculator import Speculator

PROMPTS = torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights in the printed step, which needs no compiled bodies."""
    reason = kernels.load_cpu_ops()
    assert reason is None
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the test"))


def wrapped(model: PreTrainedModel, **options: Any) -> Speculator:
    options = {"tiers": (0, 3), "max_batch": 2, "max_len": 60, "backend": "eager", "consume": True} | options
    return speccompile.wrap(model, "ngram", **options)


def greedy(model: Any, ids: torch.Tensor, new: int = 20) -> torch.Tensor:
    result: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return result


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


MODELS = {
    "untied": lambda: tiny_llama(attention_bias=True),
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "bfloat16": lambda: tiny_llama(dtype=torch.bfloat16),
}


def watched(model: PreTrainedModel) -> dict[str, weakref.ref[Any]]:
    """Puts every weight into storage whose end can be seen, since an array owns it."""
    refs = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        refs[name] = weakref.ref(array)
    return refs


def alive(refs: dict[str, weakref.ref[Any]]) -> set[str]:
    return {name for name, ref in refs.items() if ref() is not None}


@pytest.mark.parametrize("name", ["untied", "tied", "gpt2"])
def test_one_copy_is_left(name: str) -> None:
    """Whoever still held a weight of the model (a stage, a port, a sample of it) would keep its storage."""
    model = MODELS[name]()
    refs = watched(model)
    matrices = {path for path, parameter in model.named_parameters() if parameter.dim() == 2}
    if name == "gpt2":
        matrices -= {"transformer.wpe.weight"}
    elif name == "untied":
        matrices -= {"model.embed_tokens.weight"}
    spec = wrapped(model)
    spec.generate(PROMPTS, max_new_tokens=8)
    gc.collect()
    assert set(refs) - alive(refs) == matrices
    assert f"consumed: {len(matrices)} of them in {spec._build.packs.nbytes / 2**20:.1f} MiB" in spec.explain()


def test_what_is_not_consumed_keeps_its_weights() -> None:
    model = tiny_llama()
    refs = watched(model)
    spec = wrapped(model, consume=False)
    assert alive(refs) == set(refs) and "consumed" not in spec.explain()


def test_the_pack_is_what_the_model_has() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    spec = wrapped(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    tiers = [*spec.engine.tiers.values(), *spec.prefill.values()]
    for tier in tiers:
        for name, tensor in zip(tier.argument_names, tier.arguments, strict=True):
            assert not name.endswith("_packed") or tensor.data_ptr() in own
    assert model.lm_head.parametrizations.weight.original is model.model.embed_tokens.parametrizations.weight.original


@pytest.mark.parametrize("stored", [False, True])
def test_they_go_one_by_one(monkeypatch: pytest.MonkeyPatch, stored: bool, tmp_path: Path) -> None:
    """There never are two whole copies: when a weight is packed, those packed before are gone."""
    monkeypatch.setattr("speccompile.storage.cache_dir", lambda: tmp_path)
    if stored:
        wrapped(tiny_llama())
    model = tiny_llama()
    refs = watched(model)
    left = []
    pack = packing.pack

    def noted(weight: torch.Tensor) -> torch.Tensor:
        gc.collect()
        left.append(len(alive(refs)))
        return pack(weight)

    monkeypatch.setattr(packing, "pack", noted)
    spec = wrapped(model)
    assert spec.stages["capture"].note == ("read from the store" if stored else "exported")
    assert left == list(range(len(refs), len(refs) - 15, -1))


@pytest.mark.parametrize("name", MODELS)
def test_the_text_is_the_models_own(name: str) -> None:
    model = MODELS[name]()
    wanted = greedy(copy.deepcopy(model), PROMPTS)
    plain = copy.deepcopy(model)
    spec = wrapped(model)
    with torch.no_grad():
        assert torch.equal(model(PROMPTS).logits, plain(PROMPTS).logits)
    assert torch.equal(greedy(model, PROMPTS), wanted)
    assert spec.check(PROMPTS, max_new_tokens=20, eos_token_id=[]).largest_logit_change < 0.05
    if name != "bfloat16":
        for draft_len in (0, 3):
            spec.set_tier(draft_len)
            assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20, eos_token_id=[]), wanted)


def test_every_stage_runs() -> None:
    spec = wrapped(tiny_llama())
    for stage in spec.stages.values():
        stage.call(*stage.make_inputs())
    spec.generate(PROMPTS, max_new_tokens=4, do_sample=True, seed=1)


def test_it_cannot_be_wrapped_again() -> None:
    model = tiny_llama()
    with wrapped(model) as spec:
        spec.generate(PROMPTS, max_new_tokens=4)
    for consume in (False, True):
        with pytest.raises(ModelConsumed, match=r"cannot be wrapped again\. Load the model again"):
            wrapped(model, consume=consume)


def test_what_becomes_of_other_wraps_of_the_model() -> None:
    model = tiny_llama()
    before = wrapped(model, consume=False)
    spec = wrapped(model)
    with pytest.raises(WeightsReplaced):
        before.generate(PROMPTS)
    spec.generate(PROMPTS, max_new_tokens=4)


def test_its_weights_cannot_be_changed() -> None:
    model = tiny_llama()
    spec = wrapped(model)
    up = model.model.layers[0].mlp.up_proj
    with pytest.raises(ModelConsumed, match="cannot be assigned to"):
        up.weight = torch.zeros_like(up.weight)
    with pytest.raises(ModelConsumed, match="cannot be loaded anew"):
        model.load_state_dict(tiny_llama(seed=1).state_dict(), strict=False)
    spec.generate(PROMPTS, max_new_tokens=4)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"), torch.no_grad():
        up.weight.mul_(2)
    model.double()
    with pytest.raises(WeightsReplaced):
        spec.generate(PROMPTS)


def test_the_model_can_be_trained_through_what_is_left() -> None:
    model = tiny_llama()
    wrapped(model)
    model(PROMPTS, labels=PROMPTS).loss.backward()
    assert model.model.norm.weight.grad is not None


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_it_can_be_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = greedy(model, PROMPTS)
    wrapped(model)
    state = model.state_dict()
    assert state.keys() == plain.keys() and all(torch.equal(state[key], plain[key]) for key in plain)
    model.save_pretrained(tmp_path)
    assert torch.equal(greedy(AutoModelForCausalLM.from_pretrained(tmp_path), PROMPTS), wanted)


@pytest.mark.real
def test_memory_of_five_tiers() -> None:
    """1.3 times the weights, the KV, and 600 MB for Python, torch, transformers and what the build needs besides."""
    max_len, width = 2048, 16
    config = AutoConfig.from_pretrained(fetch_smollm2())
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (max_len + width) * 2 * 4
    weights = 134_515_008 * 4
    arguments = ["--tiers", "0,1,3,7,15", "--max-len", str(max_len), "--consume"]
    measured = isolated.run(isolated.SPECULATOR, str(fetch_smollm2()), arguments, {})
    assert measured["peak_rss_bytes"] <= 1.3 * weights + kv + 600e6


# --- when it cannot be kept ----------------------------------------------------------------------


def test_a_flag_is_wanted() -> None:
    with pytest.raises(InvalidOption, match="consume='yes'"):
        wrapped(tiny_llama(), consume="yes")


def test_without_packed_weights_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "torch's own: no C++ compiler was found"
    monkeypatch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(False, reason))
    with pytest.raises(ConsumeUnavailable, match=r"no C\+\+ compiler was found.*Use consume=False"):
        wrapped(tiny_llama())


def state(model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, int]]:
    return {
        name: (parameter.detach().clone(), id(parameter))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


@pytest.fixture
def untouched() -> Iterator[PreTrainedModel]:
    """A model that is as it was when the test is through."""
    model = tiny_llama(tie_word_embeddings=True)
    before, kinds = state(model), [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    yield model
    after = state(model)
    assert before.keys() == after.keys() and kinds == [type(module) for module in model.modules()]
    assert all(torch.equal(before[name][0], after[name][0]) and before[name][1] == after[name][1] for name in before)
    assert model.lm_head.weight is model.model.embed_tokens.weight and list(model.state_dict()) == keys
    wrapped(model, consume=False).generate(PROMPTS, max_new_tokens=4)


def test_a_failed_wrap_gives_the_weights_back(untouched: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def refused(*_: Any) -> float:
            raise CaptureMismatch(model="it", difference=1.0, allowed=0.1, where="here")

        patch.setattr("speccompile.build.check_capture", refused)
        with pytest.raises(CaptureMismatch):
            wrapped(untouched)


def test_an_interrupted_wrap_gives_the_weights_back(
    untouched: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, calls = packing.pack, []

    def interrupted(weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return pack(weight)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            wrapped(untouched)


def test_a_failure_behind_the_build_gives_the_weights_back(
    untouched: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("speccompile.runtime.engine.Engine.prepare", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrapped(untouched, sampling=True)


def test_a_second_attempt_starts_from_plain_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first route is refused by the check; the second one is captured, and consumes again."""
    from speccompile import build

    # Other tests are to find no capture by that route.
    monkeypatch.setattr("speccompile.storage.cache_dir", lambda: tmp_path)
    check, calls = build.check_capture, []

    def once(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) < 3:
            raise CaptureMismatch(model="it", difference=1.0, allowed=0.1, where="here")
        return check(*arguments)

    model = tiny_llama()
    wanted = greedy(model, PROMPTS)
    wrapped(tiny_llama(), consume=False)
    monkeypatch.setattr(build, "check_capture", once)
    refs = watched(model)
    # A stored capture, a new one, and one by the model's own attention.
    spec = wrapped(model)
    assert spec.route == "eager" and len(calls) == 3
    assert torch.equal(spec.generate(PROMPTS, max_new_tokens=20), wanted)
    gc.collect()
    assert len(refs) - len(alive(refs)) == 15


class Neighbours(torch.nn.Module):
    """Exactly 0, but for the last bits of what it is added to."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (hidden.sum(1, keepdim=True) * 1e-7)


def with_neighbours() -> PreTrainedModel:
    model = tiny_llama()
    model.model.norm = torch.nn.Sequential(model.model.norm, Neighbours())
    return model


def test_where_bits_are_not_kept_one_copy_is() -> None:
    model = with_neighbours()
    refs = watched(model)
    spec = wrapped(model)
    gc.collect()
    assert "deterministic  no" in spec.explain() and len(refs) - len(alive(refs)) == 15
    spec.generate(PROMPTS, max_new_tokens=4)


def test_deterministic_that_needs_torchs_own_linears_is_refused() -> None:
    model = with_neighbours()
    before = state(model)
    with pytest.raises(ConsumeUnavailable, match="deterministic=True needs torch's own linears"):
        wrapped(model, deterministic=True)
    assert all(torch.equal(parameter, before[name][0]) for name, parameter in model.named_parameters())


# --- pages of files ------------------------------------------------------------------------------

PAGES = 64


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that ``tensor`` lies in that are in memory."""
    inside, size = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            low, high = (int(address, 16) for address in head.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and head == "Rss:":
            size = int(line.split()[1]) * 1024
    return size


linux = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="Linux tells which pages are in memory")


@linux
def test_pages_of_a_file_are_given_back(tmp_path: Path) -> None:
    size = PAGES * mmap.PAGESIZE
    (tmp_path / "weights").write_bytes(bytes(range(256)) * (size // 256))
    whole = torch.from_file(str(tmp_path / "weights"), shared=False, size=size, dtype=torch.uint8)
    wanted = whole.clone()
    assert resident(whole) == size
    # Not the pages that it shares with what is beside it.
    release_file_pages(whole[1 : size - 1])
    assert resident(whole) == 2 * mmap.PAGESIZE
    assert torch.equal(whole, wanted)


@linux
def test_pages_that_were_written_to_stay(tmp_path: Path) -> None:
    size = PAGES * mmap.PAGESIZE
    (tmp_path / "weights").write_bytes(bytes(size))
    whole = torch.from_file(str(tmp_path / "weights"), shared=False, size=size, dtype=torch.uint8)
    whole[5 * mmap.PAGESIZE + 7] = 3
    wanted = whole.clone()
    release_file_pages(whole)
    assert resident(whole) == mmap.PAGESIZE
    assert torch.equal(whole, wanted)


@linux
def test_memory_of_no_file_stays() -> None:
    whole = torch.from_numpy(np.frombuffer(mmap.mmap(-1, PAGES * mmap.PAGESIZE), dtype=np.uint8))
    whole.fill_(7)
    alone = torch.full((PAGES * mmap.PAGESIZE,), 7, dtype=torch.uint8)
    for tensor in (whole, alone):
        release_file_pages(tensor)
        assert bool((tensor == 7).all())


def test_what_does_not_go_with_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConsumeUnavailable, match="weights='int8'"):
        wrapped(tiny_llama(), weights="int8")
    with pytest.raises(CannotSave, match="which are gone"):
        wrapped(tiny_llama()).save(tmp_path / "package")
