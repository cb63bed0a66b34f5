"""What only a GPU can show: the kernels themselves, and texts made by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speccompile
from speccompile import Tree
from speccompile.ops import attention as attention_op
from speccompile.ops import commit as commit_op
from speccompile.ops import expert_linear as expert_op
from speccompile.ops import ngram as ngram_op
from speccompile.ops import step_inputs as inputs_op
from speccompile.ops import store_drafts as store_op
from speccompile.ops import tree as tree_op
from speccompile.ops import within_top as within_op
from support.drafters import random_drafter
from support.experts import case
from support.families import model_of
from support.input_cases import input_cases, stored_cases
from support.recurrences import PROBLEMS, Slots
from support.tiny import greedy, random_prompt, tiny_llama

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_gpu(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 8, 128])
@pytest.mark.parametrize("options", [{}, {"window": 100, "softcap": 20.0}], ids=["plain", "window"])
def test_attention(dtype: torch.dtype, width: int, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, heads, groups, dim, capacity = 3, 8, 2, 64, 700
    q = torch.randn(rows, width, heads, dim, generator=generator).to(dtype)
    caches = [torch.randn(5, capacity, groups, dim, generator=generator).to(dtype) for _ in range(2)]
    slots = torch.tensor([4, 0, 2])
    positions = torch.tensor([[3], [400], [capacity - width]]) + torch.arange(width)
    wanted = attention_op.reference(q, *caches, slots, positions, dim**-0.5, **options)
    inputs = on_gpu(q, *caches, slots, positions)
    for op in (ops.attention, ops.attention_fixed_order):
        got = op(*inputs, dim**-0.5, **options).cpu()
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_inputs_of_a_step() -> None:
    for given in input_cases():
        wanted = inputs_op.reference(*given)  # type: ignore[arg-type]
        got = ops.step_inputs(*[item.cuda() if isinstance(item, torch.Tensor) else item for item in given])
        assert all(torch.equal(one.cpu(), other) for one, other in zip(got, wanted, strict=True))


def test_stored_drafts() -> None:
    for given in stored_cases():
        tensors = on_gpu(*given)
        ops.store_drafts_(*tensors)
        store_op.reference(*given)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(tensors, given, strict=True))


def test_in_fixed_order_a_row_has_the_same_bits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(4, 600, 2, 64, generator=generator, dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn(3, 8, 8, 64, generator=generator, dtype=torch.bfloat16)
    positions = torch.tensor([[100], [333], [592]]) + torch.arange(8)
    slots = torch.tensor([1, 3, 0])
    q, keys, values, slots, positions = on_gpu(q, *caches, slots, positions)
    together = ops.attention_fixed_order(q, keys, values, slots, positions, 0.125)
    for row in range(3):
        for place in range(8):
            at = (slice(row, row + 1), slice(place, place + 1))
            alone = ops.attention_fixed_order(q[at], keys, values, slots[at[0]], positions[at], 0.125)
            assert torch.equal(alone[0, 0], together[row, place])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_linears_of_experts(dtype: torch.dtype, transposed: bool) -> None:
    """A pair's bits are the same in any company."""
    given = case(40, own=True, transposed=transposed, biased=True, depth=200, features=130, dtype=dtype)
    x, experts, weight, bias = (None if item is None else item.cuda() for item in given[:-1])
    got = ops.expert_linear(x, experts, weight, bias, transposed)
    torch.testing.assert_close(got.cpu(), expert_op.reference(*given), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert x is not None and experts is not None
    assert torch.equal(ops.expert_linear(x[3:4], experts[3:4], weight, bias, transposed), got[3:4])


@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_recurrences(make: Any) -> None:
    """Two steps: a prompt, then drafts after it. Kept inputs and states are those of the reference."""
    problem = make(length=12)
    slots = Slots(problem, "")
    state = [] if slots.state is None else [slots.state]
    copies = [tensor.cuda() for tensor in (*state, slots.kept)]
    op = getattr(ops, f"{problem.op}_")
    for first, absorbed, settled in ((0, 0, 7), (7, 7, 7)):
        places = [item[:, first : first + (7 if first == 0 else 5)] for item in problem.places]
        given = [(*places, *problem.fixed)[index] for index in problem.order]
        positions = torch.arange(first, first + places[0].shape[1]).repeat(2, 1)
        stands = [torch.tensor([absorbed] * 2)] if state else []
        cursor = [torch.tensor([2, 0]), positions, *stands, torch.tensor([settled] * 2)]
        wanted = op(*given, *state, slots.kept, *cursor)
        moved = [None if item is None else item.cuda() for item in given]
        got = op(*moved, *copies, *on_gpu(*cursor))
        torch.testing.assert_close(got.cpu(), wanted)
        for copy, own in zip(copies, (*state, slots.kept), strict=True):
            torch.testing.assert_close(copy.cpu(), own, equal_nan=True)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "mamba"])
