"""The C++ ops that choose tokens: the very tokens, and the very scores, that torch's own find.

``test_other_cpus.py`` runs this file again for CPUs with less than this one.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops import choose, noise
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.greatest import mask_below
from support.choice_cases import INF, ChoiceCase, choice_cases, random_keys, random_scores

ops = torch.ops.speccompile

# Around the sizes of vectors, blocks (16 to 256 scores) and of what one thread takes (16,384).
VOCABULARIES = [1, 2, 15, 64, 65, 100, 1000, 4097, 16384, 16385, 40000]
any_vocabulary = st.sampled_from(VOCABULARIES)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


@settings(max_examples=60, deadline=None)
@given(choice_cases(VOCABULARIES))
def test_tokens_are_the_defined_ones(case: ChoiceCase) -> None:
    scores, arguments, forbids = case.scores(), case.draws(noise.DRAFTS), case.forbids
    before = scores.clone()
    wanted = choose.reference(scores, *arguments, forbids)
    assert torch.equal(ops.choose(scores, *arguments, forbids), wanted)
    last = scores[..., case.first :], *arguments, forbids, case.first
    assert torch.equal(ops.choose(*last), choose.reference(*last))
    assert torch.equal(ops.choose(scores, forbids=forbids), choose.reference(scores, forbids=forbids))
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32)), "scores are read only"


@pytest.mark.parametrize("vocab", [3, 50, 5000])
def test_many_draws(vocab: int) -> None:
    """Flat scores: any of the tokens may win, by how little ever."""
    scores = random_scores(1, 4000 if vocab < 100 else 400, vocab, 1.0, vocab) / 10
    arguments = torch.ones(1), *random_keys(1, scores.shape[1], 3, started=False)
    assert torch.equal(ops.choose(scores, *arguments, True), choose.reference(scores, *arguments, True))


def rival_scores(apart: float) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Two tokens whose noised scores are so far apart, after many that cannot win."""
    key = torch.tensor([5]), torch.arange(64)[None], noise.TOKENS, None
    scores = torch.full((1, 64, 300), -40.0)
    drawn = noise.gumbel(key[0], noise.TOKENS, key[1], 300)
    scores[..., 7] = 3 - drawn[..., 7]
    scores[..., 250] = 3 + apart - drawn[..., 250]
    return scores, (torch.ones(1), *key)


@pytest.mark.parametrize("apart", [0.0, 1e-6, -1e-6, 1e-5])
def test_places_too_close_to_call_are_looked_at_again(monkeypatch: pytest.MonkeyPatch, apart: float) -> None:
    scores, arguments = rival_scores(apart)
    wanted = choose.reference(scores, *arguments, True)
    assert torch.equal(ops.choose(scores, *arguments, True), wanted)
    # Nothing but that second look decides them.
    monkeypatch.setattr(choose, "reference", second_look)
    assert (ops.choose(scores, *arguments, True) == 99).all()


