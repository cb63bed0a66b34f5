"""What linears are multiplied with, gathered over texts: it decides how their weights are rounded best."""

from __future__ import annotations

#: Tokens that are read by default.
TOKENS = 16384
