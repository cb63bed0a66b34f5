"""Families whose attention is their own on a GPU: latent (MLA), ALiBi, Falcon's, and indexed keys."""

from __future__ import annotations

import pytest

from support.gpu_texts import assert_family

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["deepseek_v3", "bloom", "falcon", "mpt", "deepseek_v32"])
def test_text_of_a_family(name: str) -> None:
    assert_family(name, "eager")
