"""Calibration of scores."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from speccompile.errors import InvalidInput
from speccompile.traces import CalibrationBin, calibration
from support.errors import raises


def test_the_error_is_the_mean_distance_of_the_ranges() -> None:
    found = calibration([0.25, 0.25, 0.25, 0.25, 0.95, 1.0], [True, False, False, False, True, False])
    assert found is not None
    assert found.bins == (CalibrationBin(0.2, 0.3, 4, 0.25, 0.25), CalibrationBin(0.9, 1.0, 2, 0.975, 0.5))
    assert found.error == pytest.approx(2 * 0.475 / 6)
    assert found.brier == pytest.approx((0.75**2 + 3 * 0.25**2 + 0.05**2 + 1) / 6)


def test_drafts_without_scores_are_left_out() -> None:
    found = calibration(np.array([math.nan, 0.5]), np.array([True, True]))
    assert found is not None and found.drafts == 1 and found.error == 0.5
    assert calibration([math.nan], [True]) is None and calibration([], []) is None


def test_values_that_are_no_scores_are_refused() -> None:
    with raises(InvalidInput, name="scores", reason=re.compile("reach 0.5 and 1.5")):
        calibration([0.5, 1.5], [True, True])
    with raises(InvalidInput, name="scores and accepted", reason=re.compile(re.escape("are [1] and [2]"))):
        calibration([0.5], [True, True])
