"""A report holds what was built, and its numbers fit one another."""

from __future__ import annotations

import json
import math

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.errors import InvalidOption, InvalidTrace
from speccompile.report.names import short_names
from speccompile.report.program_data import Node, Program
from speccompile.utils.devices import MOVE
from speccompile.utils.progress import listening
from support.errors import raises
from support.families import model_of
from support.gpus import pretend_gpus
from support.reports import PROMPT, TREE, tiny_report, tree_report
from support.tiny import tiny_llama


def until(node: Node) -> float:
    return math.inf if node.until is None else node.until


def finished(program: Program) -> list[str]:
    return [node.name for node in program.nodes if node.until is None]


def test_it_is_plain_data() -> None:
    report = tiny_report()
    data = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert data["format"] == report.format
    assert [tier["name"] for tier in data["tiers"]] == ["K=0", "K=1", "K=3"]
    assert "def step(" in data["tiers"][0]["program"]["stages"][-1]["python"]


def test_the_regions_of_a_step_add_up_to_its_time() -> None:
    for tier in tiny_report().tiers:
        assert tier.measured is not None
        inside = sum(cost.ms or 0.0 for cost in tier.regions if cost.region != "host")
        assert inside == pytest.approx(tier.measured.step_ms, rel=1e-6)
        assert all((cost.ms or 0.0) >= 0 for cost in tier.regions)


def test_every_part_of_a_step_is_a_region() -> None:
    regions = {cost.region for cost in tiny_report().tiers[-1].regions}
    assert regions >= {
        *("draft", "inputs", "embedding", "qkv", "attention", "projection", "mlp"),
        *("lm_head", "choose", "commit", "propose", "host"),
    }
    assert "layers" not in regions


def test_a_step_reads_each_weight_of_its_linears_once() -> None:
    model, tier = tiny_llama(), tiny_report().tiers[0]
    read = {cost.region: cost.nbytes for cost in tier.regions}
    layer = model.model.layers[0]
    linears = [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    mlp = sum(linear.weight.nbytes for linear in linears) + layer.post_attention_layernorm.weight.nbytes
    assert read["mlp"] == 2 * mlp
    assert read["projection"] == 2 * layer.self_attn.o_proj.weight.nbytes
    assert read["lm_head"] == model.lm_head.weight.nbytes + model.model.norm.weight.nbytes
    # Keys and values, 2 layers, 2 heads of 16 float32 numbers; beside them the row's slot and position.
    assert tier.measured is not None
    assert read["attention"] == pytest.approx(2 * 2 * tier.measured.context * 2 * 16 * 4, abs=100)


def test_a_step_reads_the_weights_of_as_many_experts_as_its_tokens_can_choose() -> None:
    """One of four for each token. The model reads them through views."""
    model = model_of("dbrx")
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_len=40, backend="eager") as spec:
        one, four = ({cost.region: cost.nbytes for cost in tier.regions} for tier in spec.report(measure=False).tiers)
    experts = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
    # Beside them the router and the norms, and a few bytes for each token.
    rest = sum(weight.nbytes for name, weight in model.named_parameters() if ".router." in name or ".norm_2." in name)
    assert one["mlp"] == pytest.approx(experts / 4 + rest, rel=0.01)
    assert four["mlp"] == pytest.approx(experts + rest, rel=0.01)


def test_of_rounded_experts_it_reads_those_of_their_packs(native: None) -> None:
    options = {"tiers": (0, 3), "max_len": 40, "backend": "eager", "weights": {"*": "same", "experts": "int4"}}
    with speccompile.wrap(model_of("mixtral"), "ngram", **options) as spec:
        packs = [pack for pack in spec._build.packs if pack.experts is not None]
        one, four = ({cost.region: cost.nbytes for cost in tier.regions} for tier in spec.report(measure=False).tiers)
    # Two of four for each token.
    experts = sum(pack.nbytes for pack in packs)
    assert four["mlp"] - one["mlp"] == pytest.approx(experts / 2, rel=0.02)


def test_nodes_come_and_go_with_the_passes_that_added_and_removed_them() -> None:
    report = tiny_report()
    for program in (report.model, *(tier.program for tier in report.tiers)):
        first = 0 if program is report.model else -1
        for index, stage in enumerate(program.stages):
            present = [node for node in program.nodes if node.since <= index < until(node)]
            assert len(present) == stage.nodes, stage.name
            if index > 0:
                came = sum(node.since == index for node in program.nodes)
                went = sum(node.until == index for node in program.nodes)
                before = program.stages[index - 1].nodes
                assert before + came - went == stage.nodes
        assert all(node.since >= first for node in program.nodes)
        names = finished(program)
        assert len(names) == len(set(names))