def test_text_of_a_recurrent_target(name: str) -> None:
    model = model_of(name).cuda()
    with speccompile.wrap(model, "ngram", tiers=(0, 3), max_batch=2, max_len=63) as spec:
        assert spec.check([[9, 8, 7, 9, 8, 7, 9, 8], [5, 6]], max_new_tokens=20)


def test_drafts_within_the_top() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = 3 * torch.randn(4, 8, 128256, generator=generator)
    # The last few of the most likely, and places that are not ids.
    drafts = torch.cat([scores[:, :6].topk(6, -1).indices[..., -1], torch.tensor([[-1]] * 4)], dim=1)
    allowed = torch.tensor([-1.0, 1e-4, 0.013, 1.0])
    wanted = within_op.reference(scores, drafts, allowed, 6)
    assert torch.equal(ops.is_within_top(*on_gpu(scores, drafts, allowed), 6).cpu(), wanted)
    assert 0 < wanted.sum() < wanted.numel() and not wanted[0].any()


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("vocab", [1000, 49152, 128256])
def test_choice_of_tokens(drawn: bool, vocab: int) -> None:
    from speccompile.ops.noise import add_gumbel
    from speccompile.ops.triton.choose import choose

    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(4, 8, vocab, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.5] = float("-inf")
    noise = (torch.tensor([0.0, 1.0, 0.5, 2.0]), torch.arange(4) + 7, torch.arange(32).view(4, 8), 0, None)
    noisy = scores.clone()
    if drawn:
        add_gumbel(noisy, *noise)
    arguments = [item.cuda() if isinstance(item, torch.Tensor) else item for item in noise] if drawn else []
    got = choose(scores.cuda(), *arguments, forbids=drawn).cpu()
    # Logarithms differ in their last bits: what was chosen is as good as the best one.
    chosen = noisy.gather(-1, got[..., None])[..., 0]
    torch.testing.assert_close(chosen, noisy.amax(-1), rtol=2e-6, atol=2e-6)
    if not drawn:
        assert torch.equal(got, noisy.argmax(-1))


@pytest.mark.parametrize("vocab", [1000, 49152, 128256])
def test_top_k_and_top_p_wait_for_nobody(vocab: int) -> None:
    """The ops that graphs call, on both devices; on CUDA under capture."""
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(3, 8, vocab, generator=generator) * 4
    nothing = torch.zeros(3, 1, dtype=torch.int64)
    for name, wanted in (("top_k_", torch.tensor([0, 1, 50])), ("top_p_", torch.tensor([0.3, 1.0, 0.95]))):
        op = getattr(ops, name)
        expected, got = scores.clone(), scores.cuda()
        op(expected, nothing, nothing[:, 0], 0, [wanted])
        inputs = (got, *on_gpu(nothing, nothing[:, 0]), 0, [wanted.cuda()])
        op(*inputs)
        got.copy_(scores)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op(*inputs)
        graph.replay()
        kept, wished = (found.isfinite().sum(-1) for found in (got.cpu(), expected))
        # Where the mass is at the border but for rounding, one more or one less may stay.
        assert (kept - wished).abs().max() <= (name == "top_p_") and (got.cpu()[:, :, 0] <= scores[:, :, 0]).all()


def test_ngram_match() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, (9, 5000), generator=generator)
    length = torch.randint(5001, (9,), generator=generator)
    slots = torch.tensor([8, 0, 3, 5])
    wanted = ngram_op.reference(tokens, length, slots, 3, 1, 15)
    got = ops.match_ngram(*on_gpu(tokens, length, slots), 3, 1, 15)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("counted", [False, True])
