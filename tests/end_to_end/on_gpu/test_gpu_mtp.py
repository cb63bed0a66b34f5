"""MTP modules on a GPU: a chain of modules, of the target's states, and one module used again."""

from __future__ import annotations

from typing import Any

import pytest

from speccompile import Tree
from speccompile.heads import MtpHead
from support.gpu_texts import assert_texts, own_texts, wrapped
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain of modules": ("mtp", {}),
    "chain of the target's states": ("mtp", {"chain": "target"}),
    "one module": ("mtp_eagle_one_model", {"tiers": (0, 3, Tree.dynamic(5, 3, 2))}),
    "one module, split": ("mtp_eagle", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_models_own(name: str) -> None:
    mode, options = CASES[name]
    model = tiny_llama().cuda()
    with wrapped(model, mode, draft=MtpHead.random(model, 3), **options) as spec:
        assert_texts(spec, own_texts())
        assert spec.stats.accepted_tokens > 0
