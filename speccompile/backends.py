"""Backends lower a step graph to a callable. Your own backend derives from one of these classes."""

from speccompile.lowering.backends import Backend, Eager, Inductor, register_backend

__all__ = ["Backend", "Eager", "Inductor", "register_backend"]
