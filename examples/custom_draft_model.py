"""A drafter with a network, in one class: the target's first layers, with KV of their own, draft chains and trees.

Run it: python examples/custom_draft_model.py
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import speccompile
from speccompile import Tree
from speccompile.graph_capture.model_info import ModelInfo, inspect_model
from speccompile.modes import DraftModel, DraftModelMode


@dataclass(frozen=True)
class FirstLayers(DraftModelMode):
    """Drafts with a model of the target's first ``layers`` layers, inside of the step or before it (fused=False)."""

    layers: int = 1

    name: ClassVar[str] = "first_layers"

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DraftModel:
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = self.layers
        with torch.device("meta"):
            draft = type(model)(config)
        shared = {name: value for name, value in model.state_dict().items() if name in draft.state_dict()}
        draft.load_state_dict(shared, assign=True)
        draft.model.rotary_emb = model.model.rotary_emb  # no weight, so it is not in the state dict
        return DraftModel(draft.eval(), inspect_model(draft), max_len, self.draft_form)

    def explain(self) -> str:
        return f"a model of the target's first {self.layers} layers drafts"


def main() -> None:
    speccompile.register_mode("first_layers", FirstLayers, replace=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, initializer_range=0.1, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(config.vocab_size, (2, 12))
    options = {"tiers": (0, 3, Tree.dynamic(nodes=5, depth=3, branches=2)), "max_batch": 2, "max_len": 96}
    for fused in (True, False):
        with speccompile.wrap(model, "first_layers", fused=fused, backend="eager", **options) as spec:
            for shape in spec.engine.draft_lens:
                spec.set_tier(shape)
                assert spec.check(prompt, max_new_tokens=40), "speculation changed the text"
                spec.generate(prompt, max_new_tokens=40, do_sample=True, seed=0)
            print(f"fused={fused}: same text; acceptance length {spec.stats.acceptance_length:.2f}")


if __name__ == "__main__":
    main()
