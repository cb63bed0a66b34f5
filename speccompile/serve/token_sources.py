"""Where each token of a choice is from: the drafter, or the model itself."""

from __future__ import annotations

from typing import Any

from speccompile.runtime.request import Request
from speccompile.serve.service import Service


def token_sources(service: Service, request: Request, places: range) -> list[dict[str, Any]]:
    """Of the new tokens at ``places``: their text, and the drafter whose draft was accepted, or None."""
    drafter = service.drafter
    return [
        {
            "text": service.vocabulary.text_of(request.new_tokens[place]),
            "drafted_by": drafter if request.drafted[place] else None,
        }
        for place in places
    ]
