"""Each family's tiny model is wrapped once for all files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.dice import Dice
from support.recurrent_targets import FAMILIES, TIERS, Wrapped, wrapped


@pytest.fixture(scope="session", autouse=True)
def released() -> Iterator[None]:
    yield
    wrapped.cache_clear()


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Iterator[Wrapped]:
    yield from idle(request.param)


@pytest.fixture(params=FAMILIES)
def reusing(request: pytest.FixtureRequest) -> Iterator[Wrapped]:
    if not wrapped(request.param).spec.engine.prefix_reuse:
        pytest.skip("the bits of torch's own ops between ours depend on the width here: all steps run one shape")
    yield from idle(request.param)


def idle(name: str) -> Iterator[Wrapped]:
    found = wrapped(name)
    found.spec.engine.policy = Dice(TIERS)
    yield found
    assert found.spec.engine.idle
