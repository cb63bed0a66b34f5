"""Inputs for the comparison of a draft head with its graph."""

from __future__ import annotations

from typing import Any, cast

import torch

from speccompile.graph.arena import Arena
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.draft_head import DraftHead, HeadCache
from speccompile.modes.network.draft_network import DraftNetwork, Run

# Rows of the check, and the widths of its pieces. Short caches have fewer pieces.
ROWS, PIECES = 2, (3, 1, 5)


class HeadProbe:
    """Random tokens and hidden states, in pieces, for the head itself and for its graph."""

    def __init__(self, head: DraftHead, network: DraftNetwork, graph: StepGraph, arena: Arena) -> None:
        info, places = network.info, network.layout(arena.layout).cache_len
        length = min(sum(PIECES), places // head.places_per_row)
        generator = torch.Generator().manual_seed(0)
        self.head, self.network, self.graph, self.arena = head, network, graph, arena
        vocab = arena.layout.vocab_size
        self.tokens = torch.randint(vocab, (ROWS, length), generator=generator).to(info.device)
        hidden = torch.randn((ROWS, length, head.hidden_size), generator=generator)
        self.hidden = hidden.to(info.device, info.dtype)
        # The second row uses the dummy slot, which no request owns.
        self.slots = torch.tensor([0, arena.layout.dummy_slot], device=info.device)

    def pieces(self) -> list[dict[str, torch.Tensor]]:
        found, start = [], 0
        for width in PIECES:
            stop = max(start, min(start + width, self.tokens.shape[1]))
            places = torch.arange(start, stop, device=self.tokens.device)
            found.append(
                {
                    "input_ids": self.tokens[:, places],
                    "position_ids": places.repeat(ROWS, 1),
                    "row_slots": self.slots,
                    "hidden_states": self.hidden[:, places],
                }
            )
            start += width
        return [piece for piece in found if piece["input_ids"].shape[1]]

    def own(self) -> list[torch.Tensor]:
        """The values that are compared, of each piece, by the head's own forward."""
        layout, device = self.network.layout(self.arena.layout).tensors, self.tokens.device
        kv = {
            name: torch.zeros((ROWS, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
            for name, tensor in layout.items()
        }
        rows = torch.arange(ROWS, device=device)
        found = []
        for piece in self.pieces():
            keys = {layer: kv[f"k_{layer}"] for layer in self.network.kv}
            values = {layer: kv[f"v_{layer}"] for layer in self.network.kv}
            cache = HeadCache(keys, values, rows, piece["position_ids"])
            inputs = (piece["input_ids"], piece["position_ids"], piece["hidden_states"])
            values_by_name = self.head(*inputs, cache)
            found.append(torch.stack([values_by_name[name] for name in self.head.compared]))
        return found

    def difference(self, run: Run, expected: list[torch.Tensor]) -> float:
        worst = 0.0
        for piece, own in zip(self.pieces(), expected, strict=True):
            arguments = []
            for node in self.graph.placeholders:
                port = self.graph.ports[node.name]
                value = piece[node.name] if port.role == "input" else port.value
                arguments.append(self.arena[node.name] if value is None else value)
            results = dict(zip(cast(Any, self.graph.output.args[0]), run(*arguments), strict=True))
            result = torch.stack([results[self.graph.values[name]] for name in self.head.compared])
            change = (result - own).abs().float()
            worst = max(worst, float(torch.where(change.isfinite(), change, torch.inf).max()))
        return worst
