"""The shapes that the package's Triton kernels are compiled for: those of real models, and the extremes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.without_gpu import kernel_launches as of
from benchmarks.without_gpu.kernel_launches import BF16, F16, F32, I8, Heads
from speccompile.ops.triton.launch import Launch


@dataclass(frozen=True)
class Case:
    """Launches of one op at one shape.

    Args:
        op: names the case together with ``shape``.
        in_suite: whether the tests compile it. Others are compiled by ``python -m benchmarks.without_gpu.kernels``
            alone.
    """

    op: str
    shape: str
    launches: Callable[[], Sequence[Launch]]
    in_suite: bool


SMOLLM2 = Heads("SmolLM2-135M", 9, 3, 64, 64)
FALCON = Heads("Falcon-7B", 71, 1, 64, 64)
PHI_2 = Heads("Phi-2", 32, 32, 80, 80)
PHI_3 = Heads("Phi-3-mini", 32, 32, 96, 96, window=2047)
LLAMA_8B = Heads("Llama-3.1-8B", 32, 8, 128, 128)
QWEN3_30B = Heads("Qwen3-30B-A3B", 32, 4, 128, 128)
GPT_OSS = Heads("gpt-oss-20b", 64, 8, 64, 64, window=128, sinks=True)
GEMMA_2 = Heads("Gemma 2 9B", 16, 8, 256, 256, window=4096, softcap=50.0)
BLOOM = Heads("BLOOM-7B", 32, 32, 128, 128, alibi=True)
DEEPSEEK = Heads("DeepSeek-V3", 128, 128, 192, 128)
MLA = Heads("MLA, absorbed", 128, 1, 576, 512)
MLA_LITE = Heads("MLA, absorbed, 16 heads", 16, 1, 576, 512)
ALL_HEADS = (
    SMOLLM2,
    FALCON,
    PHI_2,
    PHI_3,
    LLAMA_8B,
    QWEN3_30B,
    GPT_OSS,
    GEMMA_2,
    BLOOM,
    DEEPSEEK,
    MLA,
    MLA_LITE,
)
#: With every option of the op at once.
EVERYTHING = Heads("all options", 32, 8, 128, 128, window=1024, chunk=2048, softcap=50.0, sinks=True)

#: One width for each model, and for one model all of them. Other shapes differ in sizes that the compiler sees little
#: of, or not at all.
_SHAPES_IN_SUITE = {(LLAMA_8B, 1, 1), (LLAMA_8B, 64, 8), (LLAMA_8B, 1, 512)}


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _attention()
    yield from _sampling()
    yield from _drafts()
    yield from _recurrences()
    yield from _linears()


def _attention() -> Iterator[Case]:
    def case(
        heads: Heads,
        rows: int,
        width: int,
        dtype: torch.dtype = BF16,
        *,
        in_suite: bool,
        capacity: int = 4096,
        tree: bool = False,
        fixed: bool = False,
        paged: bool = False,
        cached: torch.dtype | None = None,
    ) -> Case:
        of_call = (
            f"{' tree' * tree}{' fixed order' * fixed}{' pages' * paged}{f' KV {_name(cached)}' if cached else ''}"
        )
        marks = f"{of_call}{f' S={capacity}' * (capacity != 4096)}"
        return Case(
            "attention",
            f"{heads.name} {_name(dtype)} B={rows} T={width}{marks}",
            lambda: of.attention(
                heads,
                rows,
                width,
                dtype,
                capacity=capacity,
                parents=tree,
                fixed_order=fixed,
                paged=paged,
                cached=cached,
            ),
            in_suite,
        )

    for heads in ALL_HEADS:
        for rows, width in ((1, 1), (1, 8), (1, 17), (64, 8), (1, 512)):
            in_suite = (rows, width) == (1, 8) or (heads, rows, width) in _SHAPES_IN_SUITE
            yield case(heads, rows, width, in_suite=in_suite)
    for heads in (LLAMA_8B, GPT_OSS, GEMMA_2, DEEPSEEK):
        of_suite = heads in (LLAMA_8B, GEMMA_2)
        yield case(heads, 1, 16, tree=True, in_suite=False)
        yield case(heads, 1, 64, tree=True, in_suite=of_suite)
        yield case(heads, 1, 8, capacity=131072, in_suite=False)
        yield case(heads, 1, 8, F32, in_suite=of_suite)
        yield case(heads, 1, 8, F16, in_suite=heads is LLAMA_8B)
        yield case(heads, 1, 8, fixed=True, in_suite=False)
        yield case(heads, 1, 16, F32, tree=True, in_suite=False)
    yield case(BLOOM, 1, 16, tree=True, in_suite=True)
    yield case(LLAMA_8B, 1, 1, capacity=128, in_suite=True)
    for heads, dtype in ((LLAMA_8B, BF16), (LLAMA_8B, F32), (GEMMA_2, BF16), (EVERYTHING, BF16)):
        # One split, and so no second launch.
        yield case(heads, 4, 8, dtype, capacity=32, in_suite=True)
    yield case(replace(SMOLLM2, name="SmolLM2-135M"), 3, 5, capacity=1000, in_suite=True)
    for rows, width in ((1, 1), (4, 8), (1, 512)):
        yield case(LLAMA_8B, rows, width, paged=True, in_suite=True)
    for heads in (LLAMA_8B, GEMMA_2, GPT_OSS):
        yield case(heads, 1, 16, tree=True, paged=True, in_suite=True)
        for width in (1, 8, 512):
            yield case(heads, 1, width, cached=I8, in_suite=True)
    yield case(LLAMA_8B, 1, 16, tree=True, paged=True, cached=I8, in_suite=True)
    for dtype in (BF16, F32):
        yield case(EVERYTHING, 4, 16, dtype, tree=True, in_suite=True)


def _sampling() -> Iterator[Case]:
    for vocab in (49152, 50257, 128256, 262144):
        for drawn in (False, True):
            for rows, width in ((1, 1), (64, 17)):
                yield Case(
                    "choose",
                    f"V={vocab} B={rows} T={width}{' with noise' * drawn}",
                    lambda vocab=vocab, rows=rows, width=width, drawn=drawn: of.choose(vocab, rows, width, drawn=drawn),
                    vocab in (50257, 128256),
                )
    for vocab in (49152, 151936):
        for tree in (False, True):
            yield Case(
                "draw_filtered",
                f"V={vocab}{' tree' * tree}",
                lambda vocab=vocab, tree=tree: of.filtered(vocab, tree=tree),
                True,
            )
    for processor in of.processors():
        yield Case(processor.name, "V=128256", lambda processor=processor: of.processed(processor), True)
    for dtype in (F32, BF16):
        yield Case("is_within_top", f"V=128256 {_name(dtype)}", lambda dtype=dtype: [of.within_top(dtype)], True)


def _drafts() -> Iterator[Case]:
    for capacity in (2048, 131072):
        yield Case("match_ngram", f"S={capacity}", lambda capacity=capacity: of.match_ngram(capacity), True)
    for nodes, depth, proposed, static in ((6, 3, 16, True), (6, 3, 16, False), (15, 4, 16, False), (63, 8, 64, False)):
        yield Case(
            "fit_tree, walk_tree",
            f"{nodes + 1} nodes{', static' * static}",
            lambda nodes=nodes, depth=depth, proposed=proposed, static=static: of.fit_and_walk(
                nodes, depth, proposed, static=static
            ),
            True,
        )
    for dtype in (F32, BF16):
        for paged in (False, True):
            yield Case(
                "move_path",
                f"depth 8 {_name(dtype)}{' pages' * paged}",
                lambda dtype=dtype, paged=paged: [of.move_path(dtype, 8, paged=paged)],
                True,
            )
    for drafted, rows in ((0, 1), (1, 4), (7, 1), (7, 4), (16, 4)):
        for counted in (False, True):
            yield Case(
                "accept_commit_",
                f"K={drafted} B={rows}{' counted' * counted}",
                lambda drafted=drafted, rows=rows, counted=counted: [
                    of.accept_commit(drafted, rows, counted=counted, listed=bool(drafted))
                ],
                True,
            )

    for drafted, stored in ((0, True), (7, True), (7, False)):
        yield Case(
            "step_inputs",
            f"K={drafted}{' drafted in the step' * (not stored)}",
            lambda drafted=drafted, stored=stored: [of.step_inputs(drafted, stored=stored)],
            True,
        )
    yield Case("store_drafts_", "K=7", lambda: [of.store_drafts(7)], True)


def _recurrences() -> Iterator[Case]:
    for width in (1, 8, 512):
        suite = width == 8
        yield Case("causal_conv", f"8192 channels T={width}", lambda width=width: of.causal_conv(8192, 4, width), suite)
        for name, sizes in (
            ("Qwen3-Next", (32, 16, 128, 1)),
            ("Kimi Linear", (32, 32, 128, 128)),
            ("heads of 256", (64, 64, 256, 1)),
        ):
            yield Case(
                "delta_rule",
                f"{name} T={width}",
                lambda sizes=sizes, width=width: of.delta_rule(*sizes, width),
                suite,
            )
        for name, shape in (
            ("Granite 4", (48, 1, 64, 128, 1)),
            ("Falcon Mamba", (8192, 1, 1, 16, 16)),
            ("Bamba-9B", (128, 8, 64, 128, 1)),
        ):
            yield Case("scan", f"{name} T={width}", lambda shape=shape, width=width: of.scan(*shape, width), suite)
    yield Case("causal_conv", "96 channels, no bias, T=1", lambda: of.causal_conv(96, 4, 1, 1, bias=False), True)


def _linears() -> Iterator[Case]:
    for features in (4096, 6144):
        for dtype in (BF16, F16):
            yield Case(
                "skinny_linear",
                f"4096 to {features}, {_name(dtype)}",
                lambda features=features, dtype=dtype: [of.skinny(4096, features, dtype)],
                dtype is BF16,
            )
    yield Case("skinny_linear", "576 to 577, bias", lambda: [of.skinny(576, 577, bias=True)], True)
    for form in ("int8", "int4"):
        for rows in (1, 8, 64):
            yield Case(
                f"{form}_linear",
                f"4096 to 14336, {rows} rows",
                lambda form=form, rows=rows: of.rounded(form, rows),
                rows != 64,
            )
        yield Case(
            f"{form}_linear",
            "4096 to 4096, 1 row, minimums, bias",
            lambda form=form: of.rounded(form, 1, features=4096, minimums=True, bias=True),
            True,
        )
        yield Case(
            f"{form}_linears",
            "three of 4096 to 4096, 1 row",
            lambda form=form: of.rounded(form, 1, features=4096, linears=3),
            True,
        )
    yield Case("fp4_linear", "2880 to 5760, 1 row", lambda: of.rounded("fp4", 1, depth=2880, features=5760), True)
    for rank, dtype in ((16, BF16), (256, BF16), (16, F32)):
        yield Case(
            "lora",
            f"4096 to 4096, 1024, 1024, rank {rank} {_name(dtype)}",
            lambda rank=rank, dtype=dtype: of.adapters(4096, (4096, 1024, 1024), rank, dtype),
            True,
        )
    for tokens in (1, 8, 512):
        for transposed in (False, True):
            form = "columns" if transposed else "rows"
            yield Case(
                "expert_linear",
                f"Qwen3-30B-A3B {tokens} tokens, {form}",
                lambda tokens=tokens, transposed=transposed: of.experts(tokens, transposed=transposed),
                tokens == 8,
            )
            yield Case(
                "expert_linear",
                f"Mixtral-8x7B {tokens} tokens, {form}",
                lambda tokens=tokens, transposed=transposed: of.experts(
                    tokens, transposed=transposed, of=(8, 2, 4096, 14336)
                ),
                False,
            )
    for dtype in (F16, F32):
        yield Case("expert_linear", f"8 tokens {_name(dtype)}", lambda dtype=dtype: of.experts(8, dtype), True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
