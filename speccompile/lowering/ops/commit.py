"""Acceptance and commit of a step as ONE op; ``speccompile.passes.commit`` defines what it writes.

``native_`` is the C++ form (``lowering/cpu/csrc/kernels/commit.cpp``).
"""

from __future__ import annotations

from typing import Any

import torch

from speccompile.lowering.ops.on_cuda import register_on_cuda

#: Tensors of the op, in the order of its schema.
NAMES = (
    *("tokens", "length", "limit", "alive", "eos", "emitted", "accepted", "proposed"),
    *("slots", "target_tokens", "row_draft_lens", "row_accepted", "drafts", "ready"),
)

_library = torch.library.Library("speccompile", "FRAGMENT")
_SCHEMA = (
    "(Tensor(a!) tokens, Tensor(b!) length, Tensor limit, Tensor(c!) alive, Tensor eos, "
    "Tensor(d!) emitted, Tensor(e!) accepted, Tensor(f!) proposed, Tensor slots, Tensor target_tokens, "
    "Tensor row_draft_lens, Tensor? row_accepted, Tensor? drafts, Tensor? ready=None) -> ()"
)


def named(*arguments: torch.Tensor | None, **options: torch.Tensor | None) -> dict[str, Any]:
    """All tensors of a call by name."""
    return dict.fromkeys(NAMES) | dict(zip(NAMES, arguments, strict=False)) | options


def reference(*arguments: torch.Tensor | None, **options: torch.Tensor | None) -> None:
    """What ``greedy_accept`` counts, unless ``row_accepted`` says it, and then ``commit``.

    Args:
        arguments: as :func:`speccompile.passes.commit.commit` has them.
        row_accepted: int64 ``[B]``; None: as many as agree with the target in front of the first that does not.
        drafts: int64 ``[B, K]``, looked at for that alone.
    """
    from speccompile.passes.commit import commit

    call = named(*arguments, **options)
    drafts, target_tokens = call.pop("drafts"), call["target_tokens"]
    if call["row_accepted"] is None:
        count = drafts.shape[1]
        offered = torch.arange(count, device=drafts.device) < call["row_draft_lens"][:, None]
        agrees = (drafts == target_tokens[:, :count]) & offered
        call["row_accepted"] = agrees.long().cumprod(1).sum(1)
    commit(**call)


def _on_cuda(*arguments, **options):  # type: ignore[no-untyped-def]
    from speccompile.lowering.triton.accept_commit import accept_commit

    accept_commit(named(*arguments, **options))


for _name in ("accept_commit_", "native_accept_commit_"):
    _library.define(_name + _SCHEMA)
    torch.library.register_fake(f"speccompile::{_name}", lambda *_, **__: None, lib=_library)
_library.impl("accept_commit_", reference, "CPU")
register_on_cuda(_library, "accept_commit_", _on_cuda)
