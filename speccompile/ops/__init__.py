"""The semantic ops, one file each; importing this package registers them as ``torch.ops.speccompile.*``."""

from speccompile.ops import attention as attention
from speccompile.ops import causal_conv as causal_conv
from speccompile.ops import choose as choose
from speccompile.ops import collective as collective
from speccompile.ops import commit as commit
from speccompile.ops import expert_linear as expert_linear
from speccompile.ops import gated_delta_rule as gated_delta_rule
from speccompile.ops import greatest as greatest
from speccompile.ops import likeliest as likeliest
from speccompile.ops import lora as lora
from speccompile.ops import native as native
from speccompile.ops import ngram as ngram
from speccompile.ops import prediction as prediction
from speccompile.ops import selective_scan as selective_scan
from speccompile.ops import skinny_linear as skinny_linear
from speccompile.ops import step_inputs as step_inputs
from speccompile.ops import store_drafts as store_drafts
from speccompile.ops import tree as tree
from speccompile.ops import within_top as within_top

__all__ = [
    "attention",
    "causal_conv",
    "choose",
    "collective",
    "commit",
    "expert_linear",
    "gated_delta_rule",
    "greatest",
    "likeliest",
    "lora",
    "native",
    "ngram",
    "prediction",
    "selective_scan",
    "skinny_linear",
    "step_inputs",
    "store_drafts",
    "tree",
    "within_top",
]
