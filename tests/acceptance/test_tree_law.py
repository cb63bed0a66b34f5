"""Trees under ``rejection``: the emitted tokens have the target's joint distribution, by all draws and all coins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from speccompile import Tree
from speccompile.acceptance.multi_round import children_of, judge_siblings, most_children
from speccompile.errors import InvalidTiers
from speccompile.ops.draft_levels import choose_nodes, likeliest_tree, next_level
from speccompile.passes.step.drawn_siblings import check_siblings, drafts_at, draw_siblings, own_places, shares_of
from speccompile.passes.step.tree_drafts import fit
from speccompile.passes.step.tree_expansions import expansions
from support.errors import raises
from support.rule_laws import Law, distance

VOCAB, DEPTH = 5, 3
Path = tuple[int, ...]
Table = dict[Path, torch.Tensor]
Judge = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def table(seed: int, zeros: bool = False) -> Table:
    """A next-token distribution (float64) after each text of up to DEPTH tokens."""
    rng = torch.Generator().manual_seed(seed)
    made = {}
    for text in (text for length in range(DEPTH + 1) for text in itertools.product(range(VOCAB), repeat=length)):
        logits = 1.5 * torch.randn(VOCAB, generator=rng, dtype=torch.float64)
        if zeros:
            logits[torch.randperm(VOCAB, generator=rng)[:2]] = -math.inf
        made[text] = logits.softmax(-1)
    return made


def joint(p: Table) -> Law:
    texts = itertools.product(range(VOCAB), repeat=DEPTH + 1)
    return {text: math.prod(float(p[text[:i]][text[i]]) for i in range(DEPTH + 1)) for text in texts}


def draws(q: torch.Tensor, count: int) -> Iterator[tuple[Path, float]]:
    """All ordered draws of ``count`` tokens without replacement, -1 after the last possible one, and their
    probabilities."""
    for siblings in itertools.permutations(range(VOCAB), min(count, int((q > 0).sum()))):
        left, chance = 1.0, 1.0
        for token in siblings:
            chance *= float(q[token]) / left if left > 0 else 0.0
            left -= float(q[token])
        if chance > 0:
            yield (*siblings, *[-1] * (count - len(siblings))), chance


def bars(p: torch.Tensor, q: torch.Tensor, siblings: Path, replaced: bool = False) -> list[float]:
    """The probability that each child is accepted if those before it were rejected, by the formula of the papers.
    ``replaced``: for draws with replacement, a rejected child stays in q."""
    found = []
    left, mass = [float(x) for x in p], [float(x) for x in q]
    for token in siblings:
        if token < 0:
            found.append(0.0)
            continue
        here, there = sum(left), sum(mass)
        own = [x / there for x in mass] if mass[token] > 0 else [float(i == token) for i in range(VOCAB)]
        found.append(min(1.0, left[token] / here / own[token]))
        left = [max(x / here - y, 0.0) for x, y in zip(left, own, strict=True)]
        if sum(left) < 1e-12:
            break
        if not replaced:
            mass[token] = 0.0
    return (found + [0.0] * len(siblings))[: len(siblings)]


def outcomes(
    judge: Judge, p: torch.Tensor, q: torch.Tensor, siblings: list[Path], replaced: bool = False
) -> Iterator[tuple[int, int, torch.Tensor, float]]:
    """What ``judge`` does with the children of a node, for each of many lists of ``siblings``: the index of the list,
    the accepted child (-1: none), the mass that is left, and the probability. A coin is compared with one bar: one on
    each side of it."""
    rows, coins, weights = [], [], []
    for row, tokens in enumerate(siblings):
        bar = bars(p, q, tokens, replaced)
        reached = 1.0
        for place in range(len(tokens) + 1):
            chance = reached * (bar[place] if place < len(tokens) else 1.0)
            if chance > 0:
                above = [(1 + x) / 2 for x in bar[:place]]
                rows.append(row)
                coins.append([*above, *[x / 2 for x in bar[place:]]])
                weights.append(chance)
            reached *= 1 - bar[place] if place < len(tokens) else 0.0
    tokens = torch.tensor([siblings[row] for row in rows])
    given = (p.expand(len(rows), -1), q.expand(len(rows), -1), tokens, torch.tensor(coins, dtype=torch.float64))
    chosen, left = judge(*given)
    yield from zip(rows, chosen.tolist(), left, weights, strict=True)


def of_node(
    judge: Judge, p: torch.Tensor, q: torch.Tensor, count: int, replaced: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities ``[C, V]`` that each child is accepted and is that token; and ``[V]`` that none is and that
    token is drawn from what is left."""
    accepted, drawn = torch.zeros(count, VOCAB, dtype=torch.float64), torch.zeros(VOCAB, dtype=torch.float64)
    every = list(draws(q, count))
    for row, place, left, weight in outcomes(judge, p, q, [siblings for siblings, _ in every], replaced):
        siblings, chance = every[row]
        if place < 0:
            drawn += chance * weight * left / left.sum()
        else:
            accepted[place, siblings[place]] += chance * weight
    return accepted, drawn


