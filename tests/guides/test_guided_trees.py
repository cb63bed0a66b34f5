"""Proposed drafts and trees of drafts keep exactly what the guides of their rows allow."""

from __future__ import annotations

import random
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.sampling.guide_ops  # noqa: F401  defines the ops
from speccompile.guides import Guide, grammar_guide, regex_guide
from speccompile.sampling.guide import GuideFollower
from support.guide_tokenizers import EOS, allowed, byte_level
from support.tree_cases import proposals

#: More than the tokenizer has. Token ``VOCAB - 1`` has no text, and is an EOS token too.
VOCAB, SLOTS, LONGEST = 300, 4, 24
ENDS = (EOS, VOCAB - 1)


@cache
def guides() -> list[Guide]:
    tokenizer = byte_level("ab", "ba", "aab")
    return [
        regex_guide("(ab|ba|a{3})*", tokenizer),
        regex_guide("a{2,4}b?", tokenizer),
        grammar_guide('start: "a" start "b" | "b"', tokenizer),
    ]


@cache
def drafted() -> list[int]:
    """Token ids of drafts."""
    texts = guides()[0].tokens.texts
    return [*(texts.index(text) for text in (b"a", b"b", b"ab", b"ba", b"aab", b"c")), *ENDS]


class Row:
    """A slot's prompt and text, and the follower of its guide, if it has one."""

    def __init__(self, rng: random.Random) -> None:
        self.guide = rng.choice([*guides(), None])
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 5))]
        self.text: list[int] = []
        for _ in range(rng.randrange(6)):
            following = [] if self.guide is None else allowed(self.guide, self.text)
            self.text += [rng.choice(following)] if following else []
        self.tokens = [*prompt, *self.text]
        # Tokens after the committed ones are of an earlier step.
        self.padded = self.tokens + [rng.randrange(VOCAB) for _ in range(LONGEST - len(self.tokens))]
        self.follower = None if self.guide is None else GuideFollower(self.guide, ENDS, VOCAB, len(prompt))

    def allows(self, drafts: list[int]) -> bool:
        """Whether the guide allows ``drafts`` after the text. Nothing follows an EOS token."""
        if self.guide is None:
            return True
        *before, last = drafts
        if set(before) & set(ENDS):
            return False
        if last in ENDS:
            return self.guide.matches([*self.text, *before])
        return self.guide.matches([*self.text, *drafts], whole=False)

    def forced(self) -> list[int]:
        """Tokens after the text that have no alternative."""
        assert self.guide is not None
        prompt = len(self.tokens) - len(self.text)
        return GuideFollower(self.guide, ENDS, VOCAB, prompt).forced(torch.tensor(self.tokens))


def rows_of(rng: random.Random) -> tuple[list[Row], list[torch.Tensor]]:
    """All slots, and ``tokens``, ``length`` and ``guide_number``."""
    rows = [Row(rng) for _ in range(SLOTS)]
    numbers = [0 if row.follower is None else row.follower.number for row in rows]
    lengths = [len(row.tokens) for row in rows]
    return rows, [torch.tensor([row.padded for row in rows]), torch.tensor(lengths), torch.tensor(numbers)]


@settings(deadline=None, max_examples=100)
@given(st.lists(proposals, min_size=1, max_size=SLOTS), st.integers(0, 2**16))
def test_a_tree_keeps_the_nodes_whose_paths_are_allowed(trees: list[tuple[int, ...]], seed: int) -> None:
    rng, longest = random.Random(seed), 1 + max(map(len, trees))
    rows, state = rows_of(rng)
    slots = rng.sample(range(SLOTS), len(trees))
    tokens = torch.tensor([[rng.choice(drafted()) for _ in range(longest)] for _ in range(SLOTS)])
    parents, count = torch.zeros((SLOTS, longest), dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64)
    for slot, tree in zip(slots, trees, strict=True):
        parents[slot, : len(tree)], count[slot] = torch.tensor(tree, dtype=torch.int64), len(tree)
    proposed = [
        list(zip(tokens[slot, :nodes].tolist(), parents[slot, :nodes].tolist(), strict=True))
        for slot, nodes in enumerate(count.tolist())
    ]
    torch.ops.speccompile.truncate_trees_(tokens, parents, count, torch.tensor(slots), *state)
    for slot, row in enumerate(rows):
        kept = int(count[slot])
        found = list(zip(tokens[slot, :kept].tolist(), parents[slot, :kept].tolist(), strict=True))
        assert found == allowed_nodes(row, proposed[slot])


def allowed_nodes(row: Row, proposed: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Tokens and parents of the nodes whose whole path is allowed."""
    paths: list[list[int]] = [[]]
    for token, parent in proposed:
        paths.append([*paths[parent], token])
    keeps = [True, *(row.allows(path) for path in paths[1:])]
    number = [sum(keeps[1 : node + 1]) for node in range(len(keeps))]
    return [(token, number[parent]) for node, (token, parent) in enumerate(proposed, 1) if keeps[node]]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, SLOTS), st.integers(0, 8), st.integers(0, 2**16))
def test_drafts_are_forced_or_end_before_the_first_that_is_not_allowed(count: int, most: int, seed: int) -> None:
    rng = random.Random(seed)
    rows, state = rows_of(rng)
    slots = rng.sample(range(SLOTS), count)
    drafts = torch.tensor([[rng.choice(drafted()) for _ in range(most)] for _ in range(SLOTS)]).view(SLOTS, most)
    for slot, row in enumerate(rows):
        # Some rows begin with tokens that are allowed.
        walked: list[int] = []
        for _ in range(rng.randrange(most + 1)):
            following = [] if row.guide is None else allowed(row.guide, [*row.text, *walked])
            walked += [rng.choice(following)] if following else []
        drafts[slot, : len(walked)] = torch.tensor(walked, dtype=torch.int64)
    lens, limit = torch.tensor([rng.randrange(most + 1) for _ in range(SLOTS)]), state[1] + rng.randrange(1, 12)
    scores = torch.full((SLOTS, most), 0.5)
    before = [drafts[slot, : int(lens[slot])].tolist() for slot in range(SLOTS)]
    torch.ops.speccompile.guide_drafts_(lens, drafts, torch.tensor(slots), limit, *state, scores)
    for slot, row in enumerate(rows):
        expected = before[slot]
        if slot in slots and row.guide is not None:
            sizes = range(1, len(expected) + 1)
            expected = expected[: next((size - 1 for size in sizes if not row.allows(expected[:size])), len(expected))]
            forced = row.forced()[: min(most, int(limit[slot] - state[1][slot]) - 1)]
            if expected[: len(forced)] != forced:
                expected = forced
                assert (scores[slot, : len(forced)] == 1).all()
        assert drafts[slot, : int(lens[slot])].tolist() == expected


def test_forced_tokens_spell_what_every_text_goes_on_with() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        row = Row(rng)
        if row.guide is None:
            continue
        texts, forced = row.guide.tokens.texts, row.forced()
        spelled = b"".join(texts[token] for token in forced)
        assert not forced or row.allows(forced)
        for _ in range(5):
            ids = list(row.text)
            while following := allowed(row.guide, ids):
                ids.append(rng.choice(following))
                if len(ids) > LONGEST:
                    break
            after = b"".join(texts[token] for token in ids[len(row.text) :])
            assert after.startswith(spelled) or len(ids) > LONGEST
