"""Hidden states of the target, saved to train draft heads: options, file layout, writing and reading."""

from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.hidden_states.reader import SavedHiddenStates
from speccompile.hidden_states.records import Record
from speccompile.hidden_states.specforge import export_specforge

__all__ = ["Record", "SaveHiddenStates", "SavedHiddenStates", "export_specforge"]
