"""Passes that name the values of a step, for messages, and for the table of docs/architecture/passes.md."""

from __future__ import annotations

_INPUTS = ("verify_inputs", "tree_inputs", "mixed_inputs", "prefill_inputs")
_TREES = ("read_tree", "read_stored", "draft_tree_by_network")
_PATHS = ("tree_greedy_accept", "tree_exact_accept", "tree_drawn_accept")
_ACCEPTS = ("greedy_accept", "drawn_accept", "exact_accept", "coin_accept", "lossy_accept", *_PATHS)

#: By value the passes after which it is what later passes read; a pipeline has one of them, or none. ``logits`` has its
#: name from the capture.
NAMED_BY: dict[str, tuple[str, ...]] = {
    "slots": ("bind_rows", "bind_mixed_rows"),
    "target_slots": ("bind_mixed_rows",),
    "prompt_starts": ("bind_mixed_rows",),
    "drafts": ("limit_drafts", "no_drafts"),
    "row_draft_lens": ("limit_drafts", "no_drafts"),
    "parents": _TREES,
    "depths": _TREES,
    "input_tokens": _INPUTS,
    "positions": _INPUTS,
    "root": ("tree_inputs",),
    "last_index": ("prefill_inputs",),
    "ready": ("prefill_inputs",),
    "chunk_hidden": ("last_logits",),
    "tapped": ("lower_taps",),
    "row_adapters": ("add_adapters",),
    "scores": ("process_logits", "join_scores"),
    "target_tokens": _ACCEPTS,
    "row_accepted": _ACCEPTS,
    "path": _PATHS,
}
