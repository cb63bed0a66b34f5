"""Schemas, patterns and tools that cost much to compile."""

from __future__ import annotations

from typing import Any

from benchmarks.attacks.attack import CHAT, COMPLETIONS, RESPONSES, Outcome, Target, attack

#: A text may be generated, the guide may be refused, and too many may wait.
_COMPILED = (200, 400)
_TEXT = {"type": "string"}


def _tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def _follow(target: Target, **guide: Any) -> Outcome:
    return await target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 4, **guide})


async def _call(target: Target, *tools: dict[str, Any]) -> Outcome:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required", "max_tokens": 4}
    return await target.post(CHAT, body)


@attack(*_COMPILED)
async def schema_of_doubling_references(target: Target) -> Outcome:
    levels = target.rng.randint(12, 40)
    parts: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    parts[f"a{levels}"] = {"const": 1}
    return await _follow(target, guided_json={"$ref": "#/$defs/a0", "$defs": parts})


@attack(*_COMPILED)
async def schema_of_optional_properties(target: Target) -> Outcome:
    names = [f"p{target.rng.random()}" for _ in range(target.rng.choice([20, 60, 400]))]
    return await _follow(target, guided_json={"type": "object", "properties": dict.fromkeys(names, _TEXT)})


@attack(*_COMPILED)
async def schema_of_many_constants(target: Target) -> Outcome:
    return await _follow(target, guided_json={"enum": [f"word{target.rng.random()}" for _ in range(5000)]})


@attack(*_COMPILED)
async def schema_without_an_end(target: Target) -> Outcome:
    name = f"n{target.rng.random()}"
    node = {"type": "object", "properties": {name: {"$ref": "#/$defs/node"}}, "required": [name]}
    return await _follow(target, guided_json={"$ref": "#/$defs/node", "$defs": {"node": node}})


@attack(*_COMPILED)
async def schema_of_wrong_types(target: Target) -> Outcome:
    """Each of these has ended a process that compiles guides."""
    schemas: list[Any] = [
        {"enum": ["a"], "type": {"x": 1}},
        {"const": "a", "type": [["string"]]},
        '{"const": ' + "9" * 5000 + "}",
        '{"const": "\\ud800"}',
        {"type": "object", "properties": [1]},
        {"type": "string", "minLength": 10**30, "maxLength": 10**400},
        {"type": "array", "items": {"$ref": "#"}, "minItems": -1},
        {"$ref": "#/" + "a/" * 5000},
        {"allOf": {}},
        "null",
        "[" * 100_000,
    ]
    return await _follow(target, guided_json=target.rng.choice(schemas))


@attack(*_COMPILED)
async def pattern_of_nested_repeats(target: Target) -> Outcome:
    most = target.rng.randint(100, 1000)
    return await _follow(target, guided_regex=f"(((a{{{most}}}){{{most}}}){{{most}}}){{{most}}}")


@attack(*_COMPILED)
async def pattern_with_exponential_states(target: Target) -> Outcome:
    return await _follow(target, guided_regex=f"(a|b)*a(a|b){{{target.rng.randint(12, 40)}}}")


@attack(*_COMPILED)
async def pattern_of_all_letters(target: Target) -> Outcome:
    return await _follow(target, guided_regex=rf"\p{{L}}{{1,{target.rng.randint(50, 500)}}}")


@attack(*_COMPILED)
async def pattern_that_is_none(target: Target) -> Outcome:
    patterns = [
        "(" * 10_000,
        "[",
        "(?<!a)b",
        "a{2,1}",
        "\\",
        "(?P<a>b)(?P=a)",
        "a" * 500_000,
        "(?i)" * 1000,
        "\x00",
        "$^",
    ]
    return await _follow(target, guided_regex=target.rng.choice(patterns))


@attack(*_COMPILED)
async def choices_of_long_texts(target: Target) -> Outcome:
    choices = [f"{target.rng.random()}" * 100 for _ in range(200)]
    return await _follow(target, structured_outputs={"choice": choices})


@attack(*_COMPILED)
async def many_tools(target: Target) -> Outcome:
    parameters = {"type": "object", "properties": {f"p{i}": _TEXT for i in range(8)}}
    return await _call(target, *(_tool(f"tool_{target.rng.randint(0, 10**9)}", parameters) for _ in range(128)))


@attack(*_COMPILED)
async def tools_of_one_name(target: Target) -> Outcome:
    return await _call(target, *[_tool("a", {"type": "object"})] * 50)


@attack(*_COMPILED)
async def tool_with_a_deep_schema(target: Target) -> Outcome:
    schema: dict[str, Any] = _TEXT
    for _ in range(25):
        schema = {"type": "object", "properties": {f"p{target.rng.random()}": schema}, "additionalProperties": False}
    return await _call(target, _tool("deep", schema))


@attack(*_COMPILED)
async def response_with_a_format_and_tools(target: Target) -> Outcome:
    tools = [{"type": "function", "name": "a" * 64, "parameters": {"type": "object", "properties": {}}}] * 20
    schema = {"type": "object", "properties": {f"p{target.rng.random()}": _TEXT}}
    form = {"type": "json_schema", "name": "a", "schema": schema}
    return await target.post(
        RESPONSES, {"input": "a", "tools": tools, "text": {"format": form}, "max_output_tokens": 4}
    )
