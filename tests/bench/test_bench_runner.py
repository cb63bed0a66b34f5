"""The runner: lines side by side over the same turns, and what an answer states about its steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile import Tree, wrap
from speccompile.bench.answers import Decoding, steps_of, tier_name
from speccompile.bench.contenders import Contender, Transformers, Wrapped
from speccompile.bench.dialogue import turn_ids
from speccompile.bench.method_names import PLAIN
from speccompile.bench.prompt_files import BenchPrompt
from speccompile.bench.results import BenchRun, ResultFile, Results
from speccompile.bench.runner import BenchPlan, run_bench
from speccompile.cli.models import tiny_model, tiny_tokenizer
from speccompile.policies import Fixed, parse_policy
from speccompile.policies.base import Done
from speccompile.runtime.stats import RequestStats

RUN = BenchRun({}, {}, {"name": "here"})
PROMPTS = (
    BenchPrompt("two", "writing", ("abcabcabc", "more abcabc")),
    BenchPrompt("one", "qa", ("hello hello hello",)),
)
MODEL = tiny_model()


@pytest.fixture(scope="module")
def contenders() -> Iterator[list[Contender]]:
    shared: dict[str, Any] = {"backend": "eager", "prefix_reuse": False, "max_len": 128, "max_batch": 1}
    with (
        wrap(MODEL, "none", tiers=(0,), **shared) as plain,
        wrap(MODEL, "suffix", tiers=(0, 3), remember=4096, **shared) as suffix,
    ):
        yield [
            Wrapped(PLAIN, plain, Fixed(0)),
            Wrapped("suffix K=3", suffix, Fixed(3)),
            Wrapped("suffix cost", suffix, parse_policy("cost", (0, 3))),
            Transformers(MODEL),
        ]


def run(contenders: list[Contender], path: Path, decoding: Decoding, rounds: int = 1) -> Results:
    file = ResultFile(path, RUN)
    run_bench(contenders, BenchPlan(PROMPTS, rounds, decoding), tiny_tokenizer(), file, "here")
    file.close()
    return file.results


def by_turn(results: Results, line: str) -> dict[tuple[str, int, int], tuple[int, ...]]:
    return {
        (each.prompt, each.turn, each.round): each.answer.token_ids
        for each in results.answers["here"]
        if each.line == line
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_lines_emit_the_tokens_of_k0(contenders: list[Contender], tmp_path: Path, temperature: float) -> None:
    results = run(contenders, tmp_path / "bench.jsonl", Decoding(20, temperature))
    plain = by_turn(results, PLAIN)
    assert set(plain) == {("two", 0, 0), ("two", 1, 0), ("one", 0, 0)}
    for contender in contenders[1:]:
        equal = by_turn(results, contender.name) == plain
        assert equal or (temperature and contender.name == "transformers generate")


def test_a_second_turn_continues_the_answer_of_k0(contenders: list[Contender], tmp_path: Path) -> None:
    results = run(contenders, tmp_path / "bench.jsonl", Decoding(12))
    answer = by_turn(results, PLAIN)["two", 0, 0]
    expected = turn_ids(tiny_tokenizer(), PROMPTS[0], [answer])
    lengths = {each.prompt_tokens for each in results.answers["here"] if each.turn == 1}
    assert lengths == {len(expected)}


def test_steps_add_up_to_the_answer(contenders: list[Contender], tmp_path: Path) -> None:
    for each in run(contenders, tmp_path / "bench.jsonl", Decoding(20)).answers["here"]:
        answer, steps = each.answer, each.answer.steps
        assert len(answer.token_ids) == 20 and 0 < answer.first_seconds < answer.seconds
        if each.line == "transformers generate":
            assert len(steps) == 0
            continue
        # The prompt's pass emits the first token.
        assert sum(steps.emitted) == 19
        assert all(accepted <= depth for accepted, depth in zip(steps.accepted, steps.depths, strict=True))
        assert answer.drafts_by.get("suffix", (0, 0)) == (sum(steps.depths), sum(steps.accepted)) or each.line == PLAIN
        assert set(steps.tiers) <= {"0", "3"} and all(ms is not None and ms > 0 for ms in steps.ms)


def test_a_drafter_does_not_remember_earlier_answers(contenders: list[Contender], tmp_path: Path) -> None:
    results = run(contenders, tmp_path / "bench.jsonl", Decoding(20), rounds=3)
    columns = {
        (each.prompt, each.turn): {other.answer.steps.accepted for other in results.answers["here"]
                                   if (other.prompt, other.turn, other.line) == (each.prompt, each.turn, "suffix K=3")}
        for each in results.answers["here"]
    }  # fmt: skip
    assert all(len(found) == 1 for found in columns.values())


def test_answers_in_the_file_are_not_repeated(contenders: list[Contender], tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    # The run is killed after the second of seven answers of two lines.
    file = ResultFile(path, RUN)
    count = 0

    def stop() -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(contenders[:2], BenchPlan(PROMPTS, 1, Decoding(12)), tiny_tokenizer(), file, "here", stop)
    file.close()
    whole = run(contenders[:2], path, Decoding(12))
    assert len(whole.answers["here"]) == len({each.key for each in whole.answers["here"]}) == 6
    # A later run with a further line needs K=0 no more: its answers are in the file.
    more = run(contenders[3:], path, Decoding(12))
    assert by_turn(more, "transformers generate") == by_turn(more, PLAIN)


def test_tokens_after_the_end_of_a_request_do_not_count() -> None:
    stats = RequestStats(3)
    for emitted, accepted in ((4, 3), (2, 2)):
        stats.count(emitted, accepted, 3)
    done = [
        Done(3, (1,), (10,), (3,), (3,), (4,), ((0.9, 0.8, 0.7),), 5.0),
        Done(3, (1,), (14,), (3,), (0,), (0,), ((),), 5.0),
        Done(3, (1,), (14,), (3,), (3,), (4,), ((),), 5.0),
        Done(3, (1,), (18,), (3,), (3,), (4,), ((),), 5.0),
    ]
    steps = steps_of(done, stats)
    assert (steps.emitted, steps.accepted, steps.scores) == ((4, 2), (3, 2), ((0.9, 0.8, 0.7), ()))
    assert steps_of([], RequestStats(3)).acceptance_length == 0.0


def test_a_tree_is_as_deep_as_its_tier() -> None:
    tree = Tree.dynamic(8, 4, 2)
    stats = RequestStats(8)
    stats.count(3, 2, 8, 4)
    steps = steps_of([Done(tree, (1,), (10,), (8,), (2,), (3,), (), 5.0)], stats)
    assert (steps.tiers, steps.depths) == (("tree:8:4:2",), (4,))
    assert tier_name(Tree.static([(0,), (1,), (0, 0)])) == "tree:3:2"


def test_draws_of_transformers_do_not_depend_on_earlier_ones() -> None:
    own, ids = Transformers(MODEL), list(b"hello")
    state = torch.random.get_rng_state()
    first = own.answer(ids, Decoding(10, 1.0), 7)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert own.answer(ids, Decoding(10, 1.0), 7).token_ids == first.token_ids
