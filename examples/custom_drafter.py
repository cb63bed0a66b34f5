"""A drafter of your own: one class, made known from outside, and the text stays what it was.

Run it: python examples/custom_drafter.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import speccompile
from speccompile.modes import ReadyMode


@dataclass(frozen=True)
class BigramWalk(ReadyMode):
    """Drafts, token by token, what followed that token when the row's own text last had it."""

    name: ClassVar[str] = "bigram_walk"

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain PyTorch on ``tokens [B, S]`` and ``length [B]``; it becomes part of the compiled step."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        has_successor = places < length[:, None] - 1
        token = tokens.gather(1, (length - 1).clamp(min=0)[:, None])
        drafts, lens, known = [], torch.zeros_like(length), torch.ones_like(length, dtype=torch.bool)
        for _ in range(draft_len):
            latest = torch.where((tokens == token) & has_successor, places, -1).amax(1, keepdim=True)
            known = known & (latest[:, 0] >= 0)
            token = tokens.gather(1, (latest + 1).clamp(max=tokens.shape[1] - 1))
            drafts.append(token)
            lens = lens + known
        return torch.cat(drafts, dim=1), lens

    def explain(self) -> str:
        return "walks along the bigrams of the text so far"


def main() -> None:
    torch.set_num_threads(1)  # tiny tensors gain nothing from more
    speccompile.register_mode("bigram_walk", BigramWalk, replace=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    config.initializer_range, config.eos_token_id = 0.1, None
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(config.vocab_size, (2, 12))
    with speccompile.wrap(model, "bigram_walk", tiers=(0, 1, 3, 7), max_batch=2, max_len=256, backend="eager") as spec:
        ours = spec.generate(prompt, max_new_tokens=200)
        theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
        assert torch.equal(ours, theirs), "speculation changed the text"
        print(f"same text; acceptance length {spec.stats.acceptance_length:.2f} in {spec.stats.steps} steps")


if __name__ == "__main__":
    main()
