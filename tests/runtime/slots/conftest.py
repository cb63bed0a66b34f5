"""One engine over a tiny model for each test file, in which nothing is known when a test begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from speccompile import Speculator
from speccompile.graph.arena import Arena
from support.known_texts import forget, wrap
from support.tiny import cancel_all


@pytest.fixture(scope="module")
def shared(model: PreTrainedModel) -> Speculator:
    return wrap(model)


@pytest.fixture
def spec(shared: Speculator) -> Iterator[Speculator]:
    """Nothing is known yet."""
    forget(shared)
    yield shared
    cancel_all(shared.engine)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """KV that went from slot to slot: (source, target, tokens)."""
    made: list[tuple[int, int, int]] = []
    copy = Arena.copy_text_state

    def noted(self: Arena, source: int, target: int, count: int, shared: int = 0) -> None:
        made.append((source, target, count))
        copy(self, source, target, count, shared)

    monkeypatch.setattr(Arena, "copy_text_state", noted)
    return made
