"""Launches of each Triton kernel over tensors that have no memory, at given shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from speccompile.graph.state import B, E, K, N, S, V, core_state
from speccompile.ops.kv_rows import row_size
from speccompile.ops.on_cuda import cuda_kernel
from speccompile.ops.triton import ngram, tree
from speccompile.ops.triton.accept_commit import accept_commit_launch
from speccompile.ops.triton.attention import attention_launches
from speccompile.ops.triton.attention_call import AttentionCall
from speccompile.ops.triton.attention_plan import plan_attention, workspace_size
from speccompile.ops.triton.causal_conv import causal_conv_launches
from speccompile.ops.triton.choose import choose_launches, splits_of
from speccompile.ops.triton.draw import Filters, draw, filter_logits
from speccompile.ops.triton.expert_linear import expert_linear_launches
from speccompile.ops.triton.gated_delta_rule import delta_rule_launches
from speccompile.ops.triton.launch import Launch, launches_of
from speccompile.ops.triton.lora import lora
from speccompile.ops.triton.rounded_linear import embedding_launch, multiply_launch, round_launch
from speccompile.ops.triton.selective_scan import scan_launches
from speccompile.ops.triton.skinny_linear import skinny_linear_launch
from speccompile.ops.triton.step_inputs import step_inputs_launch
from speccompile.ops.triton.store_drafts import store_drafts_launch
from speccompile.ops.triton.within_top import within_top_launch
from speccompile.sampling.base import Processor
from speccompile.sampling.pipeline import PROCESSORS, sampling_state
from speccompile.sampling.process_scores import state_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
I32, I8, U8, BOOL = torch.int32, torch.int8, torch.uint8, torch.bool
SLOTS = 9
#: Pages of a slot, and positions of a page.
PAGES, PAGE = 32, 128


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Heads:
    """The attention of a model: query heads, KV heads, their dims, and ``options`` of the op. ``sinks`` is a flag."""

    name: str
    heads: int
    groups: int
    dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False


def attention(
    of: Heads,
    rows: int,
    width: int,
    dtype: torch.dtype = BF16,
    *,
    capacity: int = 4096,
    parents: bool = False,
    fixed_order: bool = False,
    paged: bool = False,
    cached: torch.dtype | None = None,
) -> Sequence[Launch]:
    """B rows of T queries over a cache of S places, or ``paged`` over a pool of pages; ``parents`` of a tree. Keys and
    values are ``cached`` in the dtype of queries unless given."""
    kept = cached or dtype
    capacity = PAGES * PAGE if paged else capacity
    cache = (SLOTS * PAGES, PAGE) if paged else (SLOTS, capacity)
    plan = plan_attention(
        rows, width, of.heads, of.groups, of.dim, of.value_dim, capacity, dtype, fixed_order, kept is I8
    )
    call = AttentionCall(
        meta(rows, width, of.heads, of.dim, dtype=dtype),
        meta(*cache, of.groups, row_size(of.dim, kept), dtype=kept),
        meta(*cache, of.groups, row_size(of.value_dim, kept), dtype=kept),
        meta(rows),
        meta(rows, width),
        of.dim**-0.5,
        window=of.window,
        chunk=of.chunk,
        softcap=of.softcap,
        sinks=meta(of.heads, dtype=dtype) if of.sinks else None,
        parents=meta(rows, width) if parents else None,
        pages=meta(SLOTS, PAGES, dtype=I32) if paged else None,
        alibi=of.alibi,
    )
    return attention_launches(
        call,
        out=meta(rows, width, of.heads, of.value_dim, dtype=dtype),
        workspace=meta(workspace_size(plan, rows, width, of.heads, of.value_dim), dtype=F32),
        plan=plan,
    )


def choose(vocab: int, rows: int = 4, width: int = 8, *, drawn: bool = False) -> Sequence[Launch]:
    """The argmax of scores, with noise if ``drawn``."""
    splits = splits_of(vocab)
    noise: dict[str, Any] = dict.fromkeys(("temperature", "seed", "positions", "start"))
    if drawn:
        noise = {
            "temperature": meta(rows, dtype=F32),
            "seed": meta(rows),
            "positions": meta(rows, width),
            "start": meta(rows),
        }
    scores = meta(rows, width, vocab, dtype=F32 if drawn else BF16)
    best = meta(rows, width, splits, dtype=F32), meta(rows, width, splits, dtype=I32)
    return choose_launches(scores, **noise, stream=0, tokens=meta(rows, width), best=best, forbids=drawn)


_SIZES = {N: SLOTS, S: 2056, K: 7, B: 4, E: 8, V: 128256}


def filtered(vocab: int, *, tree: bool = False) -> Sequence[Launch]:
    """Tokens drawn after temperature, top-k, top-p and min-p, and the logits that these leave."""
    logits, real = meta(4, 8, vocab, dtype=BF16), meta(SLOTS, dtype=F32)
    filters = Filters(meta(4), real, meta(SLOTS), real, real)
    depths = meta(4, 8) if tree else None
    return [
        *launches_of(lambda: draw(logits, filters, meta(SLOTS), depths, meta(SLOTS))),
        *launches_of(lambda: filter_logits(logits, filters)),
    ]


def processors() -> Sequence[Processor]:
    """Those of the sampling pipeline that have a kernel."""
    return [processor for processor in PROCESSORS if cuda_kernel(processor.op)]


def processed(processor: Processor) -> Sequence[Launch]:
    """A processor of the sampling pipeline."""
    specs = {spec.name: spec for spec in [*core_state(_SIZES[V]), *sampling_state()]}
    tensors = [meta(*specs[name].resolve(_SIZES).shape, dtype=specs[name].dtype) for name in state_of(processor)]
    own = [tensor[:4] for tensor in tensors]
    scores, kernel = meta(4, 8, _SIZES[V], dtype=F32), cuda_kernel(processor.op)
    assert kernel is not None
    return launches_of(lambda: kernel(scores, meta(4, _SIZES[S]), meta(4), 0, own))


def within_top(dtype: torch.dtype) -> Launch:
    """For the rule ``relaxed``."""
    given = meta(4, 8, 128256, dtype=dtype), meta(4, 7), meta(4, dtype=F32), 10
    return within_top_launch(*given, meta(4, 7, dtype=BOOL))


def match_ngram(capacity: int = 4096) -> Sequence[Launch]:
    """A search over S tokens."""
    outputs = meta(4, 7), meta(4), meta(4, -(-capacity // ngram.SPAN))
    return ngram.match_launches(meta(SLOTS, capacity), meta(SLOTS), meta(4), *outputs, max_ngram=3, min_ngram=1)


def fit_and_walk(nodes: int, depth: int, proposed: int, *, static: bool = False) -> Sequence[Launch]:
    """A tree of drafts fitted to a tier, and the accepted path through it. A ``static`` one has 6 nodes."""
    rows = 4
    of = ([0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 0, 0]) if static else ([], [])
    outputs = meta(rows, nodes), meta(rows, nodes + 1), meta(rows, nodes + 1), meta(rows)
    inputs = meta(rows, proposed), meta(rows, proposed), meta(rows), meta(rows)
    return (
        tree.fit_tree_launch(*inputs, (nodes, depth, 2), *of, outputs),
        tree.walk_tree_launch(meta(rows, nodes + 1), *outputs[:2], depth, meta(rows, depth + 1), meta(rows)),
    )


def move_path(dtype: torch.dtype, depth: int, *, paged: bool = False) -> Launch:
    """KV of an accepted path, of slots or ``paged``."""
    kv = meta(*((SLOTS * PAGES, PAGE) if paged else (SLOTS, PAGES * PAGE)), 8, 128, dtype=dtype)
    pages = meta(SLOTS, PAGES, dtype=I32) if paged else None
    return tree.move_path_launch(kv, meta(4), meta(4), meta(4, depth + 1), meta(4), pages)


def step_inputs(drafted: int, rows: int = 4, *, stored: bool = True) -> Launch:
    """Inputs of a step's target at K: ``stored`` drafts of the state, or those of a drafter in the step."""
    drafts = (None, None)
    if drafted:
        of = SLOTS if stored else rows
        drafts = meta(of, drafted), meta(of)
    limit = meta(SLOTS) if drafted and stored else None
    results = meta(rows, drafted), meta(rows), meta(rows, drafted + 1), meta(rows, drafted + 1)
    given = meta(SLOTS, 4096), meta(SLOTS), meta(rows), *drafts, limit, meta(SLOTS)
    return step_inputs_launch(*given, drafted + 1, 128256, results)