def test_accept_and_commit(counted: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for drafted in (0, 1, 7, 15):
        length = whole(1, 30, 40)
        state = [whole(0, 3, 40, 64), length, length + whole(1, 20, 40), whole(0, 4, 40) > 0, whole(-1, 9, 40, 4)]
        state += [whole(0, 9, 40) for _ in range(3)]
        drafts, lens = whole(0, 3, 32, drafted), whole(0, drafted + 1, 32)
        judged = (torch.minimum(whole(0, drafted + 1, 32), lens), None) if counted else (None, drafts)
        rest = [torch.randperm(40, generator=generator)[:32], whole(-1, 3, 32, drafted + 1), lens, *judged]
        there = [None if item is None else item.cuda() for item in (*state, *rest)]
        here = [None if item is None else item.clone() for item in (*state, *rest)]
        commit_op.reference(*here)
        ops.accept_commit_(*there)
        for one, other in zip(there, here, strict=True):
            assert one is None or torch.equal(one.cpu(), other)


@pytest.mark.parametrize(
    "tree", [Tree.dynamic(7, 4, 3), Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])], ids=["dynamic", "static"]
)
def test_trees(tree: Tree) -> None:
    generator = torch.Generator().manual_seed(4)
    rows, proposed = 16, 12
    tokens = torch.randint(-1, 3, (rows, proposed), generator=generator)
    parents = (torch.rand((rows, proposed), generator=generator) * torch.arange(1, proposed + 1)).long()
    counts = [torch.randint(0, proposed + 2, (rows,), generator=generator) for _ in range(2)]
    static = (list(tree.parents or ()), list(tree.ranks or ()))
    wanted = tree_op.fit_tree(tokens, parents, *counts, int(tree), tree.depth, tree.branches, *static)
    there = on_gpu(tokens, parents, *counts)
    for one, other in zip(ops.fit_tree(*there, int(tree), tree.depth, tree.branches, *static), wanted, strict=True):
        assert torch.equal(one.cpu(), other)
    target = torch.randint(-1, 3, (rows, tree + 1), generator=generator)
    path, accepted = tree_op.walk_tree(target, *wanted[:2], tree.depth)
    for one, other in zip(ops.walk_tree(*on_gpu(target, *wanted[:2]), tree.depth), (path, accepted), strict=True):
        assert torch.equal(one.cpu(), other)
    kv = [torch.randn((rows, 64, 3, 600), generator=generator), torch.randn((rows, 64, 2, 64)).bfloat16()]
    moved = list(on_gpu(*kv))
    where = torch.randperm(rows, generator=generator), torch.randint(0, 50, (rows,), generator=generator)
    tree_op.move_path_(kv, *where, path, accepted)
    ops.move_path_(moved, *on_gpu(*where, path, accepted))
    for one, other in zip(moved, kv, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("backend", ["eager", "inductor", "auto"])
def test_the_text_by_trees(backend: str) -> None:
    model = tiny_llama().cuda()
    prompts = [random_prompt(9, seed=1), random_prompt(30, seed=2), [5, 6, 7] * 6]
    tree = Tree.dynamic(5, 3, 2)
    options: dict[str, Any] = {"tiers": (0, 3, tree), "max_batch": 3, "max_len": 96, "backend": backend}
    with speccompile.wrap(model, "draft_target", draft=random_drafter().cuda(), **options) as spec:
        for tier in (0, 3, tree):
            spec.set_tier(tier)
            requests = [spec.engine.submit(prompt, max_new_tokens=40, eos_token_id=[]) for prompt in prompts]
            texts = [request.result().token_ids for request in requests]
            assert texts == [greedy(tiny_llama(), prompt, 40) for prompt in prompts]


@pytest.mark.parametrize("backend", ["eager", "inductor", "auto"])
@pytest.mark.parametrize("mode", ["none", "ngram", "early_exit"])
def test_the_text_is_the_models_own(backend: str, mode: str) -> None:
    model = tiny_llama().cuda()
    prompts = [random_prompt(9, seed=1), random_prompt(30, seed=2), [5, 6, 7] * 6]
    options: dict[str, Any] = {"exit_layer": 1} if mode == "early_exit" else {}
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        wanted.append(output[0, len(prompt) :].tolist())
    tiers = (0,) if mode == "none" else (0, 3)
    with speccompile.wrap(model, mode, tiers=tiers, max_batch=3, max_len=96, backend=backend, **options) as spec:
        for tier in tiers:
            spec.set_tier(tier)
            requests = [spec.engine.submit(prompt, max_new_tokens=40, eos_token_id=[]) for prompt in prompts]
            assert [request.result().token_ids for request in requests] == wanted
    # And that is what the CPU says too.
    assert greedy(tiny_llama(), prompts[0], 40) == wanted[0]


def test_drawn_text_does_not_depend_on_the_tier() -> None:
    model = tiny_llama().cuda()
    ids = torch.tensor([[5, 6, 7, 8] * 4], device="cuda")
    texts = []
    with speccompile.wrap(model, "ngram", tiers=(0, 3, 7), max_batch=2, max_len=96) as spec:
        for tier in (0, 3, 7):
            spec.set_tier(tier)
            texts.append(spec.generate(ids, max_new_tokens=40, do_sample=True, temperature=0.9, top_k=30, seed=11))
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
