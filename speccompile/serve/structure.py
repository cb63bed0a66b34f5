"""Structure that the text of a request must follow, as the source of a guide."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from speccompile.errors import InvalidGuide, SpecCompileError
from speccompile.guides import Guide
from speccompile.serve.api_error import ApiError, engine_error
from speccompile.serve.fields import GenerationFields, ResponseFormat
from speccompile.serve.guide_source import ANY_OBJECT, GuideSource
from speccompile.serve.sampling_fields import StructuredOutputs
from speccompile.serve.service import Service
from speccompile.serve.tool_grammar import ANSWER, ToolGrammar


def source_of(body: GenerationFields) -> tuple[GuideSource, str] | None:
    """Source of the guide of ``body``, and the field that it comes from; None if the text is unconstrained."""
    if body.guided_regex is not None:
        return GuideSource("regex", body.guided_regex), "guided_regex"
    if body.guided_choice is not None:
        return GuideSource("choice", json.dumps(body.guided_choice)), "guided_choice"
    if body.guided_grammar is not None:
        return GuideSource("grammar", body.guided_grammar), "guided_grammar"
    if body.guided_json is not None:
        return _of_schema(body.guided_json), "guided_json"
    if body.structured_outputs is not None:
        return _of_structured_outputs(body.structured_outputs), "structured_outputs"
    form = body.response_format
    if form is None or form.type == "text":
        return None
    return _of_format(form), "response_format"


def _of_schema(schema: dict[str, Any] | str) -> GuideSource:
    return GuideSource("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _of_format(form: ResponseFormat) -> GuideSource:
    if form.json_schema is not None:
        return _of_schema(form.json_schema.schema_)
    if form.structures is not None:
        structures = [item.model_dump(by_alias=True) for item in form.structures]
        return GuideSource("structural_tag", json.dumps({"structures": structures, "triggers": form.triggers}))
    if form.definition is None:
        return GuideSource("json_schema", ANY_OBJECT)
    return GuideSource("regex" if form.syntax == "regex" else "grammar", form.definition)


def _of_structured_outputs(given: StructuredOutputs) -> GuideSource:
    if given.json_ is not None:
        return _of_schema(given.json_)
    if given.choice is not None:
        return GuideSource("choice", json.dumps(given.choice))
    if given.grammar is not None:
        return GuideSource("grammar", given.grammar)
    return GuideSource("json_schema", ANY_OBJECT) if given.regex is None else GuideSource("regex", given.regex)


async def guide_of(
    service: Service, body: GenerationFields, grammar: ToolGrammar | None
) -> tuple[Guide | None, str | None]:
    """Guide of the answer, and the field that it comes from.

    Raises:
        ApiError: the guide is not valid.
    """
    source = source_of(body)
    if grammar is None:
        return (None, None) if source is None else (await compiled(service, *source), source[1])
    answer_field = None if source is None else source[1]
    return await compiled(service, GuideSource("tools", grammar.as_text()), "tools", answer_field), "tools"


async def compiled(service: Service, source: GuideSource, field: str, answer_field: str | None = None) -> Guide:
    """Compile a guide.

    Args:
        field: field of the request that the guide comes from.
        answer_field: field with the structure of answers, for a grammar of tools.

    Raises:
        ApiError: the guide is not valid, or exceeds a limit. The error names ``field``.
    """
    try:
        return await asyncio.wrap_future(service.guides.guide(source))
    except InvalidGuide as error:
        param = _field_of(error, field, answer_field)
        raise ApiError(f"{param}: {error.fields['reason']}", param=param, code="invalid_guide") from None
    except SpecCompileError as error:
        raise engine_error(error, field, field) from None


def _field_of(error: InvalidGuide, field: str, answer_field: str | None) -> str:
    what = error.fields["what"]
    # A grammar of tools identifies the part at fault by a number.
    if not isinstance(what, int) or field != "tools":
        return field
    return f"tools[{what}].function.parameters" if answer_field is None or what != ANSWER else answer_field
