"""Equal text for what behaves alike, none for what cannot be described."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from speccompile.acceptance.typical import likely_enough
from speccompile.modes.ngram import NGram
from speccompile.passes.step.verify_inputs import VerifyInputs
from speccompile.utils.stable_key import NoStableKey, stable_key
from support.own_mode import OwnMode


def test_what_describes_a_pass() -> None:
    same = [NGram(3, 1).propose, NGram(3, 1).propose]
    assert stable_key(same[0]) == stable_key(same[1]) != stable_key(NGram(2, 1).propose)
    assert stable_key(VerifyInputs(3, 4)) != stable_key(VerifyInputs(3, 5))
    keeps = [functools.partial(likely_enough, threshold=value) for value in (0.3, 0.3, 0.4)]
    assert stable_key(keeps[0]) == stable_key(keeps[1]) != stable_key(keeps[2])
    assert json.loads(json.dumps(stable_key(keeps))) == stable_key(keeps)
    assert stable_key(1) != stable_key(1.0) != stable_key("1.0") and stable_key(True) != stable_key(1)
    for foreign in (OwnMode(), OwnMode().propose, lambda: None, torch.zeros(1), object(), {1: object()}):
        with pytest.raises(NoStableKey):
            stable_key(foreign)
