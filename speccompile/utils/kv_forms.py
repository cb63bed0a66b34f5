"""The option ``kv`` of ``wrap``: the form of cached keys and values. The command line uses it, so it imports no
torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from speccompile.errors import InvalidOption

#: ``same`` is the model's own dtype. The others are dtypes of torch, by name.
KVForm = Literal["same", "bfloat16", "float16", "int8"]
KV_FORMS: tuple[KVForm, ...] = get_args(KVForm)


def read_kv(where: str, name: str, value: Any) -> KVForm:
    """Check the option.

    Raises:
        InvalidOption: ``value`` is not one of the forms.
    """
    if value not in KV_FORMS:
        raise InvalidOption(where=where, name=name, value=value, reason=f"choose from {', '.join(KV_FORMS)}")
    form: KVForm = value
    return form
