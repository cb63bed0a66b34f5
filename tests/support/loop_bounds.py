"""triton 3.6's interpreter takes the bounds of a loop from arrays of one element, which numpy 2.4 makes no numbers of.

Triton 3.7 does what is done here. Imported for what it changes.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_and_squeeze(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


interpreter._patch_lang_tensor = _patch_and_squeeze
