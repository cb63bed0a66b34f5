"""Equal text for what behaves alike, none for what cannot be told."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from test_finished import OwnMode

from speccompile.acceptance.typical import likely_enough
from speccompile.described import NotDescribed, described
from speccompile.modes.ngram import NGram
from speccompile.passes.verify_inputs import VerifyInputs


def test_what_describes_a_pass() -> None:
    same = [NGram(3, 1).propose, NGram(3, 1).propose]
    assert described(same[0]) == described(same[1]) != described(NGram(2, 1).propose)
    assert described(VerifyInputs(3, 4)) != described(VerifyInputs(3, 5))
    keeps = [functools.partial(likely_enough, threshold=value) for value in (0.3, 0.3, 0.4)]
    assert described(keeps[0]) == described(keeps[1]) != described(keeps[2])
    assert json.loads(json.dumps(described(keeps))) == described(keeps)
    assert described(1) != described(1.0) != described("1.0") and described(True) != described(1)
    for foreign in (OwnMode(), OwnMode().propose, lambda: None, torch.zeros(1), object(), {1: object()}):
        with pytest.raises(NotDescribed):
            described(foreign)