def law(judge: Judge, p: Table, q: Table, tree: Tree) -> Law:
    """Of the first DEPTH + 1 tokens in one step of a static tree; what it does not emit is drawn by the target
    later."""
    found = dict.fromkeys(itertools.product(range(VOCAB), repeat=DEPTH + 1), 0.0)

    def walk(path: Path, ranks: Path, chance: float) -> None:
        count = sum(len(other) == len(ranks) + 1 and other[:-1] == ranks for other in tree.paths)
        accepted, drawn = of_node(judge, p[path], q[path], count) if count else (torch.zeros(0, VOCAB), p[path])
        for token, weight in enumerate(drawn.tolist()):
            for rest in itertools.product(range(VOCAB), repeat=DEPTH - len(path)):
                text = (*path, token, *rest)
                later = math.prod(float(p[text[:i]][text[i]]) for i in range(len(path) + 1, DEPTH + 1))
                found[text] += chance * weight * later
        for rank, row in enumerate(accepted.tolist()):
            for token, weight in enumerate(row):
                if weight:
                    walk((*path, token), (*ranks, rank), chance * weight)

    walk((), (), 1.0)
    return found


STATIC = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0)])


@pytest.mark.parametrize("zeros", [False, True])
def test_siblings_without_replacement_emit_the_targets_joint_distribution(zeros: bool) -> None:
    p, q = table(1, zeros), table(101, zeros)
    got = law(judge_siblings, p, q, STATIC)
    assert distance(got, joint(p)) < 1e-9
    assert abs(sum(got.values()) - 1) < 1e-9


def keeps_replaced(p: torch.Tensor, q: torch.Tensor, siblings: torch.Tensor, coins: torch.Tensor) -> Any:
    """SpecInfer's rule for draws with replacement: a rejected child stays in q."""
    chosen, left = torch.full((len(p),), -1), p
    for place in range(siblings.shape[1]):
        token = siblings[:, place : place + 1]
        now = left / left.sum(-1, keepdim=True)
        passes = (coins[:, place] * q.gather(1, token)[:, 0] < now.gather(1, token)[:, 0]) & (chosen < 0)
        chosen = torch.where(passes, place, chosen)
        left = torch.where((chosen < 0)[:, None], (now - q).clamp(min=0), left)
    return chosen, left


def forgets_rejected(p: torch.Tensor, q: torch.Tensor, siblings: torch.Tensor, coins: torch.Tensor) -> Any:
    """Draws from p where all children were rejected."""
    return judge_siblings(p, q, siblings, coins)[0], p


