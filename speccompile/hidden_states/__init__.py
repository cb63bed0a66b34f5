"""Hidden states of the target, saved to train draft heads with: what to save, how it lies in files, reading it back."""

from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.hidden_states.reader import SavedHiddenStates
from speccompile.hidden_states.records import Record
from speccompile.hidden_states.specforge import export_specforge

__all__ = ["Record", "SaveHiddenStates", "SavedHiddenStates", "export_specforge"]
