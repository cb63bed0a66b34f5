"""Guards: what a captured graph depends on besides weights, compared with the model when a request comes.

A graph holds what the model's Python did while it was captured. Hooks, adapters, replaced modules and settings that
change later change the model's own text and not the graph's.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import output_capturing

from speccompile.errors import ModelChanged, shown
from speccompile.graph_capture.rotary import changing_modules

#: Fields of a config that no forward computes with. transformers' ``generate`` sets the last one itself.
NO_FORWARD_READS = frozenset(
    (
        "_name_or_path",
        "_commit_hash",
        "architectures",
        # save_pretrained writes its name there.
        "dtype",
        "torch_dtype",
        "transformers_version",
        "id2label",
        "label2id",
        "problem_type",
        "return_dict",
        "use_cache",
        "output_hidden_states",
        "_output_attentions",
        "task_specific_params",
        "tokenizer_class",
        "custom_pipelines",
        "_experts_implementation_internal",
    )
)
#: Attributes of modules that no forward in eval mode computes with. Of transformers' models, not of their layers, also
#: whatever begins with an underscore.
BOOKKEEPING = (frozenset(vars(nn.Module())) - {"training"}) | frozenset(
    (
        "_is_hf_initialized",
        "name_or_path",
        "warnings_issued",
        "loss_type",
        "kernel_config",
        "all_tied_weights_keys",
        "gradient_checkpointing",
        # model.generate = spec.generate
        "generate",
    )
)
_GLOBAL_HOOKS = {
    "forward hook": nn_module._global_forward_hooks,
    "forward pre-hook": nn_module._global_forward_pre_hooks,
}
_SCALAR_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_UNWATCHED = object()
_KEEP_APART = (
    "steps do not call hooks; a value that only counts or records calls belongs into a separate object that the hook "
    "holds: attributes of that are not compared"
)


@dataclass(frozen=True)
class _Hook:
    """A hook. ``settings`` are the plain values among ``state``: attributes of the object that runs, and what its
    function closes over."""

    run: Callable[..., Any]
    settings: Mapping[str, Any]
    state: Mapping[str, Any]


Hooks = Mapping[str, tuple[_Hook, ...]]


@dataclass(frozen=True)
class _Facts:
    """What the forward of one module depends on."""

    module: nn.Module
    kind: type[nn.Module]
    forward: Callable[..., Any]
    hooks: Hooks
    tensors: frozenset[str]
    settings: Mapping[str, Any]


class ModelGuard:
    """What ``model`` is when this is made: module tree, hooks, and all plain values and functions that its modules,
    configs and hooks hold. An adapter is modules, and what is active is a plain value of its layers.

    Tensors are not watched here: see :class:`speccompile.runtime.target.Target` and
    :class:`speccompile.graph_capture.held_tensors.HeldTensors`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules = _module_facts(model)
        self._configs = _config_facts(model)
        self._global_hooks = _hooks(_GLOBAL_HOOKS)
        self._remember()

    def unchanged(self) -> bool:
        """Whether nothing was assigned since: False may also mean that something of no account was.

        One comparison of dicts with copies of them: about half a millisecond for 400 modules.
        """
        try:
            same = self._live == self._copies and [cell.cell_contents for cell in self._cells] == self._contents
        except Exception:
            # An attribute was assigned whose class compares otherwise (tensors): ``check`` does not compare such ones.
            return False
        return same and [kind.forward for kind in self._kinds] == self._forwards

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Those that ran when this was made, each with its name."""
        for hooks in (self._global_hooks, *(facts.hooks for facts in self._modules.values())):
            for hook in itertools.chain.from_iterable(hooks.values()):
                yield _name(hook.run), hook.run

    def check(self) -> None:
        """Look at everything.

        Raises:
            ModelChanged: names the first difference and its module.
        """
        if (what := self._difference()) is None:
            self._remember()
        elif not _is_altered(self._model):
            raise ModelChanged(model=type(self._model).__name__, what=what)

    def _difference(self) -> str | None:
        modules = _module_facts(self._model)
        differences = (
            _tree_difference(self._modules, modules),
            _hook_difference("every module", self._global_hooks, _hooks(_GLOBAL_HOOKS)),
            *(_module_difference(path, was, modules[path]) for path, was in self._modules.items() if path in modules),
            _config_difference(self._configs, _config_facts(self._model)),
        )
        return next((found for found in differences if found), None)

    def _remember(self) -> None:
        """Note all dicts, lists and sets that ``unchanged`` looks at, and what they hold."""
        modules = list(self._model.modules())
        holders = [vars(holder) for holder in (*modules, *_configs(self._model).values())]
        self._live: list[Any] = [*_GLOBAL_HOOKS.values(), *holders]
        for module in modules:
            self._live += [module._modules, module._parameters, module._buffers]
            self._live += [module._forward_hooks, module._forward_pre_hooks]
        self._copies: list[Any] = [dict(live) for live in self._live]
        for holder in holders:
            for value in holder.values():
                if isinstance(value, list | dict | set) and (copy := _copy(value)) is not _UNWATCHED:
                    self._live.append(value)
                    self._copies.append(copy)
        self._cells: list[CellType] = []
        for hooks in (self._global_hooks, *(facts.hooks for facts in self._modules.values())):
            for known in itertools.chain.from_iterable(hooks.values()):
                hook = _hook(known.run)
                self._cells += _cells(hook.run).values()
                attributes = _attributes(hook.run)
                self._live.append(attributes)
                self._copies.append(dict(attributes))
                for name, value in hook.settings.items():
                    if isinstance(value, list | dict | set):
                        self._live.append(hook.state[name])
                        self._copies.append(value)
        self._contents = [cell.cell_contents for cell in self._cells]
        self._kinds = list({type(module) for module in modules})
        self._forwards = [kind.forward for kind in self._kinds]


def own_code(model: nn.Module) -> str | None:
    """The first hook of ``model``, or function in the place of a module's method: code that no key of a stored capture
    can hold. None if there is none."""
    for name, hooks in _hooks(_GLOBAL_HOOKS).items():
        if hooks:
            return f"a {name} for every module ({_name(hooks[0].run)})"
    for path, facts in _module_facts(model).items():
        for name, hooks in facts.hooks.items():
            if hooks:
                return f"a {name} of {path or 'the model'} ({_name(hooks[0].run)})"
        for name, value in facts.settings.items():
            if _replaces_method(facts.kind, name, value):
                return f"a function in the place of {path or 'the model'}.{name} ({_name(value)})"
    return None


def scalar_settings(model: nn.Module) -> Iterator[str]:
    """All plain values that modules hold, as text."""
    for path, facts in _module_facts(model).items():
        for name, value in sorted(facts.settings.items()):
            if not callable(value):
                # A set's order differs from process to process.
                yield f"{path}.{name}={sorted(value, key=repr) if isinstance(value, set) else value!r}"


_altered: list[nn.Module] = []


@contextlib.contextmanager
def altering(model: nn.Module) -> Iterator[None]:
    """Inside, this package sets hooks or settings of ``model`` for a moment: no guard of another thread minds."""
    _altered.append(model)
    try:
        yield
    finally:
        _altered.remove(model)


def _is_altered(model: nn.Module) -> bool:
    return any(module is model for module in _altered)


# --- reading -------------------------------------------------------------------------------------


def _module_facts(model: nn.Module) -> dict[str, _Facts]:
    # Their own forward rewrites what they hold when a sequence outgrows a table.
    rewritten = changing_modules(model)
    facts = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = _hooks({"forward hook": module._forward_hooks, "forward pre-hook": module._forward_pre_hooks})
        settings, tensors = _settings(vars(module), BOOKKEEPING), {**module._parameters, **module._buffers}
        if isinstance(module, PreTrainedModel):
            settings = {name: value for name, value in settings.items() if not name.startswith("_")}
        if path in rewritten:
            settings = tensors = {}
        names = frozenset(name for name, tensor in tensors.items() if tensor is not None)
        facts[path] = _Facts(module, type(module), type(module).forward, hooks, names, settings)
    return facts


def _config_facts(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        path: {
            name.removesuffix("_internal"): value
            for name, value in _settings(vars(config), NO_FORWARD_READS).items()
            if not name.endswith(("token_id", "token_ids", "token_index"))
        }
        for path, config in _configs(model).items()
    }


def _configs(model: nn.Module) -> dict[str, PreTrainedConfig]:
    """Configs by the first path that leads to them."""
    configs: dict[str, PreTrainedConfig] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            configs[f"{path}.config".removeprefix(".")] = config
    return configs


def _hooks(hooks: Mapping[str, Mapping[int, Callable[..., Any]]]) -> Hooks:
    """By kind, but for transformers' own, which record outputs and stay after a call that asked for hidden states."""
    return {
        name: tuple(
            _hook(hook) for hook in given.values() if getattr(hook, "__module__", "") != output_capturing.__name__
        )
        for name, given in hooks.items()
    }


