"""The object that ``wrap`` returns."""

from speccompile.speculator.speculator import Speculator

__all__ = ["Speculator"]
