"""An acceptance rule of your own: a draft stays if it is among the target's k most likely tokens. Lossy.

Run it: python examples/custom_rule.py
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import speccompile
from speccompile import pretrained
from speccompile.acceptance import Rule
from speccompile.acceptance.lossy import keep_passes


@dataclass(frozen=True)
class AmongTop(Rule):
    k: int = 2

    name: ClassVar[str] = "among_top"
    lossless: ClassVar[bool] = False
    text_invariant: ClassVar[bool] = False

    def passes(self, form):
        return keep_passes(partial(among_top, k=self.k), form)

    def explain(self):
        return f"a draft token stays if it is among the {self.k} most likely ones"


def among_top(scores, drafts, text, length, *, k):
    """Which drafts stay, ``[B, K]``, of ``scores [B, K+1, V]`` and ``drafts [B, K]``. Traced into the step."""
    likely = scores[:, : drafts.shape[1]].topk(k, dim=-1).indices
    return (likely == drafts[..., None]).any(-1)


if __name__ == "__main__":
    model, tokenizer = pretrained.load("smollm2")
    ids = tokenizer("The sun rises in the east. The sun sets in the", return_tensors="pt").input_ids
    for rule in ("exact", AmongTop(k=8)):
        with speccompile.wrap(model, "ngram", acceptance=rule, policy="fixed:3", tiers=(0, 3), max_len=256) as spec:
            text = spec.generate(ids, max_new_tokens=40)[0, ids.shape[1] :]
            print(f"{spec.stats.acceptance_length:.2f} tokens a step: {tokenizer.decode(text)!r}")
