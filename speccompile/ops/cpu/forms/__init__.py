"""Forms of packed weights, one file each.

A form is a class of :class:`~speccompile.ops.cpu.forms.base.Form` in :data:`FORMS`, and its ops
(:mod:`speccompile.ops.native`). Passes, checks and reports know nothing else of it.
"""

from __future__ import annotations

from speccompile.ops.cpu.forms.base import Form
from speccompile.ops.cpu.forms.fp4 import Fp4
from speccompile.ops.cpu.forms.int4 import Int4
from speccompile.ops.cpu.forms.int8 import Int8
from speccompile.ops.cpu.forms.same import Same

#: By name.
FORMS: dict[str, Form] = {form.name: form for form in (Same(), Int8(), Int4(), Fp4())}
