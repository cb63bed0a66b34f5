"""The processed inputs of a request beside its tokens."""

from __future__ import annotations

from speccompile.multimodal.features import PromptFeatures
from speccompile.multimodal.source import SourceFeatures

#: Embeddings in the places of a prompt's placeholder tokens, or the output of an encoder.
Features = PromptFeatures | SourceFeatures
