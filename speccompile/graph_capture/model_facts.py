"""Facts that a model's forward depends on beside weights: module tree, hooks, and values of modules and configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import output_capturing

from speccompile.graph_capture.rotary import changing_modules

#: Fields of a config that no forward computes with. transformers' ``generate`` sets the last one itself.
NO_FORWARD_READS = frozenset(
    (
        "_name_or_path",
        "_commit_hash",
        "architectures",
        # save_pretrained writes the dtype's name into this field.
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
#: Attributes of modules that no forward in eval mode computes with. For transformers' models, but not for their layers,
#: these are also all names that begin with an underscore.
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
GLOBAL_HOOKS = {
    "forward hook": nn_module._global_forward_hooks,
    "forward pre-hook": nn_module._global_forward_pre_hooks,
}
_SCALAR_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
UNWATCHED = object()


@dataclass(frozen=True)
class Hook:
    """A hook and its state.

    Args:
        run: the hook itself.
        settings: the scalars, functions and containers of them in ``state``.
        state: attributes of the object that runs, and the values that its function closes over.
    """

    run: Callable[..., Any]
    settings: Mapping[str, Any]
    state: Mapping[str, Any]


Hooks = Mapping[str, tuple[Hook, ...]]


@dataclass(frozen=True)
class ModuleFacts:
    """The facts that the forward of one module depends on."""

    module: nn.Module
    kind: type[nn.Module]
    forward: Callable[..., Any]
    hooks: Hooks
    tensors: frozenset[str]
    settings: Mapping[str, Any]


def own_code(model: nn.Module) -> str | None:
    """Describe the first hook of ``model``, or function that replaces a method of a module. The key of a stored capture
    cannot contain such code. Return None without any."""
    for name, hooks in hooks_of(GLOBAL_HOOKS).items():
        if hooks:
            return f"a {name} for every module ({name_of(hooks[0].run)})"
    for path, facts in module_facts(model).items():
        for name, hooks in facts.hooks.items():
            if hooks:
                return f"a {name} of {path or 'the model'} ({name_of(hooks[0].run)})"
        for name, value in facts.settings.items():
            if replaces_method(facts.kind, name, value):
                return f"a function that replaces {path or 'the model'}.{name} ({name_of(value)})"
    return None


def scalar_settings(model: nn.Module) -> Iterator[str]:
    """Yield the settings of all modules except functions, as text."""
    for path, facts in module_facts(model).items():
        for name, value in sorted(facts.settings.items()):
            if not callable(value):
                # The order of a set differs between processes.
                yield f"{path}.{name}={sorted(value, key=repr) if isinstance(value, set) else value!r}"


def module_facts(model: nn.Module) -> dict[str, ModuleFacts]:
    """Return the facts of all modules by path."""
    # The forwards of these modules rewrite their tables when a sequence becomes longer.
    rewritten = changing_modules(model)
    facts = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = hooks_of({"forward hook": module._forward_hooks, "forward pre-hook": module._forward_pre_hooks})
        settings, tensors = _settings(vars(module), BOOKKEEPING), {**module._parameters, **module._buffers}
        if isinstance(module, PreTrainedModel):
            settings = {name: value for name, value in settings.items() if not name.startswith("_")}
        if path in rewritten:
            settings = tensors = {}
        names = frozenset(name for name, tensor in tensors.items() if tensor is not None)
        facts[path] = ModuleFacts(module, type(module), type(module).forward, hooks, names, settings)
    return facts


def config_facts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the fields of all configs that a forward may read, by path and name."""
    return {
        path: {
            name.removesuffix("_internal"): value
            for name, value in _settings(vars(config), NO_FORWARD_READS).items()
            if not name.endswith(("token_id", "token_ids", "token_index"))
        }
        for path, config in configs_of(model).items()
    }


def configs_of(model: nn.Module) -> dict[str, PreTrainedConfig]:
    """Return the configs by the first path that leads to them."""
    configs: dict[str, PreTrainedConfig] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            configs[f"{path}.config".removeprefix(".")] = config
    return configs


def hooks_of(hooks: Mapping[str, Mapping[int, Callable[..., Any]]]) -> Hooks:
    """Return the hooks of each kind, without transformers' own. These record outputs, and stay after a call that
    requested hidden states."""
    return {
        name: tuple(
            hook_of(hook) for hook in given.values() if getattr(hook, "__module__", "") != output_capturing.__name__
        )
        for name, given in hooks.items()
    }


def hook_of(run: Callable[..., Any]) -> Hook:
    """Return a hook with its current state."""
    closed_over = {name: cell.cell_contents for name, cell in hook_cells(run).items()}
    state = {**closed_over, **hook_attributes(run)}
    return Hook(run, _settings(state, BOOKKEEPING), state)


def hook_attributes(hook: Callable[..., Any]) -> dict[str, Any]:
    """Return attributes of the object that runs. A module's method has none here: the module's facts have them."""
    owner = hook.__self__ if isinstance(hook, MethodType) else hook
    if isinstance(hook, MethodType) and isinstance(owner, nn.Module):
        return {}
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    return attributes


def hook_cells(hook: Callable[..., Any]) -> dict[str, CellType]:
    """Return the variables that the function of a hook closes over, by name, except those without a value yet."""
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell for name, cell in cells if cell != CellType()}


def _settings(attributes: Mapping[str, Any], but: frozenset[str]) -> dict[str, Any]:
    copies = {name: copied(value) for name, value in attributes.items() if name not in but}
    return {name: value for name, value in copies.items() if value is not UNWATCHED}


def copied(value: Any) -> Any:
    """Return ``value`` if it is a scalar or a function, a copy of a container of these, or ``UNWATCHED``."""
    if value is None or isinstance(value, _SCALAR_TYPES):
        return value
    if isinstance(value, dict):
        copies = {key: copied(item) for key, item in value.items()}
        return UNWATCHED if any(item is UNWATCHED for item in copies.values()) else copies
    if isinstance(value, list | tuple):
        items = [copied(item) for item in value]
        if any(item is UNWATCHED for item in items):
            return UNWATCHED
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return set(value)
    return value if callable(value) and not isinstance(value, nn.Module | torch.Tensor) else UNWATCHED


def replaces_method(kind: type, name: str, value: Any) -> bool:
    """Whether the attribute ``name`` of an instance hides a method of its class."""
    return callable(value) and callable(getattr(kind, name, None))


def name_of(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function, or of the class of a callable object."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name
