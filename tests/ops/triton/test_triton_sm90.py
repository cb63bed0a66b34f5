"""Every Triton kernel compiles for sm_90, where no GPU is needed, and spills next to nothing where it matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from speccompile.ops.triton import ngram, tree
from speccompile.ops.triton.accept_commit import accept_commit_launch
from speccompile.ops.triton.attention import attention_launches
from speccompile.ops.triton.attention_call import AttentionCall
from speccompile.ops.triton.attention_plan import plan_attention, workspace_size
from speccompile.ops.triton.causal_conv import causal_conv_launches
from speccompile.ops.triton.choose import choose_launches, splits_of
from speccompile.ops.triton.compile_only import Compiled, compile_launch
from speccompile.ops.triton.expert_linear import expert_linear_launches
from speccompile.ops.triton.gated_delta_rule import delta_rule_launches
from speccompile.ops.triton.launch import Launch
from speccompile.ops.triton.rounded_linear import embedding_launch, multiply_launch, round_launch
from speccompile.ops.triton.selective_scan import scan_launches
from speccompile.ops.triton.step_inputs import step_inputs_launch
from speccompile.ops.triton.store_drafts import store_drafts_launch
from speccompile.ops.triton.threshold import threshold_launch
from speccompile.ops.triton.within_top import within_top_launch

# Of a Hopper's multiprocessor, one program can have 227 KiB.
SHARED = 227 * 1024
# ptxas 12 may spill so much to have a second program on the multiprocessor; the versions differ.
SPILLED = 16

Note = Callable[[str, object], None]


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fits(launch: Launch, note: Note, shape: str) -> Compiled:
    """``note`` is pytest's record_property: conftest.py prints what it receives after the tests' results."""
    compiled = compile_launch(launch)
    note(
        "kernel",
        f"{compiled.name} {shape}: {compiled.registers} registers, {compiled.stack} bytes of stack a thread, "
        f"{compiled.shared} bytes of shared memory",
    )
    assert compiled.stack <= SPILLED, "registers are spilled"
    assert compiled.shared <= SHARED
    return compiled


def attention_of(
    width: int,
    dtype: torch.dtype,
    dim: int,
    value_dim: int | None = None,
    *,
    everything: bool = False,
    rows: int = 4,
    fixed_order: bool = False,
    capacity: int = 4096,
) -> tuple[Launch, ...]:
    heads, groups = 32, 8
    value_dim = value_dim or dim
    plan = plan_attention(rows, width, heads, groups, dim, value_dim, capacity, dtype, fixed_order)
    options: dict[str, Any] = {}
    if everything:
        options = {
            "window": 1024,
            "chunk": 2048,
            "softcap": 50.0,
            "sinks": meta(heads, dtype=dtype),
            # No tree is as wide as a prompt's chunk.
            "parents": meta(rows, width) if width <= 64 else None,
        }
    call = AttentionCall(
        meta(rows, width, heads, dim, dtype=dtype),
        meta(9, capacity, groups, dim, dtype=dtype),
        meta(9, capacity, groups, value_dim, dtype=dtype),
        meta(rows),
        meta(rows, width),
        dim**-0.5,
        **options,
    )
    return attention_launches(
        call,
        out=meta(rows, width, heads, value_dim, dtype=dtype),
        workspace=meta(workspace_size(plan, rows, width, heads, value_dim), dtype=torch.float32),
        plan=plan,
    )


@pytest.mark.parametrize(
    ("dtype", "width", "dims"),
    [
        (torch.bfloat16, 1, (80,)),
        *[(torch.bfloat16, 8, dims) for dims in ((64,), (128,), (256,), (192, 128))],
        (torch.bfloat16, 512, (128,)),
        (torch.float16, 8, (128,)),
        *[(torch.float32, 8, (dim,)) for dim in (64, 128)],
    ],
    ids=str,
)
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "all"])
def test_attention(
    dtype: torch.dtype, width: int, dims: tuple[int, ...], everything: bool, record_property: Note
) -> None:
    shape = f"{str(dtype)[6:]} T={width} D={'/'.join(map(str, dims))}" + " with all options" * everything
    partial, *combine = (
        fits(launch, record_property, shape) for launch in attention_of(width, dtype, *dims, everything=everything)
    )
    # Half precision goes to the tensor cores; float32 must not, where it would be cut to 10 bits.
    assert ("mma" in partial.ptx) == (dtype.itemsize == 2)
    # Tiles of a chunk are programs enough without splits.
    assert len(combine) == (width < 512) and not any("mma" in item.ptx for item in combine)


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [*[(torch.bfloat16, dims) for dims in ((64,), (128,), (256,), (192, 128))], (torch.float32, (128,))],
    ids=str,
)
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "all"])
def test_attention_of_one_split(
    dtype: torch.dtype, dims: tuple[int, ...], everything: bool, record_property: Note
) -> None:
    shape = f"{str(dtype)[6:]} D={'/'.join(map(str, dims))}" + " with all options" * everything
    (launch,) = attention_of(8, dtype, *dims, everything=everything, capacity=32)
    fits(launch, record_property, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_in_fixed_order_one_machine_code_serves_every_shape(dtype: torch.dtype) -> None:
    """The order of reduction and where it rounds are then the same too."""
    shapes = [(1, 1), (4, 1), (1, 8), (3, 5), (2, 16)]
    codes = [
        [compile_launch(launch).ptx for launch in attention_of(width, dtype, 64, rows=rows, fixed_order=True)]
        for rows, width in shapes
    ]
    assert all(code == codes[0] for code in codes)


@pytest.mark.parametrize("vocab", [49152, 50257, 151936])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "sampled"])
def test_choose(vocab: int, drawn: bool, record_property: Note) -> None:
    rows, width = 4, 8
    splits = splits_of(vocab)
    noise: dict[str, Any] = dict.fromkeys(("temperature", "seed", "positions", "start"))
    if drawn:
        noise = {
            "temperature": meta(rows, dtype=torch.float32),
            "seed": meta(rows),
            "positions": meta(rows, width),
            "start": meta(rows),
        }
    scores = meta(rows, width, vocab, dtype=torch.float32 if drawn else torch.bfloat16)
    best = meta(rows, width, splits, dtype=torch.float32), meta(rows, width, splits, dtype=torch.int32)
    for launch in choose_launches(scores, **noise, stream=0, tokens=meta(rows, width), best=best, forbids=drawn):
        compiled = fits(launch, record_property, f"V={vocab}" + " with noise" * drawn)
        # The approximate logarithm is wrong near 1, where large Gumbels come from.
        assert "lg2.approx" not in compiled.ptx


@pytest.mark.parametrize("wanted", [torch.int64, torch.float32], ids=["top_k", "top_p"])
def test_cut(wanted: torch.dtype, record_property: Note) -> None:
    compiled = fits(
        threshold_launch(meta(4, 8, 128256, dtype=torch.float32), meta(4, dtype=wanted)), record_property, str(wanted)
    )
    # A mass is rounded the same way in all readings.
    assert "atom" not in compiled.ptx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_within_top(dtype: torch.dtype, record_property: Note) -> None:
    given = meta(4, 8, 128256, dtype=dtype), meta(4, 7), meta(4, dtype=torch.float32), 10
    fits(within_top_launch(*given, meta(4, 7, dtype=torch.bool)), record_property, str(dtype))


def test_ngram_match(record_property: Note) -> None:
    rows, slots, capacity, drafted = 4, 9, 4096, 7
    text = meta(slots, capacity), meta(slots), meta(rows)
    outputs = meta(rows, drafted), meta(rows), meta(rows, -(-capacity // ngram.SPAN))
    for launch in ngram.match_launches(*text, *outputs, max_ngram=3, min_ngram=1):
        fits(launch, record_property, f"S={capacity}")


@pytest.mark.parametrize("source", ["none", "state", "given"])
def test_inputs_of_a_step(source: str, record_property: Note) -> None:
    rows, slots, capacity, drafted = 4, 9, 4096, 7 * (source != "none")
    drafts = {"none": (None, None), "state": (meta(slots, 7), meta(slots)), "given": (meta(rows, 7), meta(rows))}[
        source
    ]
    limit = meta(slots) if source == "state" else None
    results = meta(rows, drafted), meta(rows), meta(rows, drafted + 1), meta(rows, drafted + 1)
    given = (meta(slots, capacity), meta(slots), meta(rows), *drafts, limit, meta(slots))
    fits(step_inputs_launch(*given, drafted + 1, 128256, results), record_property, f"K={drafted}, drafts {source}")


def test_stored_drafts(record_property: Note) -> None:
    rows, slots = 4, 9
    state = meta(slots, 7), meta(slots), meta(slots), meta(slots)
    fits(store_drafts_launch(*state, meta(rows), meta(rows, 7), meta(rows)), record_property, "K=7")


@pytest.mark.parametrize("static", [False, True])
def test_trees(static: bool, record_property: Note) -> None:
    rows, proposed, nodes, depth = 4, 16, 6, 3
    of = ([0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 0, 0]) if static else ([], [])
    outputs = meta(rows, nodes), meta(rows, nodes + 1), meta(rows, nodes + 1), meta(rows)
    inputs = meta(rows, proposed), meta(rows, proposed), meta(rows), meta(rows)
    launches = [
        tree.fit_tree_launch(*inputs, (nodes, depth, 2), *of, outputs),
        tree.walk_tree_launch(meta(rows, nodes + 1), *outputs[:2], depth, meta(rows, depth + 1), meta(rows)),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        kv = meta(9, 4096, 8, 128, dtype=dtype)
        launches.append(tree.move_path_launch(kv, meta(rows), meta(rows), meta(rows, depth + 1), meta(rows)))
    for launch in launches:
        fits(launch, record_property, "static" if static else "dynamic")


@pytest.mark.parametrize("drafted", [0, 1, 7])
@pytest.mark.parametrize("counted", [False, True])
def test_accept_and_commit(drafted: int, counted: bool, record_property: Note) -> None:
    rows, slots, capacity, ends = 4, 9, 4096, 4
    state = {name: meta(slots) for name in ("length", "limit", "emitted", "accepted", "proposed")}
    tensors = {
        **state,
        "tokens": meta(slots, capacity),
        "alive": meta(slots, dtype=torch.bool),
        "eos": meta(slots, ends),
        "slots": meta(rows),
        "target_tokens": meta(rows, drafted + 1),
        "row_draft_lens": meta(rows),
        "row_accepted": meta(rows) if counted else None,
        "drafts": None if counted else meta(rows, drafted),
        "ready": meta(rows, dtype=torch.bool),
    }
    fits(accept_commit_launch(tensors), record_property, f"K={drafted}" + " counted" * counted)


F32 = torch.float32


def recurrence_launches(op: str, sizes: tuple[int, ...], width: int) -> tuple[Launch, ...]:
    rows, slots = 4, 9
    cursor = meta(rows), meta(rows, width), meta(rows), meta(rows)
    if op == "causal_conv":
        channels, window = sizes
        x, kept = meta(rows, width, channels, dtype=F32), meta(slots, 8 + window - 1, channels, dtype=F32)
        weight, bias = meta(channels, window, dtype=F32), meta(channels, dtype=F32)
        return causal_conv_launches(x, weight, bias, kept, *cursor[:2], cursor[3], x)
    heads, groups, *shape = sizes
    if op == "delta_rule":
        dim, gates = shape
        q, out = meta(rows, width, groups, dim, dtype=F32), meta(rows, width, heads, dim, dtype=F32)
        features = groups * dim + heads * (dim + gates + 1)
        inputs, state = meta(rows, width, features, dtype=F32), meta(slots, heads, dim, dim, dtype=F32)
        return delta_rule_launches(q, inputs, gates, state, meta(slots, 8, features, dtype=F32), *cursor, out)
    depth, states, decays = shape
    features = heads * (depth + 1) + groups * states
    inputs, state = meta(rows, width, features, dtype=F32), meta(slots, heads, depth, states, dtype=F32)
    given = meta(heads, decays, dtype=F32), meta(rows, width, groups, states, dtype=F32)
    out = meta(rows, width, heads, depth, dtype=F32)
    return scan_launches(inputs, *given, state, meta(slots, 8, features, dtype=F32), *cursor, out)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("causal_conv", (8192, 4)),
        # Qwen3-Next and Kimi Linear: heads, groups, size of keys, numbers of a gate.
        ("delta_rule", (32, 16, 128, 1)),
        ("delta_rule", (32, 32, 128, 128)),
        # Granite 4 and Falcon Mamba: heads, groups, channels of a head, states, decays.
        ("scan", (48, 1, 64, 128, 1)),
        ("scan", (8192, 1, 1, 16, 16)),
    ],
    ids=str,
)
def test_recurrences(op: str, sizes: tuple[int, ...], record_property: Note) -> None:
    for launch in recurrence_launches(op, sizes, 8):
        fits(launch, record_property, str(sizes))


@pytest.mark.parametrize("op", ["delta_rule", "scan"])
def test_one_machine_code_of_a_recurrence_serves_every_width(op: str) -> None:
    """A state's bits do not depend on the widths of its steps."""
    sizes = (16, 16, 128, 1) if op == "delta_rule" else (48, 1, 64, 128, 1)
    codes = [[compile_launch(launch).ptx for launch in recurrence_launches(op, sizes, width)] for width in (1, 5, 16)]
    assert all(code == codes[0] for code in codes)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("minimums", [False, True], ids=["offset", "minimums"])