@pytest.mark.parametrize(("judge", "replaced"), [(keeps_replaced, True), (forgets_rejected, False)])
def test_unsound_rules_are_found(judge: Judge, replaced: bool) -> None:
    p, q = table(1)[()], table(101)[()]
    accepted, drawn = of_node(judge, p, q, 2, replaced)
    assert float((accepted.sum(0) + drawn - p).abs().max()) > 1e-2
    accepted, drawn = of_node(judge_siblings, p, q, 2)
    assert float((accepted.sum(0) + drawn - p).abs().max()) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_more_siblings_accept_more(count: int) -> None:
    """One sibling is accepted with the probability 1 - TV, and all tokens of the vocabulary always."""
    for seed in range(4):
        p, q = table(seed)[()], table(seed + 100)[()]
        rate = float(of_node(judge_siblings, p, q, count)[0].sum())
        tv = float((p - q).abs().sum()) / 2
        if count == 1:
            assert rate == pytest.approx(1 - tv, abs=1e-12)
        else:
            assert rate > 1 - tv
        if count == VOCAB:
            assert rate == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("count", "in_turn", "shared_noise"), [(1, 0.474, 0.436), (2, 0.660, 0.669), (3, 0.775, 0.815)]
)
def test_the_figures_of_the_guide(count: int, in_turn: float, shared_noise: float) -> None:
    """docs/guides/trees.md: how often a child is accepted by ``rejection``, and by ``exact`` where the drafter
    has the target's noise."""
    rates = []
    for seed in range(20):
        p, q = table(seed)[()], table(seed + 100)[()]
        rng = torch.Generator().manual_seed(seed)
        noise = -(-torch.rand(200_000, VOCAB, generator=rng, dtype=torch.float64).log()).log()
        drawn, siblings = (p.log() + noise).argmax(-1), (q.log() + noise).topk(count).indices
        same = float((siblings == drawn[:, None]).any(1).double().mean())
        rates.append((float(of_node(judge_siblings, p, q, count)[0].sum()), same))
    means = torch.tensor(rates).mean(0)
    assert float(means[0]) == pytest.approx(in_turn, abs=6e-4)
    assert float(means[1]) == pytest.approx(shared_noise, abs=1.5e-3)


def test_certain_siblings_are_accepted_as_exact_accepts_them() -> None:
    """Children that q cannot draw: x is accepted with the probability p(x), as the target would draw it."""
    p, nothing = table(3)[()], torch.zeros(VOCAB, dtype=torch.float64)
    found = list(outcomes(judge_siblings, p, nothing, [(2, 4, 0)]))
    assert [place for _, place, _, _ in found] == [0, 1, 2, -1]
    for (_, _, _, weight), token in zip(found, (2, 4, 0), strict=False):
        assert weight == pytest.approx(float(p[token]), abs=1e-12)
    left = found[-1][2]
    torch.testing.assert_close(left / left.sum(), torch.where(torch.tensor([0, 1, 0, 1, 0]) > 0, p, 0) / (p[1] + p[3]))


# --- trees that are chosen in the step -----------------------------------------------------------


