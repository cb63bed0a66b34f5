"""MLP speculators and Hydra heads: in steps they draft what the papers' heads draft; their files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, wrap
from speccompile.errors import HeadKeys, InvalidHead, InvalidOption, InvalidTiers
from speccompile.heads import HydraHeads, MlpSpeculator, load_hydra, load_mlp_speculator
from speccompile.modes.auto import head_kind
from speccompile.modes.path_heads import PathHeads
from support.errors import raises
from support.path_heads import Logits, chain_of, hydra, mlp_speculator
from support.shape_texts import texts_by_shapes
from support.tiny import admitted, greedy, tiny_llama

VOCAB, HIDDEN, KMAX = 128, 64, 3
TREE = Tree.dynamic(nodes=6, depth=3, branches=3)
STATIC = Tree.static([(0,), (1,), (0, 0), (0, 0, 0)])
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(20, 60))]
SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 80, "backend": "eager", "policy": "fixed:0"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Whose final norm changes what it reads."""
    model = tiny_llama(vocab=VOCAB, layers=3)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0, generator=torch.Generator().manual_seed(0))
    return model


def shaken(heads: Any) -> Any:
    """With norms and biases that matter."""
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(0.5, 0.5, generator=generator)
    return heads


VARIANTS = ("mlp", "mlp tied", "mlp scaled", "hydra", "hydra ungrounded", "hydra inner layer")


def made(model: LlamaForCausalLM, variant: str) -> tuple[str, PathHeads, Logits]:
    """Mode, heads, and the papers' logits."""
    if variant.startswith("mlp"):
        how = {"tied": variant != "mlp", "scale_input": "scaled" in variant}
        speculator = shaken(MlpSpeculator.random(model, KMAX, 48, **how))
        weights = dict(speculator.state_dict())
        plain = mlp_speculator(weights, KMAX, tied=how["tied"], scaled=how["scale_input"])
        return "mlp_speculator", speculator, plain
    grounded = "ungrounded" not in variant
    heads = shaken(HydraHeads.random(model, KMAX, 2, grounded=grounded))
    heads.offset = 1 if "inner" in variant else 0
    embedding = model.model.embed_tokens.weight.detach()
    return "hydra", heads, hydra(dict(heads.state_dict()), 2, embedding, grounded=grounded)


def hidden_of(model: LlamaForCausalLM, text: list[int], offset: int = 0) -> torch.Tensor:
    """The hidden state ``[M]`` before the newest token. transformers' last one is that after the final norm."""
    with torch.no_grad():
        return model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1 - offset][0, -2]


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, model: LlamaForCausalLM) -> Iterator[tuple[Speculator, PathHeads, Logits]]:
    mode, heads, plain = made(model, request.param)
    tiers = (0, 1, KMAX, STATIC, TREE) if request.param in ("mlp tied", "hydra") else (0, 1, KMAX)
    with wrap(model, mode, draft=heads, tiers=tiers, **SIZES) as spec:
        yield spec, heads, plain


def test_drafts_are_those_of_the_papers_heads(
    model: LlamaForCausalLM, case: tuple[Speculator, PathHeads, Logits]
) -> None:
    spec, heads, plain = case
    offset = getattr(heads, "offset", 0)
    for prompt in PROMPTS:
        request = admitted(spec.engine, prompt, max_new_tokens=24)
        for tier in (0, KMAX, 1, KMAX):
            text = [*prompt, *request.new_tokens]
            expected = chain_of(plain, hidden_of(model, text, offset), text[-1], KMAX)
            assert spec.arena["draft_tokens"][request.slot, :KMAX].tolist() == expected
            spec.set_tier(tier)
            spec.engine.step()
        request.cancel()
        spec.engine.step()


