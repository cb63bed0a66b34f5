"""C functions of the ops that bodies call (``csrc``, beside each op), for the C++ that Inductor writes around kernels.

It calls other ops by way of Python, or of their names and the dispatcher.
"""

from __future__ import annotations

import torch

import speccompile.ops.expert_linear
import speccompile.ops.lora  # noqa: F401  defines an op
from speccompile.ops.cpu.openmp import REGIONS
from speccompile.ops.native import ROUNDED
from speccompile.utils.torch_private import OpOverload, op_schemas

_TYPES = {
    "tensor": "AtenTensorHandle",
    "tensors": "const AtenTensorHandle*",
    "flag": "int32_t",
    "whole": "int64_t",
    "wholes": "const int64_t*",
}
_ROUNDED_LINEAR = "{tensor} x, {tensor} packed, {tensor} scales, {tensors} bias, {whole} features, {tensor}* out"
_ROUNDED_LINEARS = (
    "{tensor} x, {tensors} packed, {whole} weights, {tensors} scales, {whole} units, {tensors} biases, {whole} added, "
    "{wholes} features, {whole} count, ..."
)
_ARGUMENTS = {
    "packed_linear": "{tensor} x, {tensor} packed, {tensors} bias, {whole} features, {tensor}* out",
    "packed_linears": (
        "{tensor} x, {tensors} packed, {whole} weights, {tensors} biases, {whole} added, "
        "{wholes} features, {whole} count, ..."
    ),
    **{f"{form}_linear": _ROUNDED_LINEAR for form in ROUNDED},
    **{f"{form}_linears": _ROUNDED_LINEARS for form in ROUNDED},
    "native_attention": (
        "{tensor} q, {tensor} k_cache, {tensor} v_cache, {tensor} slots, {tensor} positions, double scale, "
        "{wholes} window, {wholes} chunk, const double* softcap, {tensors} sinks, {tensors} parents, {tensor}* out"
    ),
    "native_expert_linear": (
        "{tensor} x, {tensor} experts, {tensor} weight, {tensors} bias, {flag} transposed, {tensor}* out"
    ),
    "native_lora": (
        "{tensor} x, {tensors} outputs, {whole} linears, {tensors} a, {whole} all_a, {tensors} b, {whole} all_b, "
        "{tensor} ranks, {tensor} scales, {whole} first, {tensor} places, ..."
    ),
}

# A body is compiled while the ops that it calls are still being built. So none of them needs to exist when it loads:
# each is looked up when it is first called. A macro, since a function cannot pass on a variable number of arguments.
# Inductor writes ``extern`` before the text and ``;`` after it.
_DECLARATION = """\
AOTITorchError {function}({arguments});
#include <dlfcn.h>
#define {function}(...) [] {{ \\
  static const auto found = reinterpret_cast<decltype(&{function})>(dlsym(RTLD_DEFAULT, "{function}")); \\
  return found; \\
}}()(__VA_ARGS__)
{regions}
static_assert(true)"""


class Shims(dict[OpOverload, list[str]]):
    """Declarations by op, in the form of Inductor's ``aot_inductor.custom_ops_to_c_shims``.

    Inductor pickles its options for the keys of its caches, and could not pickle ops. The schemas of all ops are part
    of the key: compiled code passes arguments by their number, so code for another schema would pass wrong ones.
    """

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (repr([sorted(self.values()), op_schemas("speccompile")]),)


def shims() -> Shims:
    """The declarations of all ops."""
    ops = torch.ops.speccompile
    return Shims(
        {
            getattr(ops, name).default: [
                _DECLARATION.format(
                    function=f"aoti_torch_cpu_{name}", arguments=arguments.format(**_TYPES), regions=REGIONS
                )
            ]
            for name, arguments in _ARGUMENTS.items()
        }
    )
