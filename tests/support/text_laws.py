"""The distribution of a tiny model's sampled texts, and how far those of many seeds are from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from support.rule_laws import Law, chi_square


def text_law(model: PreTrainedModel, prompt: list[int], new: int, *, temperature: float, top_k: int) -> Law:
    """The probability of each continuation of ``new`` tokens, by the model's own forward."""
    found: Law = {(): 1.0}
    for _ in range(new):
        longer = {}
        for text, chance in found.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *text]])).logits[0, -1].double() / temperature
            kept = logits.topk(top_k)
            for token, p in zip(kept.indices.tolist(), kept.values.softmax(-1).tolist(), strict=True):
                longer[*text, token] = chance * p
        found = longer
    return found


def distance_of_texts(texts: Sequence[tuple[int, ...]], law: Law) -> float:
    """Chi-square of ``texts`` against ``law``, in standard deviations. A text that cannot occur is an error."""
    assert set(texts) <= set(law)
    counts = torch.tensor([texts.count(text) for text in law])
    return chi_square(counts, len(texts) * torch.tensor(list(law.values()), dtype=torch.float64))