def test_rounded_linears(form: str, minimums: bool, record_property: Note) -> None:
    """Of Llama-3.1-8B: gate, for a step of eight rows; and its embedding."""
    depth, features, rows = 4096, 14336, 8
    groups = depth // 64
    numbers, units = meta(rows, groups, 64, dtype=torch.int8), meta(rows, groups, dtype=torch.float32)
    four = form == "int4"
    packed = meta(features // 32, depth // 4, 16 if four else 32, 4, dtype=torch.uint8 if four else torch.int8)
    shape = (features // 32, groups * (2 if four else 1), *([2] * minimums), 32)
    scales = meta(*shape, dtype=torch.float16 if four and not minimums else torch.float32)
    x, out = (meta(rows, size, dtype=torch.bfloat16) for size in (depth, features))
    fits(round_launch(x, numbers, units), record_property, form)
    multiply = fits(multiply_launch(numbers, units, packed, scales, None, out), record_property, form)
    assert "mma" in multiply.ptx and ".s32.s8.s8.s32" in multiply.ptx
    fits(embedding_launch(packed, scales, meta(rows), meta(rows, depth, dtype=torch.float32)), record_property, form)


def linears_of_experts(tokens: int, dtype: torch.dtype, *, transposed: bool) -> tuple[Launch, Launch]:
    """Of Qwen3-30B-A3B: 128 experts, of which each token has 8."""
    experts, depth, features = 128, 2048, 1536
    return expert_linear_launches(
        meta(tokens, depth, dtype=dtype),
        meta(tokens, 8),
        meta(experts, *((depth, features) if transposed else (features, depth)), dtype=dtype),
        meta(experts, features, dtype=dtype) if transposed else None,
        transposed,
        meta(tokens, 8, features, dtype=dtype),
        meta(experts + 2, dtype=torch.int32),
        meta(tokens * 8, dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_linears_of_experts(dtype: torch.dtype, transposed: bool, record_property: Note) -> None:
    shape = f"{str(dtype)[6:]} {'columns' if transposed else 'rows'}"
    _, multiply = (
        fits(launch, record_property, shape) for launch in linears_of_experts(8, dtype, transposed=transposed)
    )
    assert ("mma" in multiply.ptx) == (dtype.itemsize == 2)


def test_one_machine_code_of_experts_serves_every_width() -> None:
    codes = [
        [compile_launch(launch).ptx for launch in linears_of_experts(tokens, torch.bfloat16, transposed=False)]
        for tokens in (1, 5, 16)
    ]
    assert all(code == codes[0] for code in codes)


def test_a_spill_is_seen() -> None:
    """32 registers are too few for it: the report is not 0 whatever is compiled."""
    partial, *_ = attention_of(8, torch.bfloat16, 128)
    squeezed = Launch(partial.kernel, partial.grid, partial.arguments, partial.warps, partial.stages, most_registers=32)
    assert compile_launch(squeezed).stack > SPILLED
