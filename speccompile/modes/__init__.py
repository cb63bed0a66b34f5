"""Ways to draft, one file each, found by name."""

from speccompile.modes.base import Mode
from speccompile.modes.ready_mode import ReadyMode
from speccompile.modes.registry import available, create, register

__all__ = ["Mode", "ReadyMode", "available", "create", "register"]
