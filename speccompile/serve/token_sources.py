"""Source of each token of a choice: a drafter, or the model."""

from __future__ import annotations

from typing import Any

from speccompile.runtime.request import Request
from speccompile.runtime.stats import GUIDE_SOURCE
from speccompile.serve.service import Service


def token_sources(service: Service, request: Request, positions: range) -> list[dict[str, Any]]:
    """Describe the new tokens at ``positions``: text and bytes, whether it is a special token, and the drafter whose
    draft was accepted, ``guide`` for a draft that the guide forces, or None."""
    vocabulary, names = service.vocabulary, {GUIDE_SOURCE: "guide"} | dict(enumerate(service.drafters))
    return [
        {
            "text": vocabulary.text_of(token),
            "bytes": list(vocabulary.bytes_of(token)),
            "special": vocabulary.is_special(token),
            "drafted_by": None if source is None else names[source],
        }
        for token, source in zip(
            request.new_tokens[positions.start : positions.stop],
            request.drafted_by[positions.start : positions.stop],
            strict=True,
        )
    ]
