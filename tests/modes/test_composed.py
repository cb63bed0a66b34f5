"""Several drafters: who is asked, whose draft counts, and what does not compose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Tree, modes
from speccompile.errors import InvalidOption, InvalidTiers, OptionOfAnotherMode, SpecCompileError, UnknownMode
from speccompile.modes import ReadyMode, registry
from speccompile.modes.composed import Composed
from support.errors import raises
from support.tiny import greedy, random_prompt, tiny_llama


@dataclass(frozen=True)
class Says(ReadyMode):
    """Proposes one token, thrice, for texts that begin with an even one, each with half the chance of the last."""

    name: ClassVar[str] = "says"
    scored: ClassVar[bool] = True

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lens = torch.where(tokens[:, 0] % 2 == 0, 3, 0)
        chances = 0.5 ** (1.0 + torch.arange(draft_len)).expand(tokens.shape[0], -1)
        return torch.full((tokens.shape[0], draft_len), 7), lens, chances

    def explain(self) -> str:
        return "says 7"


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"says": Says})
        yield


def proposed(min_score: float) -> tuple[list[list[int]], list[int], list[list[float]], list[int]]:
    """Drafts, their numbers and scores, and which drafter they are of, of two rows in the slots 2 and 0."""
    mode = modes.create(["says", "ngram"], {"min_score": min_score})
    assert isinstance(mode, Composed)
    tokens, source = torch.tensor([[2, 3, 4, 3], [1, 3, 4, 3]]), torch.full((3,), 9)
    drafts, lens, scores = mode.propose(tokens, torch.tensor([4, 4]), torch.tensor([2, 0]), source, draft_len=4)
    assert source[1] == 9
    return drafts.tolist(), lens.tolist(), scores.tolist(), source[[2, 0]].tolist()


def test_of_each_row_the_first_that_passes() -> None:
    # 1/2 + 1/4 + 1/8 are expected of the first one, which has nothing for the second row.
    drafts, lens, scores, source = proposed(0.875)
    assert drafts[0] == [7] * 4 and lens == [3, 4] and scores[0] == [0.5, 0.25, 0.125, 0.0625] and source == [0, 1]
    assert drafts[1] == [4, 3, 4, 3] and scores[1] == [1.0] * 4
    assert (proposed(0.9)[0], proposed(0.9)[3]) == ([[4, 3, 4, 3]] * 2, [1, 1])


def test_options_go_to_who_takes_them() -> None:
    mode = modes.create(["suffix", "NGram"], {"max_ngram": 2, "max_depth": 9, "min_score": 0.5})
    assert isinstance(mode, Composed)
    suffix, ngram = mode.drafters
    assert (suffix.max_depth, ngram.max_ngram, mode.min_score) == (9, 2, 0.5)  # type: ignore[attr-defined]
    state = mode.state(())
    assert len({spec.name for spec in state}) == len(state)


def test_the_text_is_that_of_transformers() -> None:
    model: LlamaForCausalLM = tiny_llama()
    spec = speccompile.wrap(
        model, ["suffix", "ngram"], tiers=(0, 3), max_len=64, backend="eager", max_depth=8, policy="cost"
    )
    prompt = random_prompt(9, 1, vocab=6)
    assert spec.generate(torch.tensor([prompt]), max_new_tokens=40)[0, 9:].tolist() == greedy(model, prompt, 40)
    assert "suffix follows" in spec.explain() and "ngram continues" in spec.explain()


TREE = Tree.dynamic(nodes=6, depth=4, branches=3)


def test_trees_of_several_drafters() -> None:
    """The text is the same, and tokens of both drafters are in it."""
    model: LlamaForCausalLM = tiny_llama()
    prompts = [random_prompt(12, 1, vocab=6), random_prompt(7, 3)]
    options = {"tiers": (0, 3, TREE), "max_batch": 2, "max_len": 96, "backend": "eager", "policy": "fixed:0"}
    options |= {"min_probability": 0.0, "min_score": 0.0, "max_depth": 8}
    with speccompile.wrap(model, ["prediction", "suffix", "recycle"], **options) as spec:
        expected = [greedy(model, prompt, 40) for prompt in prompts]
        spec.set_tier(TREE)
        for predictions in ((None, None), (expected[0], None)):
            requests = [
                spec.engine.submit(prompt, max_new_tokens=40, prediction=prediction)
                for prompt, prediction in zip(prompts, predictions, strict=True)
            ]
            assert [request.result().token_ids for request in requests] == expected
        assert requests[0].result().stats.acceptance_length > 3
        assert spec.check(prompts, max_new_tokens=20)


def test_a_drafter_of_chains_has_no_trees_beside_others() -> None:
    with raises(InvalidTiers, reason=re.compile("drafts of mode 'composed' are chains: says drafts chains")):
        speccompile.wrap(tiny_llama(), ["says", "suffix"], tiers=(0, TREE), max_len=64, backend="eager")


@pytest.mark.parametrize(
    ("names", "options", "kind", "fields"),
    [
        (["ngram"], {}, InvalidOption, {"reason": re.compile("two drafters or more")}),
        ([], {}, InvalidOption, {"reason": re.compile("two drafters or more")}),
        (["ngram", "NGRAM"], {}, InvalidOption, {"reason": re.compile("occurs twice")}),
        (["ngram", "early_exit"], {}, InvalidOption, {"reason": re.compile("'early_exit' does not propose")}),
        (["ngram", "lookahead"], {}, UnknownMode, {"name": "lookahead"}),
        (["suffix", "ngram"], {"exit_layer": 1}, OptionOfAnotherMode, {"names": "exit_layer"}),
    ],
)
def test_what_does_not_compose(
    names: list[str], options: dict[str, int], kind: type[SpecCompileError], fields: dict[str, Any]
) -> None:
    with raises(kind, **fields):
        modes.create(names, options)