@pytest.mark.parametrize("case", ["mlp tied", "hydra"], indirect=True)
def test_a_tree_has_the_likeliest_tokens_of_each_level(
    model: LlamaForCausalLM, case: tuple[Speculator, PathHeads, Logits]
) -> None:
    """Of each level the likeliest tokens are read next, and the likeliest of all are proposed."""
    spec, _, plain = case
    request = admitted(spec.engine, PROMPTS[0], max_new_tokens=24)
    text = [*PROMPTS[0], *request.new_tokens]
    hidden, nodes = hidden_of(model, text), int(TREE)
    level, everything = {(): 0.0}, {}
    for depth in range(KMAX):
        below = {}
        for path, chance in level.items():
            best = plain(hidden, [text[-1], *path]).log_softmax(-1).topk(6)
            for token, share in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                below[*path, token] = chance + share
        everything |= below
        level = dict(sorted(below.items(), key=lambda item: -item[1])[: -(-nodes // KMAX)])
        assert depth < KMAX
    expected = set(sorted(everything, key=lambda path: -everything[path])[:nodes])
    count = int(spec.arena["tree_count"][request.slot])
    paths: list[tuple[int, ...]] = [()]
    for node in range(count):
        parent, token = (int(spec.arena[name][request.slot, node]) for name in ("tree_parents", "tree_tokens"))
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == expected
    request.cancel()
    spec.engine.step()


@pytest.mark.parametrize("case", ["mlp tied", "hydra"], indirect=True)
def test_the_text_is_the_targets(model: LlamaForCausalLM, case: tuple[Speculator, PathHeads, Logits]) -> None:
    expected = [greedy(model, prompt, 20) for prompt in PROMPTS]
    for shapes in ((KMAX,), (TREE,), (STATIC,), (0, KMAX, TREE, STATIC)):
        assert texts_by_shapes(case[0], PROMPTS, (20, 20, 20), shapes, 0) == expected


# --- files ---------------------------------------------------------------------------------------


def mlp_files(folder: Path, heads: MlpSpeculator, *, copies: bool = False, **config: Any) -> Path:
    """In the layout of IBM's repositories."""
    tensors = {f"speculator.{key}": value.clone() for key, value in heads.state_dict().items()}
    if copies:
        for part, first in (("emb", 0), ("proj", 1), ("head", 0), ("ln", 0)):
            for stage in range(first + 1, heads.count):
                for last in ("weight", "bias")[: 2 if part == "ln" else 1]:
                    tensors[f"speculator.{part}.{stage}.{last}"] = tensors[f"speculator.{part}.{first}.{last}"].clone()
    sizes = {"emb_dim": HIDDEN, "inner_dim": heads.inner_size, "vocab_size": VOCAB, "n_predict": heads.count}
    own = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_candidates": 5}
    own |= {"tie_weights": heads.tied, "scale_input": heads.scale_input, "top_k_tokens_per_head": [4, 3, 2]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(own | sizes | config))
    return folder


@pytest.mark.parametrize("copies", [False, True])
def test_ibm_s_layout_is_read(model: LlamaForCausalLM, tmp_path: Path, copies: bool) -> None:
    heads = MlpSpeculator.random(model, KMAX, 48, tied=copies, scale_input=True)
    shapes = {key: tuple(value.shape) for key, value in heads.state_dict().items()}
    assert shapes["proj.0.weight"] == (48, HIDDEN) and shapes["proj.1.weight"] == (48, 48)
    assert shapes["emb.0.weight"] == shapes["head.0.weight"] == (VOCAB, 48)
    assert shapes["ln.0.bias"] == (48,) and ("emb.2.weight" in shapes) == (not copies)
    loaded = load_mlp_speculator(mlp_files(tmp_path, heads, copies=copies), model)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in heads.state_dict().items())
    assert (loaded.scale_input, loaded.tied, loaded.count) == (True, copies, KMAX)
    assert head_kind(tmp_path) == ("mlp_speculator", 0)
    with wrap(model, "mlp_speculator", draft=tmp_path, tiers=(0, KMAX), **SIZES) as spec:
        assert "MLP speculator of 3 stages" in spec.explain()


def test_an_inner_size_of_0_is_the_hidden_size(model: LlamaForCausalLM, tmp_path: Path) -> None:
    heads = MlpSpeculator.random(model, 2)
    assert load_mlp_speculator(mlp_files(tmp_path, heads, inner_dim=0), model).inner_size == HIDDEN


def test_other_speculators_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    heads = MlpSpeculator.random(model, KMAX, 48, tied=True)

    def load(name: str, **config: Any) -> MlpSpeculator:
        return load_mlp_speculator(mlp_files(tmp_path / name, heads, **config), model)

    with raises(InvalidHead, reason="model_type in its config must be 'mlp_speculator', got 'llama'"):
        load("kind", model_type="llama")
    with raises(InvalidHead, reason="it is for another target: it must have M, V = 64, 128, got 64, 129"):
        load("target", vocab_size=129)
    with raises(InvalidHead, reason="n_predict in its config must be a size, got None"):
        load("sizes", n_predict=None)
    with raises(HeadKeys, problems=re.compile(r"missing: emb.1.weight \[128, 48\]")):
        load("untied", tie_weights=False)
    with raises(HeadKeys, problems=re.compile(r"emb.0.weight is \[128, 48\] and must be \[128, 40\]")):
        load("inner", inner_dim=40)
    folder = mlp_files(tmp_path / "copy", heads, copies=True)
    tensors = {f"speculator.{key}": value.clone() for key, value in heads.state_dict().items()}
    save_file(tensors | {"speculator.ln.2.bias": torch.ones(48)}, folder / "model.safetensors")
    with raises(InvalidHead, reason="its config has tie_weights=true, and ln.2.bias differs from ln.0.bias"):
        load_mlp_speculator(folder, model)
    (folder / "model.safetensors").write_bytes(b"1234")
    with raises(InvalidHead, reason=re.compile("its weights cannot be read")):
        load_mlp_speculator(folder, model)


def hydra_files(folder: Path, heads: HydraHeads, *, embedding: bool, **config: Any) -> Path:
    """As zankner/Hydra saves them."""
    tensors = {key: value for key, value in heads.state_dict().items() if embedding or "input_embed" not in key}
    own = {"hydra_num_heads": heads.count, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
    own |= {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "hidden_state_offset": 0}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "hydra_lm_head.pt")
    (folder / "config.json").write_text(json.dumps(own | config))
    return folder


@pytest.mark.parametrize("bias", [False, True])
def test_hydra_s_layout_is_read(model: LlamaForCausalLM, tmp_path: Path, bias: bool) -> None:
    heads = HydraHeads.random(model, KMAX, 2, bias=bias)
    shapes = {key: tuple(value.shape) for key, value in heads.state_dict().items()}
    assert shapes["hydra_mlp.2.0.linear.weight"] == (HIDDEN, 4 * HIDDEN)
    assert shapes["hydra_mlp.2.0.res_connection.bias"] == (HIDDEN,)
    assert shapes["hydra_mlp.2.1.linear.weight"] == (HIDDEN, HIDDEN)
    assert ("hydra_lm_head.2.bias" in shapes) == bias
    loaded = load_hydra(hydra_files(tmp_path, heads, embedding=bias, hidden_state_offset=1), model)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in heads.state_dict().items())
    assert loaded.offset == 1 and head_kind(tmp_path) == ("Hydra", 0)


def test_other_hydra_heads_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    heads = HydraHeads.random(model, KMAX, 2)
    reason = "its config has hydra_head_arch='prefix-mlp', and only heads of the kind 'mlp' are supported"
    with raises(InvalidHead, reason=reason):
        load_hydra(hydra_files(tmp_path / "prefix", heads, embedding=True, hydra_head_arch="prefix-mlp"), model)
    with raises(HeadKeys, problems=re.compile(r"hydra_mlp.0.0.linear.weight is \[64, 128\] and must be \[64, 64\]")):
        load_hydra(hydra_files(tmp_path / "ungrounded", heads, embedding=False, grounded_heads=False), model)
    with raises(HeadKeys, problems=re.compile("missing: hydra_lm_head.3.weight")):
        load_hydra(hydra_files(tmp_path / "heads", heads, embedding=True, hydra_num_heads=4), model)


@pytest.mark.parametrize("mode", ["mlp_speculator", "hydra"])
def test_heads_that_do_not_fit_are_refused(model: LlamaForCausalLM, mode: str) -> None:
    def heads(target: LlamaForCausalLM) -> PathHeads:
        return (MlpSpeculator if mode == "mlp_speculator" else HydraHeads).random(target, KMAX)  # type: ignore

    sizes: dict[str, Any] = {"backend": "eager", "max_len": 40}
    with raises(InvalidTiers, reason=re.compile(f"at most {KMAX}")):
        wrap(model, mode, draft=heads(model), tiers=(0, KMAX + 1), **sizes)
    with raises(InvalidOption, name="draft", value=None):
        wrap(model, mode, **sizes)
    with raises(InvalidHead, reason=re.compile("torch.float64")):
        wrap(model, mode, draft=heads(model).double(), **sizes)
    with raises(InvalidHead, reason=re.compile("training mode")):
        wrap(model, mode, draft=heads(model).train(), **sizes)
    with raises(InvalidHead, reason=re.compile("M, V = .*got 32, 128")):
        wrap(model, mode, draft=heads(tiny_llama(hidden=32)), **sizes)
