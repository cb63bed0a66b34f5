"""The checked parameters of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from speccompile.adapters.loaded import Adapter
from speccompile.graph.keys import Kind
from speccompile.hidden_states.records import RecordSpec
from speccompile.multimodal.inputs import Features
from speccompile.runtime.score_records import ExtraOutputs
from speccompile.sampling.request import Sampling


@dataclass(frozen=True)
class Params:
    """The checked parameters of a request.

    Args:
        max_new_tokens: most new tokens; a request also ends at ``max_len``.
        eos: ids that end the request.
        sampling: the choice of its tokens; None means greedy without processors.
        priority: of two waiting requests, the one with the larger number goes first.
        patient: no caller watches its tokens, so other such prompts may be processed before its next step.
        reuse: it may reuse the KV of another sequence with the same prefix.
        tokenizer: decodes its tokens for ``Result.text`` and streams of text.
        outputs: its outputs beside its tokens.
        num_draft_tokens: most drafts of a step; None means as many as the tier has.
        record: the record of its hidden states; None if they are not saved.
        adapter: the LoRA adapter; None means the model without one.
        prediction: tokens that its new sequence is expected to have; empty without a prediction.
        drawn: executables of the kind ``drawn`` choose its tokens.
        features: the embeddings of its images; None without images.
        client: the names of its client, the widest first; requests without a client share one.
    """

    max_new_tokens: int
    eos: tuple[int, ...]
    sampling: Sampling | None = None
    priority: int = 0
    patient: bool = False
    reuse: bool = True
    tokenizer: PreTrainedTokenizerBase | None = None
    outputs: ExtraOutputs = field(default_factory=ExtraOutputs)
    num_draft_tokens: int | None = None
    record: RecordSpec | None = None
    prediction: tuple[int, ...] = ()
    adapter: Adapter | None = None
    drawn: bool = False
    features: Features | None = None
    client: tuple[str, ...] = ("",)

    @property
    def kind(self) -> Kind:
        """The kind of executables that choose its tokens."""
        if self.outputs:
            return "scored"
        if self.sampling is None:
            return "greedy"
        return "drawn" if self.drawn else "sampled"
