"""Rarer collections of reference cycles during a build."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from speccompile.utils.collector import rare_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


def test_collections_are_rare_until_the_end_also_of_a_failure(thresholds: tuple[int, int, int]) -> None:
    with pytest.raises(RuntimeError, match="within"), rare_collections():
        within = gc.get_threshold()
        with rare_collections():
            assert gc.get_threshold() == within
        assert gc.get_threshold() == within
        raise RuntimeError("within")
    assert all(rare > common for rare, common in zip(within, thresholds, strict=True))
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("own", [(0, 10, 10), (200_000, 5, 5)], ids=["off", "rarer"])
def test_rarer_settings_of_the_process_stay(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rare_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_that_forks_meanwhile_has_the_former_thresholds(thresholds: tuple[int, int, int]) -> None:
    with rare_collections():
        child = os.fork()
        if child == 0:
            os._exit(int(gc.get_threshold() != thresholds))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.get_threshold() != thresholds