def test_buffers_name_their_readers_and_writers() -> None:
    tier = tiny_report().tiers[-1]
    assert {"tokens", "length", "k_0", "draft_tokens"} <= set(tier.buffers_written)
    assert {"tokens", "slots", "v_1", "draft_lens"} <= set(tier.buffers_read)
    groups = {buffer.name: buffer.group for buffer in tiny_report().buffers}
    named = {name: groups[name] for name in ("k_0", "tokens", "draft_tokens", "temperature", "emitted")}
    assert list(named.values()) == ["KV", "sequence", "drafter", "sampling", "host"]


def test_prompts_are_decoded_at_each_tier() -> None:
    report = tiny_report()
    for tier in report.tiers:
        decoded = tier.decoded
        assert decoded is not None and decoded.prompts == 2
        # A step emits the first token only where the prompt's KV is there already.
        assert 2 * 15 <= decoded.tokens <= 2 * 16
        assert decoded.tokens_per_second > 0
        assert decoded.own_steps == decoded.tier_steps.get(tier.name, 0)
    assert report.tiers[0].decoded is not None and report.tiers[0].decoded.own_length == 1.0
    assert report.trace is not None
    largest = report.tiers[-1].decoded
    assert largest is not None and len(report.trace.steps) == largest.steps


def test_decoding_leaves_the_policy_as_it_was() -> None:
    with speccompile.wrap(tiny_llama(), tiers=(0, 1), max_len=64, backend="eager", policy="ema") as spec:
        policy = spec.policy
        shown: list[str] = []
        with listening(lambda what, begins: shown.append(what) if begins else None):
            report = spec.report(measure=False, prompts=[PROMPT], max_new_tokens=4)
        assert shown[0] == "decode the prompts at each tier"
        assert spec.policy is policy
        assert report.tiers[-1].measured is None and report.tiers[-1].decoded is not None
        with raises(InvalidOption, name="measure"):
            spec.report(measure=1)  # type: ignore[arg-type]
        with raises(InvalidOption, name="kind", value="sampled"):
            spec.report(kind="sampled")
        with pytest.raises(InvalidTrace):
            spec.report(trace="no/such/trace")


def test_measuring_changes_nothing_of_a_live_request() -> None:
    with speccompile.wrap(tiny_llama(), tiers=(0, 3), max_len=64, backend="eager") as spec:
        expected = spec.generate(torch.tensor([PROMPT]), max_new_tokens=12)[0, len(PROMPT) :].tolist()
        request = spec.engine.submit(PROMPT, max_new_tokens=12)
        while len(request.new_tokens) < 3:
            spec.engine.step()
        spec.report()
        assert request.result().token_ids == expected


def test_a_tree_is_a_tier() -> None:
    tier = tree_report().tiers[-1]
    assert tier.tree is not None and tier.tree.parents == TREE.parents
    assert tier.name == "tree of 5, depth 3" and tier.draft_len == 5
    assert "node" not in tier.name and tier.measured is not None
    assert tier.cost is not None and tree_report().trace is None


def test_tiers_have_names_of_their_own() -> None:
    trees = [Tree.dynamic(5, 3, branches) for branches in (2, 3, 5)]
    names = short_names([0, 5, TREE, *reversed(trees)])
    assert [names[tree] for tree in trees] == [f"dynamic tree of 5, depth 3{number}" for number in ("", " (2)", " (3)")]
    assert names[TREE] == "tree of 5, depth 3" and len(set(names.values())) == len(names) == 6


def test_memory_counts_every_tensor_once() -> None:
    model, report = tiny_llama(), tiny_report()
    by_group: dict[str, int] = {}
    for item in report.memory.items:
        by_group[item.path[0]] = by_group.get(item.path[0], 0) + item.nbytes
    weights = sum(weight.nbytes for weight in model.parameters())
    # The frequencies of the rotary embedding are a buffer.
    assert by_group["model"] - weights in (0, model.model.rotary_emb.inv_freq.nbytes)
    assert by_group["arena"] == sum(buffer.nbytes for buffer in report.buffers)
    # 2 layers of keys and values, 2 heads of 16 float32 numbers.
    assert report.memory.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_fallbacks_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr("speccompile.report.fallbacks.known_spare", lambda: tmp_path)
    with speccompile.wrap(tiny_llama(), tiers=(0,), max_len=64, backend="eager") as spec:
        report = spec.report(measure=False)
    whats = [item.what for item in report.fallbacks]
    assert whats[0].startswith("Steps run op by op")
    assert "Every process builds this wrap again" in whats
    assert report.verdict[-1].startswith(f"{len(whats)} fallbacks: ")


def test_a_gpu_that_stands_idle_is_the_first_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    with speccompile.wrap(tiny_llama(), tiers=(0,), max_len=64, backend="eager") as spec:
        first, explanation = spec.report(measure=False).fallbacks[0], spec.explain()
        pretend_gpus(monkeypatch, 0)
        assert "GPU" not in spec.explain()
    assert first.what == "Steps run on the CPU, and no GPU is used"
    assert (first.reason, first.advice) == ("the model is on the CPU; torch finds one GPU", f"{MOVE}.")
    assert f"torch finds one GPU; {MOVE}" in explanation