def store_drafts(drafted: int, rows: int = 4) -> Launch:
    """A proposal, stored."""
    state = meta(SLOTS, drafted), meta(SLOTS), meta(SLOTS), meta(SLOTS)
    return store_drafts_launch(*state, meta(rows), meta(rows, drafted), meta(rows))


def adapters(depth: int, features: Sequence[int], rank: int, dtype: torch.dtype = BF16) -> Sequence[Launch]:
    """LoRA adapters of linears that read one input."""
    outputs = [meta(1, 8, count, dtype=dtype) for count in features]
    a = [meta(4, depth, rank, dtype=dtype) for _ in features]
    b = [meta(4, -(-count // 32), rank, 32, dtype=dtype) for count in features]
    x, scales = meta(1, 8, depth, dtype=dtype), meta(4, 7, dtype=F32)
    return launches_of(lambda: lora(x, outputs, a, b, meta(4, 7), scales, 0, meta(1)))


def accept_commit(drafted: int, rows: int = 4, *, counted: bool = False, listed: bool = True) -> Launch:
    """Acceptance at K; ``counted``: a rule has accepted already. ``listed``: the mode has ready drafts."""
    state = {name: meta(SLOTS) for name in ("length", "limit", "emitted", "accepted", "proposed")}
    tensors = {
        **state,
        "tokens": meta(SLOTS, 4096),
        "alive": meta(SLOTS, dtype=BOOL),
        "eos": meta(SLOTS, 4),
        "slots": meta(rows),
        "target_tokens": meta(rows, drafted + 1),
        "row_draft_lens": meta(rows),
        "row_accepted": meta(rows) if counted else None,
        "drafts": None if counted else meta(rows, drafted),
        "ready": meta(rows, dtype=BOOL) if listed else None,
    }
    return accept_commit_launch(tensors)


def _cursor(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    return meta(rows), meta(rows, width), meta(rows), meta(rows)


def causal_conv(channels: int, window: int, width: int = 8, rows: int = 4, *, bias: bool = True) -> Sequence[Launch]:
    """The convolution of a recurrent layer."""
    slots, positions, _, length = _cursor(rows, width)
    x, kept = meta(rows, width, channels, dtype=F32), meta(SLOTS, 8 + window - 1, channels, dtype=F32)
    weight = meta(channels, window, dtype=F32)
    return causal_conv_launches(
        x, weight, meta(channels, dtype=F32) if bias else None, kept, slots, positions, length, x
    )


def delta_rule(heads: int, groups: int, dim: int, gates: int, width: int = 8, rows: int = 4) -> Sequence[Launch]:
    """The gated delta rule; ``gates`` are the numbers of a gate."""
    q, out = meta(rows, width, groups, dim, dtype=F32), meta(rows, width, heads, dim, dtype=F32)
    features = groups * dim + heads * (dim + gates + 1)
    inputs, state = meta(rows, width, features, dtype=F32), meta(SLOTS, heads, dim, dim, dtype=F32)
    return delta_rule_launches(q, inputs, gates, state, meta(SLOTS, 8, features, dtype=F32), *_cursor(rows, width), out)


def scan(
    heads: int, groups: int, depth: int, states: int, decays: int, width: int = 8, rows: int = 4
) -> Sequence[Launch]:
    """The selective scan; ``depth`` are the channels of a head."""
    features = heads * (depth + 1) + groups * states
    inputs, state = meta(rows, width, features, dtype=F32), meta(SLOTS, heads, depth, states, dtype=F32)
    given = meta(heads, decays, dtype=F32), meta(rows, width, groups, states, dtype=F32)
    out = meta(rows, width, heads, depth, dtype=F32)
    return scan_launches(inputs, *given, state, meta(SLOTS, 8, features, dtype=F32), *_cursor(rows, width), out)


def rounded(
    form: str,
    rows: int,
    *,
    depth: int = 4096,
    features: int = 14336,
    minimums: bool = False,
    bias: bool = False,
    linears: int = 1,
    dtype: torch.dtype = BF16,
) -> tuple[Launch, Launch, Launch]:
    """Inputs rounded, times int8, int4 or fp4 weights; and rows of an embedding with such a weight."""
    groups, four, coded = depth // 64, form != "int8", form == "fp4"
    numbers, units = meta(rows, groups, 64, dtype=I8), meta(rows, groups, dtype=F32)
    packed = meta(features // 32, depth // 4, 16 if four else 32, 4, dtype=U8 if four else I8)
    shape = (features // 32, groups * (2 if four else 1), *([2] * minimums), 32)
    scales = meta(*shape, dtype=F16 if four and not minimums else F32)
    x, out = (meta(rows, size, dtype=dtype) for size in (depth, features))
    return (
        round_launch(x, numbers, units),
        multiply_launch(
            numbers,
            units,
            [packed] * linears,
            [scales] * linears,
            [meta(features, dtype=dtype) if bias else None] * linears,
            [out] * linears,
            coded,
        ),
        embedding_launch(packed, scales, meta(rows), meta(rows, depth, dtype=F32), coded),
    )


def skinny(depth: int, features: int, dtype: torch.dtype = BF16, rows: int = 8, *, bias: bool = False) -> Launch:
    """A linear over few rows."""
    x, weight, out = (
        meta(rows, depth, dtype=dtype),
        meta(features, depth, dtype=dtype),
        meta(rows, features, dtype=dtype),
    )
    return skinny_linear_launch(x, weight, meta(features, dtype=dtype) if bias else None, out)


def experts(
    tokens: int,
    dtype: torch.dtype = BF16,
    *,
    transposed: bool = False,
    of: tuple[int, int, int, int] = (128, 8, 2048, 1536),
) -> Sequence[Launch]:
    """Linears of experts; ``of``: experts, those of a token, inputs and outputs. By default of Qwen3-30B-A3B."""
    count, chosen, depth, features = of
    return expert_linear_launches(
        meta(tokens, depth, dtype=dtype),
        meta(tokens, chosen),
        meta(count, *((depth, features) if transposed else (features, depth)), dtype=dtype),
        meta(count, features, dtype=dtype) if transposed else None,
        transposed,
        meta(tokens, chosen, features, dtype=dtype),
        meta(count + 2, dtype=I32),
        meta(tokens * chosen, dtype=I32),
    )
