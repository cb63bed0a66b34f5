"""C functions of the ops that bodies call (``csrc``, beside each op), for the C++ that Inductor writes around kernels.

It calls other ops by way of Python, or of their names and the dispatcher.
"""

from __future__ import annotations

import torch

from speccompile.ops.cpu.openmp import REGIONS
from speccompile.ops.in_cpp import IN_BODIES
from speccompile.utils.torch_private import OpOverload, op_schemas

#: C types by the type of an argument of a schema: an op that bodies call has arguments of these types only. A list
#: also has an argument for its length.
C_TYPES = {
    "Tensor": "AtenTensorHandle {}",
    "Optional[Tensor]": "const AtenTensorHandle* {}",
    "List[Tensor]": "const AtenTensorHandle* {0}, int64_t {0}_count",
    "bool": "int32_t {}",
    "str": "const char* {}",
    "int": "int64_t {}",
    "Optional[int]": "const int64_t* {}",
    "List[int]": "const int64_t* {0}, int64_t {0}_count",
    "float": "double {}",
    "Optional[float]": "const double* {}",
}
#: The return type in C of a result of a schema, by the type of the result.
C_RESULTS = {"Tensor": "AtenTensorHandle* out", "List[Tensor]": "..."}

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
    """The declarations of all ops that bodies call."""
    return Shims(
        {op: [_declaration(op)] for op in (getattr(torch.ops.speccompile, name).default for name in IN_BODIES)}
    )


def _declaration(op: OpOverload) -> str:
    arguments = [C_TYPES[str(argument.type)].format(argument.name) for argument in op._schema.arguments]
    arguments += [C_RESULTS[str(result.type)] for result in op._schema.returns]
    function = f"aoti_torch_cpu_{op._schema.name.partition('::')[2]}"
    return _DECLARATION.format(function=function, arguments=", ".join(arguments), regions=REGIONS)