def enumerated(q: Table, tree: Tree, *, by_chance: bool = False) -> tuple[torch.Tensor, ...]:
    """All trees that the drawing passes can build from ``q``, as rows: weights ``[R]``, and drafts, parents and depths,
    by the functions that a step runs. ``by_chance``: nodes are kept by their own probability."""
    levels = expansions(tree)

    sizes = [level.count * level.branches for level in levels]
    state: list[tuple[torch.Tensor, ...]] = []
    paths: torch.Tensor | None = None
    above: tuple[torch.Tensor, ...] = ()
    weight = torch.ones(1, dtype=torch.float64)
    for depth, level in enumerate(levels):
        if depth == 0:
            nodes = torch.zeros(1, 1, 0, dtype=torch.int64)
        else:
            tokens, ranks, parents, chances = state[-1]
            found, _, index, came_from = choose_nodes(tokens, ranks, level.count, (), levels[depth - 1].branches)
            above = (chances.gather(1, index), index)
            assert paths is not None
            before = paths.gather(1, came_from[..., None].expand(-1, -1, paths.shape[2]))
            nodes = torch.cat([before, found[..., None]], 2)
        # Every row continues with all draws of its nodes.
        options = [
            list(draws(q[tuple(path)], level.branches)) for path in itertools.product(range(VOCAB), repeat=depth)
        ]
        per_node = len(options[0])
        assert all(len(option) == per_node for option in options)
        count = per_node**level.count
        pick = torch.tensor(list(itertools.product(range(per_node), repeat=level.count)))
        code = torch.zeros(nodes.shape[:2], dtype=torch.int64)
        for place in range(depth):
            code = code * VOCAB + nodes[..., place]
        all_tokens = torch.tensor([[siblings for siblings, _ in option] for option in options])
        all_weights = torch.tensor([[chance for _, chance in option] for option in options], dtype=torch.float64)
        code = code.repeat_interleave(count, 0)
        pick = pick.repeat(len(nodes), 1)
        drawn = all_tokens[code, pick]
        weight = weight.repeat_interleave(count, 0) * all_weights[code, pick].prod(1)
        state = [tuple(part.repeat_interleave(count, 0) for part in parts) for parts in state]
        above = tuple(part.repeat_interleave(count, 0) for part in above)
        paths = nodes.repeat_interleave(count, 0)
        probs = torch.stack([q[tuple(path)] for path in itertools.product(range(VOCAB), repeat=depth)])[code].float()
        logprobs, left = shares_of(probs, drawn)
        first = sum(sizes[: depth - 1]) if depth else 0
        flat, chances, parents = next_level(drawn, logprobs, *above, first=first)
        ranks = chances if by_chance else next_level(drawn, left, *above, first=first)[1]
        state.append((flat, ranks, parents, chances))

    tokens, ranks, parents = (torch.cat([part[i] for part in state], 1) for i in range(3))
    zeros, many = torch.zeros(1, dtype=torch.int64), torch.full((1,), 99)
    depths = tuple(level for level, size in enumerate(sizes, 1) for _ in range(size))
    slots = torch.zeros(len(tokens), dtype=torch.int64)
    given = (own_places(tokens), ranks, parents, zeros, many, slots)
    places, of, number = likeliest_tree(*given, depths=depths, max_len=99, nodes=int(tree))
    drafts, parents, depth_of, _ = fit(tree, places, of, number, torch.full_like(number, 99))
    drafts = torch.where(drafts < 0, -1, tokens.gather(1, drafts.clamp(min=0)))
    return weight, drafts, parents, depth_of


def law_of_trees(p: Table, q: Table, tree: Tree, **options: Any) -> Law:
    """Of the first DEPTH + 1 tokens in one step of a dynamic tree."""
    weight, drafts, parents, _ = enumerated(q, tree, **options)
    found = torch.zeros((VOCAB,) * (DEPTH + 1), dtype=torch.float64)
    rest = {
        path: _rest(p, path) for length in range(DEPTH + 2) for path in itertools.product(range(VOCAB), repeat=length)
    }

    def walk(path: Path, weight: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, now: torch.Tensor) -> None:
        """Rows whose accepted path is ``path``, which ends at the node ``now``."""
        walks = torch.ones_like(now, dtype=torch.bool)
        nodes, siblings = children_of(drafts, parents, now, walks, most_children(tree))
        same, which = torch.unique(siblings, dim=0, return_inverse=True)
        lists = [tuple(row) for row in same.tolist()]
        for group, place, left, chance in outcomes(judge_siblings, p[path], q[path], lists):
            mine = which == group
            if place >= 0:
                index = nodes[mine, place]
                walk((*path, lists[group][place]), weight[mine] * chance, drafts[mine], parents[mine], index)
                continue
            share = float(weight[mine].sum()) * chance * left / left.sum()
            for token in range(VOCAB):
                found[(*path, token)] += share[token] * rest[(*path, token)]

    walk((), weight, drafts, parents, torch.zeros(len(weight), dtype=torch.int64))
    texts = itertools.product(range(VOCAB), repeat=DEPTH + 1)
    return {text: float(found[text]) for text in texts}


def _rest(p: Table, path: Path) -> torch.Tensor:
    """The distribution of the tokens after ``path``, ``[V, ...]``."""
    if len(path) == DEPTH + 1:
        return torch.ones((), dtype=torch.float64)
    return torch.stack([p[path][token] * _rest(p, (*path, token)) for token in range(VOCAB)])


