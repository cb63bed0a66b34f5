"""Guards: a comparison of the facts that a captured graph depends on with the model at each request.

A graph contains the effects of the model's Python code during the capture. A later change of hooks, adapters, modules
or settings changes the output of the model, but not that of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import CellType
from typing import Any

from transformers import PreTrainedModel

from speccompile.errors import ModelChanged, shown
from speccompile.graph_capture.altering import is_altered
from speccompile.graph_capture.model_facts import (
    GLOBAL_HOOKS,
    UNWATCHED,
    Hooks,
    ModuleFacts,
    config_facts,
    configs_of,
    copied,
    hook_attributes,
    hook_cells,
    hook_of,
    hooks_of,
    module_facts,
    name_of,
    replaces_method,
)

_KEEP_APART = (
    "steps do not call hooks; put a value that only counts or records calls into a separate object that the hook "
    "holds: attributes of that object are not compared"
)


class ModelGuard:
    """The facts of ``model`` at construction: module tree, hooks, and all scalars and functions that its modules,
    configs and hooks hold. An adapter consists of modules; its layers hold the active adapter as a scalar.

    Tensors are not compared here: see :class:`speccompile.runtime.target.Target` and
    :class:`speccompile.graph_capture.held_tensors.HeldTensors`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules = module_facts(model)
        self._configs = config_facts(model)
        self._global_hooks = hooks_of(GLOBAL_HOOKS)
        self._remember()

    def unchanged(self) -> bool:
        """Whether nothing was assigned since construction. False may also mean an assignment without effect on the
        forward.

        The check compares dicts with copies of them, which needs about half a millisecond for 400 modules.
        """
        try:
            same = self._live == self._copies and [cell.cell_contents for cell in self._cells] == self._contents
        except Exception:
            # An attribute whose class compares elementwise (a tensor) was assigned: ``check`` does not compare these.
            return False
        return same and [kind.forward for kind in self._kinds] == self._forwards

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield the hooks at construction, each with its name."""
        for hooks in (self._global_hooks, *(facts.hooks for facts in self._modules.values())):
            for hook in itertools.chain.from_iterable(hooks.values()):
                yield name_of(hook.run), hook.run

    def check(self) -> None:
        """Read the model again, and compare all facts.

        Raises:
            ModelChanged: a fact differs; the error names the first difference and its module.
        """
        if (what := self._difference()) is None:
            self._remember()
        elif not is_altered(self._model):
            raise ModelChanged(model=type(self._model).__name__, what=what)

    def _difference(self) -> str | None:
        modules = module_facts(self._model)
        differences = (
            _tree_difference(self._modules, modules),
            _hook_difference("every module", self._global_hooks, hooks_of(GLOBAL_HOOKS)),
            *(_module_difference(path, was, modules[path]) for path, was in self._modules.items() if path in modules),
            _config_difference(self._configs, config_facts(self._model)),
        )
        return next((found for found in differences if found), None)

    def _remember(self) -> None:
        """Copy all dicts, lists and sets that ``unchanged`` compares."""
        modules = list(self._model.modules())
        holders = [vars(holder) for holder in (*modules, *configs_of(self._model).values())]
        self._live: list[Any] = [*GLOBAL_HOOKS.values(), *holders]
        for module in modules:
            self._live += [module._modules, module._parameters, module._buffers]
            self._live += [module._forward_hooks, module._forward_pre_hooks]
        self._copies: list[Any] = [dict(live) for live in self._live]
        for holder in holders:
            for value in holder.values():
                if isinstance(value, list | dict | set) and (copy := copied(value)) is not UNWATCHED:
                    self._live.append(value)
                    self._copies.append(copy)
        self._cells: list[CellType] = []
        for hooks in (self._global_hooks, *(facts.hooks for facts in self._modules.values())):
            for known in itertools.chain.from_iterable(hooks.values()):
                hook = hook_of(known.run)
                self._cells += hook_cells(hook.run).values()
                attributes = hook_attributes(hook.run)
                self._live.append(attributes)
                self._copies.append(dict(attributes))
                for name, value in hook.settings.items():
                    if isinstance(value, list | dict | set):
                        self._live.append(hook.state[name])
                        self._copies.append(value)
        self._contents = [cell.cell_contents for cell in self._cells]
        self._kinds = list({type(module) for module in modules})
        self._forwards = [kind.forward for kind in self._kinds]


# --- comparing -----------------------------------------------------------------------------------


def _tree_difference(before: Mapping[str, ModuleFacts], now: Mapping[str, ModuleFacts]) -> str | None:
    for path, was in before.items():
        if path not in now:
            return f"the module {path} ({was.kind.__name__}) was removed"
        if now[path].module is not was.module:
            return f"the module {path} ({was.kind.__name__}) was replaced by another {now[path].kind.__name__}"
        if now[path].kind is not was.kind:
            return f"the class of {path or 'the model'} was {was.kind.__name__} and is {now[path].kind.__name__}"
    added = next((path for path in now if path not in before), None)
    return None if added is None else f"the module {added} ({now[added].kind.__name__}) was added"


def _module_difference(path: str, was: ModuleFacts, now: ModuleFacts) -> str | None:
    if now.forward is not was.forward:
        return f"{was.kind.__name__}.forward, which {path or 'the model'} runs, was replaced"
    if found := _hook_difference(path or "the model", was.hooks, now.hooks):
        return found
    for name, value in now.settings.items():
        if name not in was.settings and replaces_method(was.kind, name, value):
            return f"{f'{path}.{name}'.removeprefix('.')} was replaced by the function {name_of(value)}"
    for name in sorted(was.tensors ^ now.tensors):
        return f"the tensor {path}.{name} was {'added' if name in now.tensors else 'removed'}"
    return _setting_difference(path, was.settings, now.settings, vars(now.module))


def _hook_difference(owner: str, before: Hooks, now: Hooks) -> str | None:
    for name, hooks in before.items():
        ran, runs = [hook.run for hook in hooks], [hook.run for hook in now[name]]
        if ran != runs:
            added = [hook for hook in runs if hook not in ran]
            removed = [hook for hook in ran if hook not in runs]
            if added or removed:
                return f"a {name} of {owner} was {'added' if added else 'removed'} ({name_of((added or removed)[0])})"
            return f"the {name}s of {owner} run in another order"
        for was, hook in zip(hooks, now[name], strict=True):
            if found := _setting_difference(name_of(was.run), was.settings, hook.settings, hook.state):
                return f"{found}, in a {name} of {owner} ({_KEEP_APART})"
    return None


def _config_difference(before: Mapping[str, dict[str, Any]], now: Mapping[str, dict[str, Any]]) -> str | None:
    for path, fields in before.items():
        if path in now and (found := _setting_difference(path, fields, now[path], now[path])):
            return found
    return None


def _setting_difference(
    owner: str, before: Mapping[str, Any], now: Mapping[str, Any], every: Mapping[str, Any]
) -> str | None:
    """Return the first setting that differs. ``every`` has all values of the owner. A value that became a tensor
    (memory of a forward) is not compared."""
    for name, value in before.items():
        setting = f"{owner}.{name}".removeprefix(".")
        if name in now and now[name] is not value and now[name] != value:
            return f"{setting} was {shown(value)} and is {shown(now[name])}"
        if name not in now and name not in every:
            return f"{setting}, which was {shown(value)}, was deleted"
    return None
