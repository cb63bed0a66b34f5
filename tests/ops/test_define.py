"""One call defines an op; arguments that are not valid are one error, and register nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from speccompile.ops.define import define


def fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("schema", "arguments", "message"),
    [
        (3, {"reference": fake}, "schema must be a str"),
        ("refused(Tensr x) -> Tensor", {"reference": fake}, "torch cannot read the schema"),
        ("refused(Tensor x) -> Tensor", {"fake": None, "reference": fake}, "it returns a result, but fake=None"),
        ("refused(Tensor x) -> Tensor", {"fake": "fake", "reference": fake}, "fake must be a function, got 'fake'"),
        ("refused(Tensor x) -> Tensor", {"reference": "x"}, "reference must be a function, got 'x'"),
        ("refused(Tensor x) -> Tensor", {}, "it has no implementation; give reference, cpp, native or cuda"),
        ("refused(Tensor x) -> Tensor", {"cpp": "bas"}, "cpp='bas' is not a library; add the folder ops/cpu/csrc/bas"),
        ("refused(Tensor x) -> Tensor", {"native": "bas"}, "native='bas' is not a library"),
        ("refused(Tensor x) -> Tensor", {"reference": fake, "in_bodies": True}, "in_bodies=True needs a C++ kernel"),
        ("refused(Tensor x, bool[] s) -> Tensor", {"cpp": "base", "in_bodies": True}, "a value of type List[bool]"),
        ("refused(Tensor x) -> int", {"cpp": "base", "in_bodies": True}, "a value of type int"),
        ("refused(Tensor x) -> Tensor", {"cuda": "no_file.kernel"}, "got 'no_file.kernel'"),
        ("refused(Tensor x) -> Tensor", {"cuda": "tree"}, "got 'tree'"),
        ("refused(Tensor x) -> Tensor", {"cuda": 3}, "got 3"),
    ],
)
def test_what_cannot_be_defined_is_one_error(schema: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"op (refused|3) cannot be defined: .*{re.escape(message)}"):
        define(schema, **{"fake": fake, **arguments})
    assert not hasattr(torch.ops.speccompile, "refused")