def _hook(run: Callable[..., Any]) -> _Hook:
    closed_over = {name: cell.cell_contents for name, cell in _cells(run).items()}
    state = {**closed_over, **_attributes(run)}
    return _Hook(run, _settings(state, BOOKKEEPING), state)


def _attributes(hook: Callable[..., Any]) -> dict[str, Any]:
    """Attributes of the object that runs; of a module's method none, since modules are watched by themselves."""
    owner = hook.__self__ if isinstance(hook, MethodType) else hook
    if isinstance(hook, MethodType) and isinstance(owner, nn.Module):
        return {}
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    return attributes


def _cells(hook: Callable[..., Any]) -> dict[str, CellType]:
    """What the function of a hook closes over, by name, but for names that have no value yet."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell for name, cell in cells if cell != CellType()}


def _settings(attributes: Mapping[str, Any], but: frozenset[str]) -> dict[str, Any]:
    copies = {name: _copy(value) for name, value in attributes.items() if name not in but}
    return {name: value for name, value in copies.items() if value is not _UNWATCHED}


def _copy(value: Any) -> Any:
    """``value`` if it is plain or a function, or a copy of a container of such; else ``_UNWATCHED``."""
    if value is None or isinstance(value, _SCALAR_TYPES):
        return value
    if isinstance(value, dict):
        copies = {key: _copy(item) for key, item in value.items()}
        return _UNWATCHED if any(item is _UNWATCHED for item in copies.values()) else copies
    if isinstance(value, list | tuple):
        items = [_copy(item) for item in value]
        if any(item is _UNWATCHED for item in items):
            return _UNWATCHED
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return set(value)
    return value if callable(value) and not isinstance(value, nn.Module | torch.Tensor) else _UNWATCHED


# --- comparing -----------------------------------------------------------------------------------


def _tree_difference(before: Mapping[str, _Facts], now: Mapping[str, _Facts]) -> str | None:
    for path, was in before.items():
        if path not in now:
            return f"the module {path} ({was.kind.__name__}) was removed"
        if now[path].module is not was.module:
            return f"the module {path} ({was.kind.__name__}) was replaced by another {now[path].kind.__name__}"
        if now[path].kind is not was.kind:
            return f"the class of {path or 'the model'} was {was.kind.__name__} and is {now[path].kind.__name__}"
    added = next((path for path in now if path not in before), None)
    return None if added is None else f"the module {added} ({now[added].kind.__name__}) was added"


def _module_difference(path: str, was: _Facts, now: _Facts) -> str | None:
    if now.forward is not was.forward:
        return f"{was.kind.__name__}.forward, which {path or 'the model'} runs, was replaced"
    if found := _hook_difference(path or "the model", was.hooks, now.hooks):
        return found
    for name, value in now.settings.items():
        if name not in was.settings and _replaces_method(was.kind, name, value):
            return f"{f'{path}.{name}'.removeprefix('.')} was replaced by the function {_name(value)}"
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
                return f"a {name} of {owner} was {'added' if added else 'removed'} ({_name((added or removed)[0])})"
            return f"the {name}s of {owner} run in another order"
        for was, hook in zip(hooks, now[name], strict=True):
            if found := _setting_difference(_name(was.run), was.settings, hook.settings, hook.state):
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
    """``every`` are all values of the owner: one that became a tensor (a memory of a forward) is not compared."""
    for name, value in before.items():
        place = f"{owner}.{name}".removeprefix(".")
        if name in now and now[name] is not value and now[name] != value:
            return f"{place} was {shown(value)} and is {shown(now[name])}"
        if name not in now and name not in every:
            return f"{place}, which was {shown(value)}, was deleted"
    return None


def _replaces_method(kind: type, name: str, value: Any) -> bool:
    return callable(value) and callable(getattr(kind, name, None))


def _name(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name
