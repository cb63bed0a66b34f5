"""The option ``weights`` of ``wrap``: the form of each weight. The command line uses it, so it imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from speccompile.errors import InvalidOption

#: ``same`` keeps the model's own values. The others round them, which changes the model.
WeightForm = Literal["same", "int8", "int4"]
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)
#: Forms of the weights of a drafter's network. ``auto`` rounds them where that is faster and changes no text.
DraftWeights = WeightForm | Literal["auto"]
DRAFT_WEIGHTS: tuple[DraftWeights, ...] = ("auto", *WEIGHT_FORMS)
#: One form, or one for each of these modules.
Forms = WeightForm | Mapping[str, WeightForm]

#: The key of a mapping for all weights that no other key names.
OTHERS = "*"


class QuantizedForms:
    """Base of the weights of a quantised checkpoint, which keep the form in which they are stored.

    Args:
        format: the checkpoint's format: ``"GGUF Q4_K"``.
        others: the forms of all other weights.
    """

    format: str
    others: Forms


Weights = Forms | QuantizedForms


@dataclass(frozen=True)
class WeightForms:
    """A form for each weight of a linear, and for the table of input embeddings.

    Args:
        others: form of weights that ``modules`` do not name. With ``int4``, embeddings and lm_heads are ``int8``: they
            are few, and the logits depend on them directly. Routers are ``same``: they are few, and a rounding error
            may choose other experts.
        modules: names of modules and their forms. A name matches a module whose dotted path has it at its end or
            within (``lm_head``, ``mlp.down_proj``, ``layers.0``). If several match, the one with the most parts is
            used, and among these the one with the most letters. Their order in the mapping does not matter.
        format: format of a quantised checkpoint whose weights are used as they are stored; else empty.
    """

    others: WeightForm = "same"
    modules: tuple[tuple[str, WeightForm], ...] = ()
    format: str = ""

    @staticmethod
    def of(value: Weights) -> WeightForms:
        """Create the forms from the option, which :func:`read_weights` has checked."""
        if isinstance(value, QuantizedForms):
            return replace(WeightForms.of(value.others), format=value.format)
        if isinstance(value, str):
            return WeightForms(value)
        modules = {name: form for name, form in value.items() if name != OTHERS}
        return WeightForms(value.get(OTHERS, "same"), tuple(modules.items()))

    @property
    def rounds(self) -> bool:
        """Whether any linear is rounded."""
        forms = (self.others, *dict(self.modules).values())
        return bool(self.format) or any(form != "same" for form in forms)

    def key(self, modules: Iterable[str]) -> str | None:
        """Return the name that decides on a weight of these modules; None means :attr:`others`. A tied weight has
        several modules."""
        return max(self.keys(modules), key=lambda name: (name.count("."), len(name), name), default=None)

    def keys(self, modules: Iterable[str]) -> list[str]:
        """Return all names that match a weight of these modules."""
        return [name for name, _ in self.modules for module in modules if f".{name}." in f".{module}."]

    def form(self, modules: Iterable[str], *, of_vocabulary: bool, is_router: bool = False) -> WeightForm:
        """Return the form of a weight of these modules.

        Args:
            of_vocabulary: whether it is an embedding's or an lm_head's weight.
            is_router: whether it chooses among experts.
        """
        key = self.key(modules)
        if key is not None:
            return dict(self.modules)[key]
        if is_router:
            return "same"
        return "int8" if self.others == "int4" and of_vocabulary else self.others

    def __str__(self) -> str:
        """``int4``, or JSON without spaces. Equal forms have equal text. The format of a checkpoint comes first."""
        if self.format:
            others = str(replace(self, format=""))
            return self.format if others == "same" else f"{self.format}, others {others}"
        if not self.modules:
            return self.others
        return json.dumps({OTHERS: self.others, **dict(self.modules)}, sort_keys=True, separators=(",", ":"))


def read_weights(where: str, name: str, value: Any) -> Weights:
    """Check the option ``weights``, for :mod:`speccompile.utils.options`.

    Raises:
        InvalidOption: ``value`` is neither a form, nor a mapping of module names to forms, nor quantised weights.
    """
    if isinstance(value, QuantizedForms):
        return value

    def refuse(reason: str) -> InvalidOption:
        return InvalidOption(where=where, name=name, value=value, reason=reason)

    choices = f"choose from {', '.join(WEIGHT_FORMS)}"
    if isinstance(value, Mapping):
        if not value:
            raise refuse(f"it is empty; {choices}, or name modules")
        for module, form in value.items():
            if not isinstance(module, str) or not all(module.split(".")):
                raise refuse(f"{module!r} must be a module's name, such as 'lm_head' or 'layers.0.mlp', or {OTHERS!r}")
            if form not in WEIGHT_FORMS:
                raise refuse(f"{form!r}, of {module!r}, is not a form; {choices}")
        return dict(value)
    if not isinstance(value, str) or value not in WEIGHT_FORMS:
        raise refuse(f"{choices}, or give a mapping of module names to these, or QuantizedWeights")
    return value
