"""The head against EAGLE-3 written down once more: logits, and drafts over rounds with partial acceptance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile.heads import Eagle3Config, Eagle3Head, load_eagle3
from support import published
from support.eagle3_reference import PlainEagle3
from support.published import FLAT, HIDDEN, VOCAB
from support.tiny import tiny_llama

TARGET = tiny_llama(layers=8)
LENGTH, PROMPT, LONGEST = 24, 11, 40

CONFIGS: dict[str, dict[str, Any]] = {
    "flat": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "two_layers": {"num_hidden_layers": 2, "norm_before_residual": True},
    "own_rope": {"rope_theta": 300.0},
}


class ListedKV:
    """A row's keys and values by place, and attention over them written out."""

    def __init__(self) -> None:
        self.positions = torch.empty(0)
        self.held: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        assert window is None
        places = self.positions[0].tolist()
        for index, place in enumerate(places):
            self.held[layer, place] = key[0, index], value[0, index]
        groups = query.shape[2] // key.shape[2]
        rows = []
        for index, place in enumerate(places):
            keys, values = (
                torch.stack(x) for x in zip(*[self.held[layer, at] for at in range(place + 1)], strict=True)
            )
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            weights = (torch.einsum("hd,shd->hs", query[0, index], keys) * scale).softmax(-1)
            rows.append(torch.einsum("hs,shd->hd", weights, values))
        return torch.stack(rows)[None]


def made(folder: Path, fields: dict[str, Any]) -> tuple[Eagle3Head, PlainEagle3]:
    layers = fields.get("num_hidden_layers", 1)
    tensors = published.weights("midlayer" if layers == 1 else "layers.0", layers=layers)
    if fields.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": torch.rand(HIDDEN) + 0.5 for index in range(3)}
    if fields.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(3 * HIDDEN) + 0.5
    tensors["embed_tokens.weight"] = published.embedding()
    head = load_eagle3(published.write(folder, tensors, FLAT | fields), TARGET)
    plain = PlainEagle3(
        tensors,
        published.HEADS,
        published.KV_HEADS,
        eps=FLAT["rms_norm_eps"],
        theta=fields.get("rope_theta", 10000.0),
        layers=layers,
        norm_before_residual=fields.get("norm_before_residual", False),
        norm_output=fields.get("norm_output", False),
    )
    return head.double(), plain


def run(
    head: Eagle3Head, cache: ListedKV, tokens: list[int], start: int, states: torch.Tensor
) -> dict[str, torch.Tensor]:
    cache.positions = torch.arange(start, start + len(tokens))[None]
    with torch.no_grad():
        results: dict[str, torch.Tensor] = head(torch.tensor([tokens]), cache.positions, states[None], cache)
    return results


def chained(
    head: Eagle3Head, cache: ListedKV, row: dict[str, torch.Tensor], start: int, draft_len: int
) -> tuple[list[int], torch.Tensor]:
    """Drafts from the row at ``start`` on: each further one replaces what the head would fuse by what was carried."""
    drafts, logits = [], []
    for place in range(draft_len):
        if place:
            cache.positions = torch.tensor([[start + place]])
            carried = row.get("carried", row["hidden"])[:, -1:]
            fused = torch.nn.Module.register_forward_hook(head.fc, lambda *_, carried=carried: carried)
            with torch.no_grad():
                row = head(
                    torch.tensor([drafts[-1:]]), cache.positions, torch.zeros(1, 1, head.hidden_size).double(), cache
                )
            fused.remove()
        logits.append(row["logits"][0, -1])
        drafts.append(int(row.get("target_logits", row["logits"])[0, -1].argmax()))
        if "target_ids" in row:
            assert int(row["target_ids"][row["logits"][0, -1].argmax()]) == drafts[-1]
            others = torch.ones(row["target_logits"].shape[-1], dtype=torch.bool)
            others[row["target_ids"]] = False
            assert bool((row["target_logits"][..., others] == float("-inf")).all())
    return drafts, torch.stack(logits)


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_rounds_with_partial_acceptance(tmp_path: Path, fields: dict[str, Any]) -> None:
    """The prompt in chunks, then rounds that accept some drafts; rejected ones leave rubbish, which is overwritten."""
    head, plain = made(tmp_path, fields)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (LONGEST,), generator=generator).tolist()
    states = torch.randn(LONGEST, 3 * HIDDEN, generator=generator, dtype=torch.float64)
    cache, rubbish = ListedKV(), torch.full((8, 3 * HIDDEN), 7.0, dtype=torch.float64)
    known = 0
    for width in (4, 1, 6):
        row = run(head, cache, text[known + 1 : known + width + 1], known, states[known : known + width])
        known += width
    for accepted, draft_len in ((2, 4), (0, 3), (3, 3), (1, 5)):
        drafts, logits = chained(head, cache, row, known - 1, draft_len)
        wanted, wanted_logits = plain.draft(text[: known + 1], states[:known].chunk(3, dim=-1), draft_len)
        assert drafts == wanted
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
        # The step's rows: what it emitted, and after that what was rejected.
        emitted = text[known + 1 : known + accepted + 2]
        rows = emitted + [3] * (draft_len - accepted)
        features = torch.cat([states[known : known + len(emitted)], rubbish[: draft_len - accepted]])
        results = run(head, cache, rows, known, features)
        row = {name: value[:, : len(emitted)] if value.dim() > 1 else value for name, value in results.items()}
        known += len(emitted)
    assert set(plain.seen) == plain.weights.keys() - {"d2t", "t2d"}


def test_variants_differ(tmp_path: Path) -> None:
    """So that each of the comparisons above is one of its own."""
    results = []
    text, states = list(range(12)), torch.randn(11, 3 * HIDDEN, generator=torch.Generator().manual_seed(0))
    for name, fields in CONFIGS.items():
        _, plain = made(tmp_path / name, fields)
        results.append(plain.draft(text, states.double().chunk(3, dim=-1), 3)[1][2])
    for index, result in enumerate(results):
        assert not any(torch.allclose(result, other, atol=1e-3) for other in results[:index])


def test_random_head_shares_the_target_s_embedding() -> None:
    head = Eagle3Head.random(TARGET, draft_vocab_size=50)
    assert head.embed_tokens.weight.data_ptr() == TARGET.get_input_embeddings().weight.data_ptr()
    assert head.config == replace(Eagle3Config.for_target(TARGET), draft_vocab_size=50)
    assert head.d2t is not None
    ids = torch.arange(50) + head.d2t
    assert len(ids.unique()) == 50 and int(ids.max()) < VOCAB
    other = Eagle3Head.random(TARGET, seed=1)
    assert other.d2t is None and not torch.equal(other.fc.weight, head.fc.weight)
