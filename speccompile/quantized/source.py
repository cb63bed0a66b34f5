"""The checkpoint and tensor that are being read, as named in errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from speccompile.errors import DamagedCheckpoint, UnsupportedCheckpoint

DEQUANTISE = (
    "Load it with transformers, dequantised, and wrap that model; weights='int8' or 'int4' of wrap round it then"
)


@dataclass(frozen=True)
class TensorSource:
    """A file or a folder that is being read, and one of its tensors.

    Args:
        path: path of the file or folder.
        tensor: the tensor's name; empty for the checkpoint as a whole.
        advice: what to do where the checkpoint cannot be read.
    """

    path: str
    tensor: str = ""
    advice: str = DEQUANTISE

    def of(self, tensor: str) -> TensorSource:
        return replace(self, tensor=tensor)

    def unsupported(self, reason: str, advice: str | None = None) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(source=self.path, reason=self._placed(reason), advice=advice or self.advice)

    def damaged(self, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(source=self.path, reason=self._placed(reason))

    def _placed(self, reason: str) -> str:
        return f"{self.tensor}: {reason}" if self.tensor else reason
