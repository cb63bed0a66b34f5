"""MTP modules draft what transformers' own ``generate(use_mtp=True)`` drafts, of DeepSeek-V3's, GLM-4.5's and Mellum's
layers; of Qwen3-Next's and Qwen3.5's layers, what its modules draft after its own forward over each text.

``generate`` of transformers 5.23 refuses assistance for recurrent models, and their configs have no number of modules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from speccompile.heads import MtpHead
from support.eagle3_specs import drafted
from support.families import model_of
from support.mtp_specs import mtp
from support.published_mtp import keys_of, write
from support.tiny import admitted, greedy, random_prompt

NEW = 24
#: By family: the layout of its checkpoints, and how many modules they have here.
FAMILIES = {"deepseek_v3": ("deepseek", 2), "glm4_moe": ("deepseek", 1), "mellum": ("qwen", 1)}
RECURRENT = {"qwen3_next": ("qwen", 1), "qwen3_5_text": ("qwen", 1)}
#: Types of the target's layers and of the module's, where a config has them.
LAYER_TYPES = {
    # The module's layer has a window, and rotary parameters that only targets with such layers hold.
    "mellum": (["sliding_attention", "full_attention"], "sliding_attention"),
    # transformers makes a module's norms of the kind of the first one in the target's last layer.
    "qwen3_next": (["linear_attention", "full_attention"], "full_attention"),
    "qwen3_5_text": (["linear_attention", "full_attention"], "full_attention"),
}


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A model in whose folder are random modules."""
    layout, modules = (FAMILIES | RECURRENT)[request.param]
    types, module_type = LAYER_TYPES.get(request.param, (None, None))
    model = model_of(request.param, **({"layer_types": types} if types else {}))
    model.config.num_mtp_layers = modules
    if types:
        # As a config that is made with a module has them.
        model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = [module_type], ["sparse"]
    layers = len(model.get_decoder().layers)
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, model, keys_of(MtpHead.random(model, modules), layout, layers))
    loaded = type(model).from_pretrained(folder).eval()
    loaded.generation_config = model.generation_config
    if layout == "deepseek":
        # The patterns name the layers of the published models; these are after fewer.
        loaded._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + index}\." for index in range(modules)]
    return loaded


def drafts_of_transformers(
    model: PreTrainedModel, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[int]]:
    """Its draft tokens after each text, by the text's length."""
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


@pytest.mark.parametrize("target", FAMILIES, indirect=True)
def test_the_same_drafts(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = target.config.num_mtp_layers
    with mtp(target, None, tiers=(0, modules), max_batch=1, max_len=44) as spec:
        shared = 0
        # After prompts shorter than the number of modules its generator cannot set its caches back.
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


@pytest.mark.parametrize("target", RECURRENT, indirect=True)
def test_the_same_drafts_after_the_hidden_states_of_a_recurrent_target(target: PreTrainedModel) -> None:
    module = MtpModel.from_pretrained(target)

    @torch.no_grad()
    def wanted(text: list[int]) -> list[int]:
        """Nothing of it was ever drafted, or taken back."""
        ids, positions = torch.tensor([text]), torch.arange(1, len(text))[None]
        states = target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=target.config.get_mtp_config())
        drafts: list[int] = module(ids[:, 1:], states, None, positions, cache)[0][0].tolist()
        return drafts

    with mtp(target, None, tiers=(0, 1), max_batch=1, max_len=44) as spec:
        compared = 0
        for length in (1, 3, 20):
            prompt = random_prompt(length, seed=length, vocab=100)
            request = admitted(spec.engine, prompt, max_new_tokens=NEW)
            while not request.finished:
                if len(request.new_tokens) < NEW - 1:
                    assert drafted(spec, request.slot, 1)[0] == wanted(prompt + request.new_tokens)
                    compared += 1
                spec.engine.step()
            assert request.new_tokens == greedy(target, prompt, NEW)
        assert compared > 40


@pytest.mark.parametrize("target", RECURRENT, indirect=True)
def test_transformers_refuses_assistance_for_a_recurrent_target(target: PreTrainedModel) -> None:
    """Once it does not, its ``generate`` is the better reference."""
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, use_mtp=True)
