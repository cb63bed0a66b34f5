"""The arena as data: its tensors by group."""

from __future__ import annotations

from collections.abc import Collection

from speccompile.adapters.buffers import OF_SLOT, PREFIX
from speccompile.graph.layer_state import recurrent_names
from speccompile.graph.state import Layout
from speccompile.graph_capture.observe import Observation
from speccompile.report.memory_data import Buffer
from speccompile.sampling.pipeline import all_processors, sampling_state

_SEQUENCE = frozenset({"tokens", "length", "prompt_length", "limit", "alive", "eos", "draft_limit"})


def buffers_of(layout: Layout, observed: Observation, drafter_state: Collection[str]) -> tuple[Buffer, ...]:
    """List the tensors of the arena.

    Args:
        drafter_state: names of the mode's own state tensors.
    """
    sampling = {spec.name for spec in sampling_state(all_processors(layout.tensors))}
    recurrent = set(recurrent_names(observed.recurrent)) if observed.recurrent else set()

    def group(name: str) -> str:
        if name in drafter_state:
            return "drafter"
        if name in recurrent or layout.tensors[name].checkpoint_of:
            return "recurrent state"
        if name.startswith(("k_", "v_", "index_key_")) and layout.tensors[name].follows_text:
            return "KV"
        if layout.tensors[name].follows_text:
            return "drafter"
        if name == OF_SLOT or name.startswith(PREFIX):
            return "adapters"
        if name in sampling:
            return "sampling"
        return "sequence" if name in _SEQUENCE else "host"

    return tuple(
        Buffer(name, group(name), tensor.shape, str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for name, tensor in layout.tensors.items()
    )
