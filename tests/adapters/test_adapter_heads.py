"""Draft heads of adapters: each request drafts with the head of its adapter, and its text is that of the adapter."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from speccompile import Adapters, Speculator, Tree, load, wrap
from speccompile.acceptance import Forced
from speccompile.backends import Eager
from speccompile.errors import InvalidAdapter, InvalidOption
from speccompile.heads import Eagle3Head, EagleHead, MtpHead, save_eagle3
from speccompile.modes.network.draft_head import HeadCache
from speccompile.modes.network.head_probe import HeadProbe
from speccompile.training import OnlineTraining
from support.as_on_cuda import as_on_cuda
from support.errors import raises
from support.lora import lora_config, own_text, with_adapters

TINY = {"vocab": 32, "layers": 4}
PROMPT, NEW = [1, 2, 3, 1, 2, 3], 40
TREE = Tree.dynamic(nodes=6, depth=3, branches=2)


@pytest.fixture(scope="module")
def adapted(model: LlamaForCausalLM) -> PeftModel:
    return with_adapters({"one": lora_config(), "two": lora_config()}, copy.deepcopy(model))


def random_heads(model: LlamaForCausalLM, mode: str) -> tuple[Any, Any]:
    """Two heads of the mode with different linears, norms and biases."""
    kinds: dict[str, Any] = {
        "eagle": lambda seed: EagleHead.random(model, seed),
        "mtp_eagle_one_model": lambda seed: MtpHead.random(model, 1, seed),
    }
    make = kinds.get(mode, lambda seed: Eagle3Head.random(model, seed, taps=(0, 1, 2)))
    heads = make(0), make(1)
    for seed, head in enumerate(heads):
        torch.manual_seed(seed)
        target = {parameter.data_ptr() for parameter in model.parameters()}
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 1 and parameter.data_ptr() not in target:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return heads


def wrapped(
    model: LlamaForCausalLM, head: nn.Module | Path, mode: Any = "eagle3_one_model", **options: Any
) -> Speculator:
    given: dict[str, Any] = {"tiers": (0, 3), "max_batch": 3, "max_len": 64, "backend": "eager", "policy": "fixed:3"}
    return wrap(model, mode, draft=head, **given | {"adapters": Adapters(2, head_rank="full")} | options)


def drafted(spec: Speculator, adapter: str | None) -> tuple[list[int], int, int]:
    """The text of a request, and the numbers of its drafts and of the accepted ones."""
    spec.stats.reset()
    request = spec.engine.submit(PROMPT, adapter=adapter, max_new_tokens=NEW, eos_token_id=[])
    return request.result().token_ids, spec.stats.draft_tokens, spec.stats.accepted_tokens


@torch.no_grad()
def fitted(head: Eagle3Head, adapted: PeftModel, adapter: str) -> Eagle3Head:
    """``head`` with an lm_head that predicts each next token of the adapter's text from the target's hidden states."""
    text = torch.tensor([[*PROMPT, *own_text(adapted, adapter, PROMPT, NEW)]])
    adapted.set_adapter(adapter)
    states = adapted(text, output_hidden_states=True).hidden_states
    tapped = torch.cat([states[tap + 1] for tap in head.config.taps], dim=-1)[:, :-1]
    shape = head.kv[0]
    kv = [{0: torch.zeros(1, text.shape[1], *size)} for size in (shape.key, shape.value)]
    positions = torch.arange(text.shape[1] - 1)[None]
    hidden = head(text[:, 1:], positions, tapped, HeadCache(*kv, torch.tensor([0]), positions))["hidden"]
    read, following = head.norm(hidden)[0, :-1], text[0, 2:]
    new = copy.deepcopy(head)
    wanted = nn.functional.one_hot(following, head.config.vocab_size).float()
    new.lm_head.weight = nn.Parameter(torch.linalg.lstsq(read, wanted).solution.t().contiguous(), requires_grad=False)
    return new


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_request_drafts_with_the_head_of_its_adapter(
    model: LlamaForCausalLM, adapted: PeftModel, backend: str
) -> None:
    """A head that was fitted to the adapter's text drafts it, and the shared head does not."""
    shared, _ = random_heads(model, "eagle3_one_model")
    with wrapped(model, shared, tiers=(0, 1), policy="fixed:1", backend=backend) as spec:
        for name in ("one", "two"):
            adapted.set_adapter(name)
            spec.add_adapter(name, adapted, head=fitted(shared, adapted, name) if name == "one" else None)
        text, drafts, accepted = drafted(spec, "one")
        assert text == own_text(adapted, "one", PROMPT, NEW) and accepted > 0.9 * drafts
        text, drafts, accepted = drafted(spec, "two")
        assert text == own_text(adapted, "two", PROMPT, NEW) and accepted < 0.3 * drafts
        assert "for their heads of rank 64 on 9 linears" in spec.explain()


