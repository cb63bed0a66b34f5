"""The public names and signatures are those of ``public_api.txt``, and no name of ``public_names.txt`` is gone.

After an addition write the files anew, and commit them with the change::

    python tests/test_public_api.py

The command replaces ``public_api.txt``. It only adds to ``public_names.txt``, so a name that goes needs a reason in
``GONE``.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import speccompile
from speccompile import Speculator, acceptance, guides, hidden_states, modes, policies
from speccompile.runtime.check import CheckReport
from speccompile.runtime.engine import Engine
from speccompile.runtime.request import Request
from speccompile.runtime.request_submitter import Capacity
from speccompile.runtime.result import Result, Timings
from speccompile.runtime.stats import RequestStats, Stats
from speccompile.sampling import OPTIONS

GOLDEN = Path(__file__).with_name("public_api.txt")
#: Every name that was public: in ``speccompile``, its public modules with the members of their classes, and the modules
#: that pages or examples name.
NAMES = Path(__file__).with_name("public_names.txt")
_PASS_LISTS = "Mode.drafting, Mode.after_commit, Mode.taps and Mode.state(tiers) take the place of all lists of passes"
#: Why names of ``public_names.txt`` are gone. An entry is also the reason for the members of the name.
GONE = {
    "speccompile.tools.trtllm_predicates": "a table that nothing read",
    "speccompile.tools.rank_costs.Machine": "it is RankSpeeds; Machine is a class of the report",
    "speccompile.sampling.Processor.active": "placing a request says which processors run; has_effect can refuse one",
    "speccompile.modes.Mode.goals": "what a pass of after_commit provides must hold in the finished step",
    "speccompile.modes.Mode.network_on_demand": "nothing reads it: split and ready mean the same",
    "speccompile.modes.Mode.splits": "nothing reads it: split is a property",
    "speccompile.modes.Mode.weights_from": "nothing read it",
    "speccompile.modes.ReadyMode.goals": "as of Mode",
    "speccompile.sampling.Processor.whole": "no processor has state that is too large to be gathered",
    "speccompile.acceptance.Rule.tree_passes": "Rule.passes(form) has the tree as form.tree",
    **{
        f"speccompile.guides.Guide.{name}": "a guide is a grammar that llguidance follows, and no automaton"
        for name in ("classes", "final", "moves", "of_transitions", "states", "table_size", "tables")
    },
    **{
        f"speccompile.modes.{name}": _PASS_LISTS
        for name in (
            "Mode.commit_passes",
            "Mode.draft_passes",
            "Mode.drafter_chunk_passes",
            "Mode.drafter_passes",
            "Mode.mark_passes",
            "Mode.read_passes",
            "Mode.sampled_draft_passes",
            "Mode.segment_passes",
            "Mode.tree_commit_passes",
            "Mode.tree_draft_passes",
            "Mode.tree_drafter_passes",
            "Mode.tree_read_passes",
            "Mode.tree_state",
            "ReadyMode.commit_passes",
            "ReadyMode.draft_passes",
            "ReadyMode.tree_commit_passes",
            "ReadyMode.tree_draft_passes",
            "ReadyMode.tree_state",
        )
    },
}

#: Classes with members that are not for users, and those that are. Of other classes the ways to make one are listed:
#: the constructor, class methods and static methods.
MEMBERS: dict[type, str] = {
    Engine: "submit step run serve capacity close idle policy __enter__ __exit__",
    Request: "cancel result stream finished finish_reason timings __iter__ __aiter__",
    Result: "acceptance_length",
    CheckReport: "largest_logit_change",
    RequestStats: "acceptance_length per_position rejected_tokens",
    Stats: "acceptance_length per_position rejected_tokens tier_residency reset",
    guides.Guide: "matches",
    hidden_states.Record: "as_specforge as_trtllm",
    modes.ReadyMode: "propose proposer",
}
PROTOCOLS = (policies.Policy, policies.LearningPolicy, policies.Chooser)
#: All public members of these are listed.
OPEN = (modes.Mode, acceptance.Rule, Speculator, *PROTOCOLS)
#: Reached through a speculator, so they are in no module's ``__all__``.
REACHED = (Engine, Request, Result, Timings, Capacity, CheckReport, RequestStats, Stats)
#: This package alone makes them.
MADE_HERE = (Speculator, Engine, Request)
#: Between ``wrap`` and the speculator that it makes.
INTERNAL = {"take", "close_to_rebuild"}


def public_names(module: Any) -> list[str]:
    """``__all__``, or, of a module without it, what it defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(name for name in getattr(module, "__all__", own) if not name.startswith("_") or name == "__version__")


def shown_default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return value.__name__ if callable(value) else repr(value)


def parameters(function: Any) -> Iterator[str]:
    """A line for each parameter."""
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            yield "*"
            keyword_only = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {shown_default(parameter.default)}"
        annotation = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        yield f"{stars}{parameter.name}{annotation}{default}"


def call(name: str, function: Any) -> Iterator[str]:
    """The signature, a line for each parameter."""
    lines, result = list(parameters(function)), inspect.signature(function).return_annotation
    yield f"{name}(" + ("" if lines else f") -> {result}")
    yield from (f"    {line}" for line in lines)
    if lines:
        yield f") -> {result}"


def members(kind: type, names: list[str]) -> Iterator[str]:
    for name in names:
        value = inspect.getattr_static(kind, name)
        if isinstance(value, property):
            yield f".{name}: {inspect.signature(value.fget).return_annotation}"
        elif callable(getattr(kind, name)):
            yield from call(f".{name}", getattr(kind, name))


