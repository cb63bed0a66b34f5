"""Triton's interpreter as the tests need it. Imported for what it changes.

- Triton 3.6 takes the bounds of a loop from arrays of one element, which numpy 2.4 makes no numbers of. Triton 3.7 does
  what is done here.
- A call of one jitted function by another replaces the functions of ``triton.language`` again, though the launch has
  done so: two fifths of an interpreted kernel's time. Here a launch does it once for each module with such functions.
- A product of two tiles is numpy's, whose bits of a row depend on its place in the tile on some CPUs (OpenBLAS on
  AVX-512). A GPU's do not. Here each row is multiplied alone, also in each of several tiles.
- The interpreter has bfloat16 as its bits, and multiplies these as integers. Here their values are multiplied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang
_launch = interpreter.GridExecutor.__call__
_dot = interpreter.InterpreterBuilder.create_dot

# The modules that the present launch has called functions of, by their namespaces.
_patched: set[int] = set()


def _patch_and_squeeze(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def _patch_once(function: Any) -> Any:
    if id(function.__globals__) in _patched:
        return interpreter._LangPatchScope()
    _patched.add(id(function.__globals__))
    return _patch_lang(function)


def _launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
    _patched.clear()
    _launch(self, *args, **kwargs)


def _dot_by_rows(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    handle = interpreter.TensorHandle
    if a.data.ndim == 3:
        tiles = zip(a.data, b.data, d.data, strict=True)
        results = [
            _dot_by_rows(self, handle(x, a.dtype), handle(y, b.dtype), handle(z, d.dtype), *rest) for x, y, z in tiles
        ]
        return handle(np.stack([result.data for result in results]), d.dtype.scalar)
    a, b = _widened(a), _widened(b)
    rows = [slice(row, row + 1) for row in range(a.data.shape[0])]
    products = [_dot(self, handle(a.data[row], a.dtype), b, handle(d.data[row], d.dtype), *rest) for row in rows]
    return handle(np.concatenate([product.data for product in products]), d.dtype.scalar)


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


interpreter._patch_lang_tensor = _patch_and_squeeze
interpreter._patch_lang = _patch_once
interpreter.GridExecutor.__call__ = _launch_anew  # type: ignore[method-assign]
interpreter.InterpreterBuilder.create_dot = _dot_by_rows  # type: ignore[method-assign]
