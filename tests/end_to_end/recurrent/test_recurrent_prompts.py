"""Layers that compute a prompt's tokens otherwise than new ones: Mamba-2 with limits of its time steps."""

from __future__ import annotations

import random

import torch

import speccompile
from speccompile.graph.layer_state import ABSORBED
from speccompile.runtime.request import Request
from support.families import model_of
from support.tiny import greedy

NEW = 12


def test_only_tokens_of_prompts_are_reused_where_prompts_differ() -> None:
    # More limits the time steps so much that transformers' decoding contradicts its forward.
    model = model_of("nemotron_h", time_step_min=0.005)
    with speccompile.wrap(
        model, "ngram", tiers=(0, 3), max_batch=2, max_len=60, backend="eager", state_checkpoints=8
    ) as spec:
        engine = spec.engine
        assert "Only prompts are reused" in spec.explain()

        def read(prompt: list[int], absorbed: int) -> tuple[Request, torch.Tensor]:
            """The request, and its state once it has absorbed so many tokens."""
            request = engine.submit(prompt, max_new_tokens=NEW)
            spec.set_tier(0)
            while not request.new_tokens or int(engine.arena[ABSORBED][request.slot]) < absorbed:
                engine.step()
            names = [name for name in engine.arena.layout.recurrent if name.startswith("scan_")]
            state = torch.cat([engine.arena[name][request.slot].flatten() for name in names if "kept" not in name])
            request.cancel()
            return request, state

        prompt = random.Random(0).choices(range(5, 100), k=30)
        first = engine.submit(prompt, max_new_tokens=NEW)
        engine.run()
        assert first.new_tokens == greedy(model, prompt, NEW)
        turn = [*prompt, *first.new_tokens, 7]
        again, state = read(turn, len(turn))
        # The last checkpoint in the first prompt.
        assert (again.stats.reused_tokens, again.stats.reread_tokens) == (24, 6)
        engine.slots._free = {slot: [] for slot in engine.slots._free}
        fresh, expected = read(turn, len(turn))
        assert fresh.stats.reused_tokens == 0 and torch.equal(state, expected)
        assert again.new_tokens[0] == greedy(model, turn, 1)[0]