def own_members(kind: type) -> list[str]:
    """Public methods and properties, inherited ones of this package too."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == speccompile.__name__]
    return sorted({name for base in bases for name in vars(base) if not name.startswith("_")} - INTERNAL)


def constructors(kind: type) -> list[str]:
    return [n for n in own_members(kind) if isinstance(inspect.getattr_static(kind, n), classmethod | staticmethod)]


def described(name: str, value: Any) -> Iterator[str]:
    """The lines of a class, a function or another value."""
    if not isinstance(value, type):
        if inspect.isfunction(value):
            yield from call(name, value)
        else:
            yield name
        return
    if issubclass(value, Exception):
        yield f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
        placeholders = {field for _, field, _, _ in Formatter().parse(getattr(value, "template", "")) if field}
        yield from (f"    {field}" for field in sorted(placeholders - {"message"}))
        return
    yield f"class {name}"
    if value not in (*MADE_HERE, *PROTOCOLS) and (dataclasses.is_dataclass(value) or "__init__" in vars(value)):
        yield from (f"    {line}" for line in parameters(value))
    listed = (
        own_members(value) if value in OPEN else MEMBERS[value].split() if value in MEMBERS else constructors(value)
    )
    yield from (f"    {line}" for line in members(value, listed))


def public_api() -> str:
    names = {name: getattr(speccompile, name) for name in public_names(speccompile)}
    lines = ["speccompile", *(f"    {name}" for name in names)]
    for name, value in names.items():
        if not inspect.ismodule(value):
            lines += ["", *described(f"speccompile.{name}", value)]
    for module in filter(inspect.ismodule, names.values()):
        for name in public_names(module):
            lines += ["", *described(f"{module.__name__}.{name}", getattr(module, name))]
    for kind in REACHED:
        lines += ["", *described(kind.__name__, kind)]
    lines += ["", "options of the sampling pipeline", *(f"    {name}" for name in OPTIONS)]
    return "\n".join(lines) + "\n"


def test_nothing_public_was_removed_or_changed() -> None:
    before, now = GOLDEN.read_text().splitlines(), public_api().splitlines()
    changes = [line for line in difflib.ndiff(before, now) if line[0] in "-+"]
    removed = [line for line in changes if line.startswith("-")]
    text = "\n".join(changes)
    assert not removed, f"removed or changed, which breaks code of users:\n{text}"
    assert not changes, f"new; write {GOLDEN.name} anew with `python tests/{Path(__file__).name}`:\n{text}"


def definitions() -> Iterator[tuple[str, Any]]:
    """Public modules, classes and functions, and the methods and properties that are listed of classes."""
    for name in public_names(speccompile):
        value = getattr(speccompile, name)
        yield name, value
        if inspect.ismodule(value):
            yield from ((f"{name}.{own}", getattr(value, own)) for own in public_names(value))
    yield from ((kind.__name__, kind) for kind in REACHED)


def attribute(value: Any, name: str) -> Any:
    """The attribute or the submodule ``name`` of ``value``; None if there is neither."""
    if inspect.ismodule(value) and not hasattr(value, name):
        found = importlib.util.find_spec(f"{value.__name__}.{name}") if hasattr(value, "__path__") else None
        return None if found is None else importlib.import_module(found.name)
    if isinstance(value, type) and any(name in inspect.get_annotations(base) for base in value.__mro__):
        # A field without a default is no attribute of its class.
        return True
    return inspect.getattr_static(value, name, None) if isinstance(value, type) else getattr(value, name, None)


def exists(name: str) -> bool:
    """Whether the dotted ``name`` is a module, a definition of one, or a member of a class."""
    value: Any = speccompile
    for part in name.split(".")[1:]:
        value = attribute(value, part)
        if value is None:
            return False
    return True


def names_now() -> set[str]:
    """Names of the public modules, of their definitions, and of the members of their classes."""
    public = [(f"{speccompile.__name__}.{name}", value) for name, value in definitions() if value not in REACHED]
    kinds = [(name, value) for name, value in public if isinstance(value, type)]
    return {name for name, _ in public} | {f"{name}.{own}" for name, kind in kinds for own in members_of(kind)}


def test_no_public_name_is_gone_without_a_reason() -> None:
    names = NAMES.read_text().split()
    gone = [name for name in names if not exists(name)]
    explained = {name for name in gone if any(f"{name}.".startswith(f"{entry}.") for entry in GONE)}
    assert sorted(set(gone) - explained) == [], "removed or renamed, which breaks code of users"
    assert not [entry for entry in GONE if entry not in gone], "these names exist, or never were public"
    assert sorted(names_now() - set(names)) == [], f"new; run `python tests/{Path(__file__).name}`"


def members_of(kind: type) -> list[str]:
    if issubclass(kind, Exception):
        return []
    listed = own_members(kind) if kind in OPEN else MEMBERS[kind].split() if kind in MEMBERS else constructors(kind)
    return [name for name in listed if not name.startswith("__")]


def without_docstring(name: str, value: Any) -> Iterator[str]:
    """A class has its own docstring, where a dataclass makes none; a member may have that of a base class."""
    if isinstance(value, type):
        if not (value.__dict__.get("__doc__") or "").strip() or value.__doc__.startswith(f"{value.__name__}("):
            yield name
        for member in members_of(value):
            found = inspect.getattr_static(value, member)
            if not (inspect.getdoc(getattr(value, member)) or inspect.getdoc(found)):
                yield f"{name}.{member}"
    elif (inspect.ismodule(value) or inspect.isfunction(value)) and not value.__doc__:
        yield name


def test_every_public_definition_has_a_docstring() -> None:
    assert not [missing for name, value in definitions() for missing in without_docstring(name, value)]


if __name__ == "__main__":
    GOLDEN.write_text(public_api())
    NAMES.write_text("\n".join(sorted({*NAMES.read_text().split(), *names_now()})) + "\n")
