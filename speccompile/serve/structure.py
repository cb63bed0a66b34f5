"""What the text of a request has to follow, as the source of a guide."""

from __future__ import annotations

import json

from speccompile.errors import InvalidGuide, SpecCompileError
from speccompile.guides import Guide
from speccompile.serve.api_error import ApiError, engine_error
from speccompile.serve.fields import Generation
from speccompile.serve.guide_process import GuideSource
from speccompile.serve.json_object import json_object_regex
from speccompile.serve.service import Service


def source_of(body: Generation) -> tuple[GuideSource, str] | None:
    """The source of the guide of ``body`` and the field that it is from; None if the text is free."""
    if body.guided_regex is not None:
        return GuideSource("regex", body.guided_regex), "guided_regex"
    if body.guided_json is not None:
        schema = body.guided_json
        return GuideSource("json_schema", schema if isinstance(schema, str) else json.dumps(schema)), "guided_json"
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return GuideSource("regex", json_object_regex()), "response_format"
    return GuideSource("json_schema", json.dumps(form.json_schema.schema_)), "response_format"


async def compiled(service: Service, source: GuideSource, field: str) -> Guide:
    """
    Raises:
        ApiError: it cannot be followed, or is beyond the limits; names ``field``.
    """
    try:
        guide: Guide = await service.in_thread(service.guides.guide, source)
    except InvalidGuide as error:
        # A grammar of tools names the tool whose schema is at fault by its number.
        what = error.fields["what"]
        param = f"tools[{what}].function.parameters" if isinstance(what, int) else field
        raise ApiError(f"{param}: {error.fields['reason']}", param=param, code="invalid_guide") from None
    except SpecCompileError as error:
        raise engine_error(error, field, field) from None
    return guide