@pytest.mark.parametrize("mode", ["eagle3_one_model", "eagle", "mtp_eagle_one_model"])
def test_the_drafter_computes_what_the_head_of_the_adapter_does(
    model: LlamaForCausalLM, adapted: PeftModel, mode: str
) -> None:
    """By the rows of one adapter, and by those of another without a head."""
    shared, other = random_heads(model, mode)
    adapted.set_adapter("one")
    with as_on_cuda() as backend, wrapped(model, shared, mode=mode, backend=backend) as spec:
        spec.add_adapter("one", adapted, head=other)
        spec.add_adapter("two", adapted)
        assert spec._build is not None and spec._build.drafter is not None
        drafter, arena = spec._build.drafter, spec.engine.arena
        run = Eager("reference").lower(drafter.graph, "the drafter")
        with torch.no_grad():
            for position, head in ((0, other), (1, shared), (-1, shared)):
                arena["adapter"].fill_(position)
                probe = HeadProbe(head, drafter.network, drafter.graph, arena)
                assert probe.difference(run, probe.own()) < 1e-4
        arena["adapter"].fill_(-1)


@pytest.mark.parametrize(
    "mode", ["eagle3", "eagle3_one_model", "eagle", "mtp_eagle_one_model", "suffix+eagle3_one_model"]
)
def test_drafts_are_those_of_a_wrap_with_that_head(model: LlamaForCausalLM, adapted: PeftModel, mode: str) -> None:
    """Chains and trees, beside requests with another head. The rule accepts two drafts a step, whatever they
    are: so the text consists of drafts."""
    shared, other = random_heads(model, mode)
    # Of several drafters, the lookups never pass.
    options: dict[str, Any] = {"mode": mode.split("+"), "min_score": 20.0} if "+" in mode else {"mode": mode}
    options |= {"tiers": (0, 3, TREE), "acceptance": Forced(2)}
    adapted.set_adapter("one")
    with wrapped(model, shared, **options) as spec, wrapped(model, other, **options) as expected:
        spec.add_adapter("one", adapted, head=other)
        spec.add_adapter("two", adapted)
        expected.add_adapter("one", adapted)
        for shape in (3, TREE):
            spec.set_tier(shape)
            expected.set_tier(shape)
            texts = [drafted(spec, name)[0] for name in ("one", "two", None)]
            assert texts[0] == drafted(expected, "one")[0] and texts[0] != texts[1]
            requests = [
                spec.engine.submit(PROMPT, adapter=name, max_new_tokens=NEW, eos_token_id=[])
                for name in ("one", "two", None)
            ]
            assert [request.result().token_ids for request in requests] == texts


def test_a_head_may_be_a_lora_adapter_of_the_shared_one(
    model: LlamaForCausalLM, adapted: PeftModel, tmp_path: Path
) -> None:
    """A folder, a model of peft, and the merged head, whose differences have the rank of the adapter."""
    shared, _ = random_heads(model, "eagle3_one_model")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "fc", "lm_head"], init_lora_weights=False)
    torch.manual_seed(2)
    own = get_peft_model(copy.deepcopy(shared), config).eval()
    own.save_pretrained(str(tmp_path / "lora"))
    merged = copy.deepcopy(own).merge_and_unload()
    adapted.set_adapter("one")
    with wrapped(model, merged) as spec:
        spec.add_adapter("one", adapted)
        expected = drafted(spec, "one")
    with wrapped(model, shared, adapters=Adapters(1, head_rank=4)) as spec:
        for source in (tmp_path / "lora", own, merged):
            spec.add_adapter("one", adapted, head=source)
            assert drafted(spec, "one") == expected
            spec.remove_adapter("one")
        _, whole = random_heads(model, "eagle3_one_model")
        with raises(InvalidAdapter, name="one", reason=re.compile("fc from the shared head has a rank above 4; wrap")):
            spec.add_adapter("one", adapted, head=whole)