def second_look(scores: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.full(scores.shape[:2], 99)


def test_other_places_are_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "reference", second_look)
    scores, arguments = rival_scores(1e-2)
    assert not (ops.choose(scores, *arguments, True) == 99).any()
    # Without noise there is nothing to doubt: the first of equal ones.
    equal = torch.zeros(1, 2, 40)
    cold = (torch.zeros(1), *random_keys(1, 2, 0, started=False))
    assert not ops.choose(equal).any() and not ops.choose(equal, *cold, False).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_second_look_reads_what_the_first_one_read(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    seen = []

    def look(scores: torch.Tensor, *arguments: object) -> torch.Tensor:
        seen.append((scores, *arguments))
        return torch.full(scores.shape[:2], 1)

    monkeypatch.setattr(choose, "reference", look)
    # Two rows of two positions of a wider tensor.
    wide = torch.full((2, 3, 300), -40.0, dtype=dtype)
    scores = wide[:, :2]
    key = torch.tensor([5, 6]), torch.tensor([[7, 8], [9, 2**40]]), noise.DRAFTS, torch.tensor([3, 4])
    drawn = noise.gumbel(*key[:1], key[2], key[1], 300, key[3]).to(dtype)
    scores[..., 7], scores[..., 250] = 12 - drawn[..., 7], 12 - drawn[..., 250]
    tokens = ops.choose(scores, torch.tensor([1.0, 0.5]), *key, True)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(seen) == int((tokens == 1).sum()) and (dtype is not torch.float32 or len(seen) == 4)
    for (row, place), look_at in zip([at for at in places if tokens[at] == 1], seen, strict=True):
        assert torch.equal(look_at[0][0, 0], scores[row, place])
        assert (look_at[1], look_at[4], look_at[6:]) == (torch.ones(1), noise.DRAFTS, (True, 0))
        assert [int(item) for item in (look_at[2], look_at[3], look_at[5])] == [
            key[0][row],
            key[1][row, place],
            key[3][row],
        ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", [MemoryError("no memory"), KeyboardInterrupt()], ids=repr)
def test_a_second_look_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise fault

    monkeypatch.setattr(choose, "reference", fails)
    scores, arguments = rival_scores(0.0)
    with pytest.raises(RuntimeError, match="could not be chosen again"):
        ops.choose(scores, *arguments, True)
    monkeypatch.setattr(choose, "reference", lambda scores, *_: torch.full(scores.shape[:2], 300))
    with pytest.raises(RuntimeError, match="could not be chosen again"):
        ops.choose(scores, *arguments, True)


def test_the_second_look_runs_on_the_cpu_whatever_the_default_device_is() -> None:
    scores, token = torch.tensor([0.0, 9.0, 1.0]), ctypes.c_int64(-2)
    place = (scores.data_ptr(), 4, False, 3, 5, noise.TOKENS, 7, None, True, 0, ctypes.byref(token))
    with torch.device("meta"):
        choose._choose_again(*place)
    assert token.value == 1


def test_estimates_are_much_nearer_than_what_counts_as_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of tokens, the second one better by a hundredth of that: the first glance may be wrong there, but nowhere
    else."""
    key = torch.tensor([11]), torch.arange(20_000)[None], noise.TOKENS, None
    drawn = noise.gumbel(key[0], noise.TOKENS, key[1], 2)
    for apart, sure in ((1e-5, False), (1e-4, True)):
        scores = torch.stack([-drawn[..., 0], apart - drawn[..., 1]], dim=-1)
        close = torch.zeros(1, scores.shape[1], dtype=torch.bool)

        def look(scores: torch.Tensor, *arguments: torch.Tensor, close: torch.Tensor = close) -> torch.Tensor:
            close[0, int(arguments[2])] = True
            return torch.zeros(1, 1, dtype=torch.int64)

        with monkeypatch.context() as patch:
            patch.setattr(choose, "reference", look)
            tokens = ops.choose(scores, torch.ones(1), *key, True)
        assert bool((close | (tokens == 1)).all()) and bool(close.any()) != sure


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_without_noise_the_first_of_the_greatest_in_any_dtype(dtype: torch.dtype) -> None:
    scores = torch.zeros(1, 4, 20000, dtype=dtype)
    scores[0, 0, [17000, 18000]] = 1
    scores[0, 1] = -INF
    scores[0, 2, [5, 100]] = INF
    scores[0, 3, [19999, 3]] = torch.tensor([float("nan"), INF], dtype=dtype)
    assert ops.choose(scores).tolist() == [[17000, 0, 5, -1]]
    assert ops.choose(scores, forbids=True).tolist() == [[17000, -1, 5, -1]]
    random = torch.randn(2, 3, 5001).to(dtype)
    assert torch.equal(ops.choose(random), random.argmax(-1))
    strided = torch.randn(2, 700, 3).to(dtype).transpose(1, 2)
    assert torch.equal(ops.choose(strided), strided.argmax(-1))


@settings(max_examples=60, deadline=None)
@given(
    vocab=any_vocabulary,
    share=st.floats(0, 1),
    kept=st.sampled_from([0.0, 0.01, 1.0]),
    coarse=st.booleans(),
    broken=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_greatest_are_those_of_topk(
    vocab: int, share: float, kept: float, coarse: bool, broken: bool, seed: int
) -> None:
    scores = random_scores(2, 2, vocab, kept, seed, coarse)
    if broken:
        scores[1, 1, [vocab // 3, vocab - 1]] = float("nan")
    for count in {1, min(vocab, 256), max(1, int(share * vocab))}:
        wanted = scores.topk(count, dim=-1).values
        torch.testing.assert_close(ops.greatest(scores, count), wanted, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(vocab=any_vocabulary, kept=st.sampled_from([0.0, 0.01, 1.0]), coarse=st.booleans(), seed=st.integers(0, 10**6))
def test_what_is_below_the_threshold_is_masked(vocab: int, kept: float, coarse: bool, seed: int) -> None:
    scores = random_scores(2, 3, vocab, kept, seed, coarse).contiguous()
    scores[0, 1, vocab // 2] = float("nan")
    threshold = torch.tensor([-INF, 0.0, 1.5, float("nan"), INF, -2.0]).view(2, 3, 1)
    masked, wanted = scores.clone(), scores.clone()
    ops.mask_below_(masked, threshold)
    mask_below(wanted, threshold)
    torch.testing.assert_close(masked, wanted, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(vocab=any_vocabulary, kept=st.sampled_from([0.0, 0.01, 1.0]), seed=st.integers(0, 10**6))
def test_share_is_the_softmax_of_the_greatest(vocab: int, kept: float, seed: int) -> None:
    scores = random_scores(2, 3, vocab, kept, seed, coarse=False)
    scores[0, 1, vocab // 2] = float("nan")
    share = ops.greatest_share(scores)
    wanted = scores.double().softmax(-1).amax(-1, keepdim=True).float()
    torch.testing.assert_close(share, wanted, rtol=2e-6, atol=0, equal_nan=True)
    alone = ops.greatest_share(scores[1:, 2:])
    torch.testing.assert_close(alone, share[1:, 2:], rtol=0, atol=0, equal_nan=True)


def test_threads_change_nothing() -> None:
    scores = random_scores(2, 3, 40000, 1.0, 0).contiguous()
    arguments = torch.ones(2), *random_keys(2, 3, 0, started=True)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        chosen, greatest = ops.choose(scores, *arguments, True), ops.greatest(scores, 256)
        results.append((chosen, greatest, ops.greatest_share(scores)))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_what_does_not_fit_is_refused() -> None:
    scores = torch.zeros(1, 2, 8)
    with pytest.raises(RuntimeError, match="come together"):
        ops.choose(scores, torch.ones(1))
    with pytest.raises(RuntimeError, match="9 of 8 scores"):
        ops.greatest(scores, 9)
    with pytest.raises(RuntimeError, match="the sizes do not fit"):
        ops.mask_below_(scores, torch.zeros(1, 1, 1))
