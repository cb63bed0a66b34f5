"""MTP modules draft what transformers' own ``generate(use_mtp=True)`` drafts, of DeepSeek-V3's, GLM-4.5's and Mellum's
layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator

from speccompile.heads import MtpHead
from support.eagle3_specs import drafted
from support.families import model_of
from support.mtp_specs import mtp
from support.published_mtp import keys_of, write
from support.tiny import admitted, greedy, random_prompt

NEW = 24
#: By family: the layout of its checkpoints, and how many modules they have here.
FAMILIES = {"deepseek_v3": ("deepseek", 3), "glm4_moe": ("deepseek", 3), "mellum": ("qwen", 1)}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A model in whose folder are random modules."""
    layout, modules = FAMILIES[request.param]
    # The module's layer has a window, and rotary parameters that only targets with such layers hold.
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if layout == "qwen" else {}
    model = model_of(request.param, **kinds)
    model.config.num_nextn_predict_layers = modules
    if layout == "qwen":
        # As a config that is made with a module has them.
        model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = ["sliding_attention"], ["sparse"]
    layers = len(model.get_decoder().layers)
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, model, keys_of(MtpHead.random(model, modules), layout, layers))
    loaded = type(model).from_pretrained(folder).eval()
    loaded.generation_config = model.generation_config
    if layout == "deepseek":
        # The patterns name the layers of the published models; these are behind fewer.
        loaded._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + index}\." for index in range(modules)]
    return loaded


def drafts_of_transformers(
    model: PreTrainedModel, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[int]]:
    """Its draft tokens behind each text, by the text's length."""
    found: dict[int, list[int]] = {}
    own = MTPCandidateGenerator.get_candidates

    def get_candidates(self: MTPCandidateGenerator, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = own(self, input_ids, *args, **kwargs)
        length = input_ids.shape[1]
        if candidates.shape[1] > length:
            found[length] = candidates[0, length:].tolist()
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    ids = torch.tensor([prompt])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, use_mtp=True)
    assert text[0, len(prompt) :].tolist() == greedy(model, prompt, NEW)
    return found


def test_the_same_drafts(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = target.config.num_mtp_layers
    with mtp(target, None, tiers=(0, modules), max_batch=1, max_len=44) as spec:
        shared = 0
        # Behind prompts shorter than the number of modules its generator cannot set its caches back.
        for length in (3, 4, 20):
            prompt = random_prompt(length, seed=length, vocab=100)
            wanted = drafts_of_transformers(target, prompt, monkeypatch)
            request = admitted(spec.engine, prompt, max_new_tokens=NEW)
            while not request.finished:
                text = prompt + request.new_tokens
                room = min(modules, NEW - len(request.new_tokens) - 1)
                if len(text) in wanted and room == modules:
                    assert drafted(spec, request.slot, modules)[0] == wanted[len(text)]
                    shared += 1
                spec.engine.step()
            assert request.new_tokens == greedy(target, prompt, NEW)
        assert shared > 40