def test_a_name_that_returns_has_its_new_head(model: LlamaForCausalLM, adapted: PeftModel, tmp_path: Path) -> None:
    """Known beginnings of sequences are those of the adapter that is loaded. The head is a folder here, and the text
    consists of drafts."""
    shared, other = random_heads(model, "eagle3_one_model")
    save_eagle3(other, tmp_path / "head")
    adapted.set_adapter("one")
    with wrapped(model, shared, adapters=Adapters(1, head_rank="full"), acceptance=Forced(2)) as spec:
        found = []
        for head in (None, tmp_path / "head", None):
            spec.add_adapter("one", adapted, head=head)
            found.append(drafted(spec, "one")[0])
            spec.remove_adapter("one")
    assert found[0] == found[2] != found[1]


def test_a_package_has_memory_for_heads(model: LlamaForCausalLM, adapted: PeftModel, tmp_path: Path) -> None:
    shared, other = random_heads(model, "eagle3_one_model")
    save_eagle3(shared, tmp_path / "head")
    adapted.set_adapter("one")
    with wrapped(model, tmp_path / "head") as spec:
        spec.add_adapter("one", adapted, head=other)
        expected = drafted(spec, "one")
        spec.save(tmp_path / "package")
    with load(tmp_path / "package", model) as spec:
        spec.add_adapter("one", adapted, head=other)
        assert drafted(spec, "one") == expected


def test_heads_that_differ_in_more_than_weights_are_refused(model: LlamaForCausalLM, adapted: PeftModel) -> None:
    shared, _ = random_heads(model, "eagle3_one_model")
    wide, another = Eagle3Head.random(model, intermediate_size=96, taps=(0, 1, 2)), copy.deepcopy(shared)
    another.embed_tokens.weight = nn.Parameter(another.embed_tokens.weight + 1, requires_grad=False)
    broken = copy.deepcopy(shared)
    broken.lm_head.weight = nn.Parameter(broken.lm_head.weight * torch.nan, requires_grad=False)
    cases: list[tuple[nn.Module, str]] = [
        (wide, "its intermediate_size must be 128, as in the shared head, got 96"),
        (shared.with_taps((0, 1, 1)), r"its taps must be \(0, 1, 2\), as in the shared head, got \(0, 1, 1\)"),
        (another, "its embed_tokens.weight must be that of the shared head"),
        (broken, "its lm_head has numbers that are not finite"),
    ]
    adapted.set_adapter("one")
    with wrapped(model, shared) as spec:
        for head, reason in cases:
            with raises(InvalidAdapter, name="one", source="head a Eagle3Head", reason=re.compile(reason)):
                spec.add_adapter("one", adapted, head=head)
        with raises(InvalidOption, where="mode 'eagle3_one_model'", name="draft"):
            spec.add_adapter("one", adapted, head=EagleHead.random(model))
        assert spec.adapters == ()
    with (
        wrapped(model, shared, adapters=Adapters(1)) as spec,
        raises(InvalidOption, where="add_adapter", name="head", reason=re.compile("head_rank")),
    ):
        spec.add_adapter("one", adapted, head=shared)


def test_modes_without_such_a_head_are_refused(model: LlamaForCausalLM) -> None:
    adapters, refused = Adapters(1, head_rank=4), re.compile("is not a head that reads its own output")
    with raises(InvalidOption, where="wrap", name="adapters", reason=refused):
        wrap(model, "ngram", backend="eager", adapters=adapters)
    with raises(InvalidOption, where="wrap", name="adapters", reason=refused):
        wrapped(model, Eagle3Head.random(model, taps=(0, 1, 2), mask_token_id=3), adapters=adapters)
    shared, _ = random_heads(model, "eagle3_one_model")
    with raises(InvalidOption, where="wrap", name="adapters", reason=re.compile("which learns")):
        wrapped(model, shared, adapters=adapters, learn=OnlineTraining())


@pytest.mark.parametrize("rank", [0, "most", 1.5])
def test_a_bad_head_rank_is_refused(rank: Any) -> None:
    with raises(InvalidOption, where="Adapters", name="head_rank"):
        Adapters(1, head_rank=rank)
