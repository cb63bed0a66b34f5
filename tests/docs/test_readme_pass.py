"""The pass of the README counts what the statistics count."""

from __future__ import annotations

import re
from typing import Any

import torch

from speccompile import wrap
from support.pages import ROOT
from support.tiny import tiny_llama


def test_the_drafts_are_counted() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"```python\n(import torch\n.*?class CountDrafts.*?)\n\nwith ", text, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(found[1], names)
    ids, options = torch.tensor([[1, 2, 3, 4] * 4]), {"policy": "fixed:3", "tiers": (0, 3), "max_len": 64}
    with wrap(tiny_llama(), "ngram", passes=[names["CountDrafts"]()], backend="eager", **options) as spec:
        spec.generate(ids, max_new_tokens=12)
        spec.generate(ids + 4, max_new_tokens=12)
        assert spec.arena["draft_count"].item() == spec.stats.draft_tokens > 0
