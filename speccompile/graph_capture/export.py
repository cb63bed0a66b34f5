"""torch.export with the settings of captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import config

from speccompile.utils.build_lock import one_build
from speccompile.utils.torch_private import without_fake_cache
from speccompile.utils.tracer_isolation import exported_alone

# From this number of layers on, the cache of fakes saves more time than it costs: results of one layer serve others.
# Measured with Llama, with and without the cache: one layer 0.31 and 0.20 s, six 0.85 and 0.86, sixteen 1.95 and 2.70.
_LAYERS_TO_REMEMBER = 6


def exported(
    module: nn.Module, arguments: tuple[Any, ...], dynamic_shapes: Any, layers: int
) -> torch.export.ExportedProgram:
    """Trace ``module`` in this interpreter, without autograd. Raises the errors of ``torch.export``.

    Args:
        layers: how often the module repeats the same calls.
    """
    remembering = without_fake_cache() if layers < _LAYERS_TO_REMEMBER else nullcontext()
    with one_build(), exported_alone(), torch.no_grad(), _without_stack_traces(), remembering:
        return torch.export.export(module, arguments, dynamic_shapes=dynamic_shapes, strict=False)


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Disable stack traces of nodes. They need a tenth of an export's time, and captures find nodes by module."""
    # torch 2.11 does not have the flag, and does not read it.
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