DYNAMIC = Tree.dynamic(nodes=3, depth=3, branches=2)


def test_a_dynamic_tree_of_drawn_siblings_emits_the_targets_joint_distribution() -> None:
    p, q = table(2), table(102)
    got = law_of_trees(p, q, DYNAMIC)
    assert abs(sum(got.values()) - 1) < 1e-9
    assert distance(got, joint(p)) < 1e-9


SMALL = Tree.dynamic(nodes=2, depth=2, branches=2)


def test_nodes_that_are_kept_by_their_own_probability_are_not_lossless() -> None:
    """The likeliest nodes, as ``exact`` reads them: what is kept then depends on the drawn token itself."""
    p, q = table(2), table(102)
    assert distance(law_of_trees(p, q, SMALL, by_chance=True), joint(p)) > 1e-3
    assert distance(law_of_trees(p, q, SMALL), joint(p)) < 1e-9


# --- draws ---------------------------------------------------------------------------------------


def test_siblings_are_drawn_without_replacement() -> None:
    """By many seeds, in two nodes of a level, which do not share their noise."""
    rows = 40_000
    q = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    scores = q.log().expand(rows, 2, 4).contiguous()
    slots = torch.arange(rows)
    given = (torch.full((rows,), 7), slots, torch.ones(rows), slots * 7919)
    tokens, logprobs, left, probs = draw_siblings(scores, *given, count=2, level=3)
    torch.testing.assert_close(probs, scores.exp())
    for node in range(2):
        for first, second in itertools.permutations(range(4), 2):
            chance = float(q[node, first] * q[node, second] / (1 - q[node, first]))
            rate = float(((tokens[:, node, 0] == first) & (tokens[:, node, 1] == second)).double().mean())
            assert abs(rate - chance) < 4 * math.sqrt(chance / rows)
    both = float(((tokens[:, 0, 0] == 0) & (tokens[:, 1, 0] == 3)).double().mean())
    assert abs(both - 0.5 * 0.4) < 4 * math.sqrt(0.2 / rows)
    torch.testing.assert_close(logprobs.exp(), probs.gather(-1, tokens))
    torch.testing.assert_close(left.exp()[..., 1], 1 - logprobs.exp()[..., 0])


def test_a_greedy_row_has_the_likeliest_siblings() -> None:
    scores = torch.tensor([[[0.1, 3.0, 2.0, -math.inf]]])
    row = torch.zeros(1, dtype=torch.int64)
    tokens, logprobs, left, _ = draw_siblings(scores, row, row, torch.zeros(1), row, count=4, level=0)
    assert tokens.tolist() == [[[1, 2, 0, -1]]]
    assert left[0, 0, 0] == 0 and bool(left[0, 0, 1:3].isfinite().all())
    assert left[0, 0, 3] == logprobs[0, 0, 3] == -math.inf


def test_a_draw_has_the_distribution_of_its_parent() -> None:
    probs = [torch.rand(1, 1, 4), torch.rand(1, 2, 4)]
    places, tokens = torch.tensor([[0, 3, -1]]), torch.tensor([[9, 8, 7, 6, 5, 4]])
    drafts, rows = drafts_at(places, tokens, *probs, expanded=(0, 0, 1, 1, 2, 2))
    assert drafts.tolist() == [[9, 6, -1]]
    assert torch.equal(rows[0, 0], probs[0][0, 0]) and torch.equal(rows[0, 1], probs[1][0, 0])


def test_a_static_tree_without_a_first_sibling_is_refused() -> None:
    with raises(InvalidTiers, reason=drawn_siblings_reason((1, 1), (1, 0))):
        check_siblings(Tree.static([(0,), (1,), (1, 1)]))
    check_siblings(STATIC)


def drawn_siblings_reason(path: Path, before: Path) -> str:
    return (
        f"the tree has the path {path}, and not {before}: siblings are judged in the order in which they were drawn, "
        "all of them; add that path, or use acceptance='exact'"
    )
