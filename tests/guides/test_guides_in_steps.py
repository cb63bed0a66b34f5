"""Guides in whole steps of tiny models: the same text in every mode and tier, and never a token too many."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, acceptance, wrap
from speccompile.acceptance.relaxed import first, is_within_top
from speccompile.errors import InvalidGuide, InvalidOption, RequestFailed, UndecidedLogits
from speccompile.guides import Guide, json_schema_guide, regex_guide
from speccompile.modes import registry
from speccompile.modes.ready_mode import ReadyMode
from speccompile.sampling.guide import GuideFollower
from support.dice import Dice
from support.errors import raises
from support.guide_modes import Random
from support.guide_tokenizers import EOS, allowed, byte_level, common
from support.tiny import tiny_llama

#: More than the tokenizer has.
VOCAB = 300
NEW = 32
MODES: dict[str, dict[str, Any]] = {"none": {}, "ngram": {}, "early_exit": {"exit_layer": 1}, "random_drafts": {}}
TIERS = (0, 7)
Request = dict[str, Any]


@cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@cache
def guides() -> dict[str, Guide]:
    tokenizer = common()
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 3},
            "b": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 3},
            "c": {"enum": ["abc", "cba"]},
        },
        "required": ["a", "b", "c"],
    }
    return {
        "schema": json_schema_guide(schema, tokenizer),
        "free": regex_guide("(ab|ba|c|é){3,}", tokenizer),
        "short": regex_guide("abc|(abc){2}", tokenizer),
        "one": regex_guide("aaaaaaaaaaaaaaaaaaaaaaaaaaaa", tokenizer),
        "tiny": regex_guide("a?", tokenizer),
    }


def wrapped(mode: str, **options: Any) -> Speculator:
    sizes: dict[str, Any] = {"tiers": TIERS, "max_batch": 2, "max_len": 63, "backend": "eager"}
    sizes["policy"] = f"fixed:{max((sizes | options)['tiers'])}"
    return wrap(model(), mode, **(sizes | MODES.get(mode, {}) | options))


@pytest.fixture(scope="module", autouse=True)
def drafters() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_modes", dict(registry._modes) | {"random_drafts": Random, "guided": Guided})
        yield


@pytest.fixture(scope="module")
def specs(drafters: None) -> dict[str, Speculator]:
    return {mode: wrapped(mode, **({"tiers": (0,)} if mode == "none" else {})) for mode in MODES}


def prompts(count: int, longest: int = 30) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(1, 12) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def requests(seed: int, *, guided: bool = True) -> list[Request]:
    """Guided and not, greedy and drawn, of ragged prompts."""
    rng, made = random.Random(seed), []
    names = itertools.cycle([*guides(), None, "schema"])
    for prompt in prompts(7):
        name = next(names)
        request: Request = {"ids": prompt, "max_new_tokens": NEW, "eos_token_id": [EOS]}
        if rng.random() < 0.5:
            request |= {"do_sample": True, "seed": rng.randrange(99), "temperature": rng.choice([0.7, 2.0]), "top_k": 0}
        if name is not None and guided:
            request["guide"] = guides()[name]
        made.append(request)
    return made


def run(spec: Speculator, asked: list[Request]) -> list[list[int]]:
    submitted = [spec.engine.submit(**request) for request in asked]
    return [request.result().token_ids for request in submitted]


def assert_follows(text: list[int], guide: Guide) -> None:
    if text and text[-1] == EOS:
        assert guide.matches(text[:-1])
    else:
        assert len(text) == NEW and guide.matches(text, whole=False)


@cache
def plain_loop(prompt: tuple[int, ...], guide: Guide, new: int = NEW, banned: tuple[int, ...] = ()) -> list[int]:
    """transformers' forward, every token asked for by itself, the greatest that is allowed."""
    text: list[int] = []
    while len(text) < new and EOS not in text:
        with torch.no_grad():
            logits = model()(torch.tensor([[*prompt, *text]])).logits[0, -1]
        from_the_greatest = logits.argsort(descending=True).tolist()
        allowed_ones = (token for token in from_the_greatest if is_allowed(token, text, guide))
        text.append(next(token for token in allowed_ones if token not in banned))
    return text


def is_allowed(token: int, text: list[int], guide: Guide) -> bool:
    return guide.matches(text) if token == EOS else token in allowed(guide, text)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_texts_are_those_of_a_plain_loop(specs: dict[str, Speculator], mode: str) -> None:
    asked = [
        {"ids": prompt, "max_new_tokens": NEW, "eos_token_id": [EOS], "guide": guide}
        for prompt, guide in zip(prompts(5), guides().values(), strict=True)
    ]
    expected = [plain_loop(tuple(request["ids"]), request["guide"]) for request in asked]
    for draft_len in specs[mode].engine.draft_lens:
        specs[mode].set_tier(draft_len)
        assert run(specs[mode], asked) == expected


@pytest.mark.parametrize("mode", ["none", "ngram"])
def test_processors_after_the_guide_choose_among_what_it_allows(specs: dict[str, Speculator], mode: str) -> None:
    """They may forbid a token that has the greatest score and that the guide allows."""
    spec, guide = specs[mode], guides()["free"]
    spec.set_tier(max(spec.engine.draft_lens))
    prompt, banned = prompts(5)[1], list[int]()
    for _ in range(3):
        expected = plain_loop(tuple(prompt), guide, banned=tuple(banned))
        asked = {"ids": prompt, "max_new_tokens": NEW, "eos_token_id": [EOS], "guide": guide, "suppress_tokens": banned}
        assert run(spec, [asked]) == [expected]
        banned += [next(token for token in expected if token not in banned)]


def test_scores_that_are_kept_are_those_of_allowed_tokens() -> None:
    guide, prompt = regex_guide("[^a]{3,}", common()), prompts(5)[1]
    with wrapped("ngram", scores=True) as spec:
        spec.set_tier(7)
        asked = {"max_new_tokens": 6, "eos_token_id": [EOS], "output_scores": True, "return_dict_in_generate": True}
        out = spec.generate(torch.tensor([prompt]), guide=guide, **asked)
    text = out.sequences[0, len(prompt) :].tolist()
    for place, scores in enumerate(out.scores):
        found = set(scores[0].isfinite().nonzero().flatten().tolist()) - {EOS}
        assert found == set(allowed(guide, text[:place])) - {EOS}


@pytest.fixture(scope="module")
def alone(specs: dict[str, Speculator]) -> dict[tuple[int, bool], list[list[int]]]:
    """Texts of ``requests(seed, guided=guided)``, each asked for by itself and without drafts."""
    specs["none"].set_tier(0)
    keys = ((1, True), (2, True), (2, False))
    return {key: [run(specs["none"], [one])[0] for one in requests(key[0], guided=key[1])] for key in keys}


def test_texts_follow_their_guides(alone: dict[tuple[int, bool], list[list[int]]]) -> None:
    for seed in (1, 2):
        for request, text in zip(requests(seed), alone[seed, True], strict=True):
            if "guide" in request:
                assert_follows(text, request["guide"])


@pytest.mark.parametrize("mode", MODES)
def test_the_same_texts_at_every_tier(
    specs: dict[str, Speculator], alone: dict[tuple[int, bool], list[list[int]]], mode: str
) -> None:
    for draft_len in specs[mode].engine.draft_lens:
        specs[mode].set_tier(draft_len)
        assert run(specs[mode], requests(1)) == alone[1, True]


@pytest.mark.parametrize(
    ("mode", "late"),
    [("none", False), ("ngram", False), ("ngram", True), ("early_exit", True), ("random_drafts", True)],
)
def test_the_same_texts_in_every_neighbourhood(
    specs: dict[str, Speculator],
    alone: dict[tuple[int, bool], list[list[int]]],
    mode: str,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While tiers change."""
    spec, asked = specs[mode], requests(2)
    monkeypatch.setattr(spec.engine.scheduler, "late", late)
    spec.engine.policy = Dice(spec.engine.draft_lens, 2)
    assert run(spec, asked) == alone[2, True]
    assert run(spec, asked[::-1]) == alone[2, True][::-1], "in other slots, by other neighbours"
    assert run(spec, requests(2, guided=False)) == alone[2, False]


def test_drafts_are_accepted_and_rejected(specs: dict[str, Speculator]) -> None:
    """Or the tests above would say nothing."""
    for mode in ("ngram", "early_exit", "random_drafts"):
        specs[mode].set_tier(7)
        specs[mode].stats.reset()
        run(specs[mode], [request for request in requests(1) if "guide" in request])
        stats = specs[mode].stats
        assert 0 < stats.accepted_tokens < stats.draft_tokens, mode


def test_a_slot_forgets_its_guide(specs: dict[str, Speculator]) -> None:
    spec, prompt = specs["ngram"], [5, 6, 7, 5, 6, 7]
    spec.set_tier(7)
    free = {"ids": prompt, "max_new_tokens": 20, "do_sample": True, "seed": 3, "eos_token_id": []}
    before = run(spec, [free] * 3)
    run(spec, [{"ids": prompt, "max_new_tokens": 5, "eos_token_id": [EOS], "guide": guides()["free"]}] * 3)
    assert (spec.arena["guide_number"] == 0).all()
    assert run(spec, [free] * 3) == before


def test_copies_of_a_prefix_and_prompts_of_several_chunks(specs: dict[str, Speculator]) -> None:
    prompt, guide = [random.Random(3).randrange(1, VOCAB) for _ in range(41)], guides()["schema"]
    expected = plain_loop(tuple(prompt), guide, 20)
    asked = {"ids": prompt, "max_new_tokens": 20, "eos_token_id": [EOS], "guide": guide}
    with wrapped("ngram", tiers=(0, 7), prefill_budget=4) as budgeted:
        for spec in (budgeted, specs["ngram"]):
            spec.set_tier(7)
            texts = [spec.engine.submit(**asked) for _ in range(4)]
            assert [request.result().token_ids for request in texts] == [expected] * 4
            assert texts[-1].stats.reused_tokens == 40
    ids = torch.tensor([prompt])
    specs["early_exit"].set_tier(7)
    rows = specs["early_exit"].generate(ids, max_new_tokens=20, eos_token_id=[EOS], num_return_sequences=3, guide=guide)
    assert [row[41 : 41 + len(expected)] for row in rows.tolist()] == [expected] * 3


@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        ("rejection", "early_exit"),
        ("block", "early_exit"),
        ("typical", "random_drafts"),
        ("relaxed", "ngram"),
    ],
)
def test_no_rule_emits_what_is_not_allowed(rule: str, mode: str) -> None:
    made: Any = {
        "typical": acceptance.Typical(threshold=0.01, alpha=0.01),
        "relaxed": acceptance.Relaxed(begin=5, end=299, top_k=32, delta=0.9),
    }.get(rule, rule)
    asked = [request for seed in (1, 2) for request in requests(seed) if "guide" in request]
    if rule == "relaxed":
        asked = [request for request in asked if "seed" not in request]
    with wrapped(mode, tiers=(0, 7), acceptance=made) as spec:
        spec.set_tier(7)
        for request, text in zip(asked, run(spec, asked), strict=True):
            assert_follows(text, request["guide"])


def test_relaxed_keeps_nothing_that_is_forbidden() -> None:
    """Not even where ``delta`` is wider than the greatest probability, or where there is nothing else."""
    scores = torch.full((1, 3, 4), float("-inf"))
    scores[0, 0, :2] = 0.0
    drafts = torch.tensor([[3, 0]])
    assert is_within_top(scores, drafts, torch.ones(1), 4).tolist() == [[False, False]]
    assert is_within_top(scores, torch.tensor([[1, 0]]), torch.ones(1), 4).tolist() == [[True, False]]
    assert first(scores, drafts).tolist() == [[False, False]]


def test_forced_texts_have_no_guide() -> None:
    """What is accepted whatever it is would leave it."""
    allowing = {"guide": regex_guide("(ac){12}", common()), "prefix_allowed_tokens_fn": lambda row, ids: [1]}
    with wrapped("ngram", tiers=(0, 7), acceptance=acceptance.Forced(3)) as spec:
        for name, value in allowing.items():
            options: dict[str, Any] = {"eos_token_id": [VOCAB - 1], name: value}
            reason = re.compile("'forced' accepts tokens that it forbids")
            with raises(InvalidOption, where="submit", name=name, reason=reason):
                spec.engine.submit([5, 6, 7, 8], **options)
        assert not len(spec.engine.waiting) and spec.engine.capacity().free_slots == spec.arena.layout.max_batch


# --- drafts that are cut -------------------------------------------------------------------------


@dataclass(frozen=True)
class Guided(ReadyMode):
    """Always drafts token ``PLAN[0]``, ``PLAN[1]``, ..."""

    name: ClassVar[str] = "guided"
    plan: tuple[int, ...] = ()

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, *own_state: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = torch.arange(draft_len, device=length.device)
        drafts = torch.zeros_like(offsets)
        for index, token in enumerate(self.plan):
            drafts = torch.where(offsets == index, token, drafts)
        return drafts.expand(length.shape[0], -1).contiguous(), torch.full_like(length, len(self.plan))

    def explain(self) -> str:
        return "the guided tokens"


def test_drafts_end_in_front_of_what_is_not_allowed() -> None:
    """And the step is as wide as what is left of them."""
    a, b = common().convert_tokens_to_ids(["a", "b"])
    asked: Request = {"ids": [9, 9], "max_new_tokens": 12, "eos_token_id": [EOS]}
    with wrapped("guided", tiers=(0, 3, 7), plan=(a, a, b, a, a, a, a)) as spec:
        spec.set_tier(7)
        guided = spec.engine.submit(**asked, guide=regex_guide("[ac]{20}", byte_level()), logit_bias={a: 50.0})
        spec.engine.step()
        assert spec.arena["draft_lens"][guided.slot] == 2
        spec.engine.step()
        assert spec.engine.tier.draft_len == 3, "the smallest that holds two"
        assert guided.stats.accepted_tokens == 2
        free = spec.engine.submit(**asked)
        while not free.new_tokens:
            spec.engine.step()
        assert spec.arena["draft_lens"][free.slot] == 7 and spec.arena["draft_lens"][guided.slot] == 2
        spec.engine.run()
        assert guided.new_tokens == [a] * 12


# --- what is wrong -------------------------------------------------------------------------------


def test_guides_that_do_not_fit_the_request_are_refused(specs: dict[str, Speculator]) -> None:
    engine = specs["ngram"].engine
    for wrong in ("a+", {"type": "null"}, [guides()["one"]], 5):
        with raises(InvalidOption, name="guide", reason=re.compile("it must be a Guide")):
            engine.submit([1], eos_token_id=[EOS], guide=wrong)
    with raises(InvalidOption, name="guide", reason=re.compile("neither the model nor the request has one")):
        engine.submit([1], eos_token_id=[], guide=guides()["one"])
    large = regex_guide("a", byte_level(*(f"<{index}>" for index in range(44))))
    with raises(InvalidOption, name="guide", reason=re.compile("its tokenizer has 301 tokens, and the model 300")):
        engine.submit([1], eos_token_id=[EOS], guide=large)
    assert engine.idle


@pytest.mark.parametrize("mode", MODES)
def test_a_guide_that_may_not_end_ends_its_request_alone(specs: dict[str, Speculator], mode: str) -> None:
    spec, prompt = specs[mode], [5, 6, 5, 6, 5]
    free: Request = {"ids": prompt, "max_new_tokens": 20, "do_sample": True, "seed": 2, "eos_token_id": []}
    expected = run(specs["none"], [free])[0]
    for draft_len in spec.engine.draft_lens:
        spec.set_tier(draft_len)
        other = spec.engine.submit(**free)
        stuck = spec.engine.submit(prompt, eos_token_id=[EOS], suppress_tokens=[EOS], guide=guides()["short"])
        with raises(RequestFailed, reason=re.compile("forbid every token")) as caught:
            stuck.result()
        assert isinstance(caught.value.__cause__, UndecidedLogits)
        assert guides()["short"].matches(stuck.new_tokens)
        assert other.result().token_ids == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_guide_that_fails_ends_its_request_alone(
    specs: dict[str, Speculator], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask may exceed llguidance's limits. Nothing is emitted without the guide afterwards."""
    spec, prompt = specs[mode], [5, 6, 5, 6, 5]
    free: Request = {"ids": prompt, "max_new_tokens": 20, "do_sample": True, "seed": 2, "eos_token_id": []}
    expected = run(specs["none"], [free])[0]
    real = GuideFollower._mask

    def failing(follower: GuideFollower) -> torch.Tensor:
        if follower._read > 4:
            raise follower._failed()
        return real(follower)

    monkeypatch.setattr(GuideFollower, "_mask", failing)
    for draft_len in spec.engine.draft_lens:
        spec.set_tier(draft_len)
        other = spec.engine.submit(**free)
        failed = spec.engine.submit(prompt, eos_token_id=[EOS], max_new_tokens=NEW, guide=guides()["free"])
        with raises(RequestFailed, reason=re.compile("cannot be followed")) as caught:
            failed.result()
        assert isinstance(caught.value.__cause__, InvalidGuide)
        assert failed.new_tokens and guides()["free"].matches(failed.new_tokens, whole=False)
        assert other.result().token_ids == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_complete_text_ends_before_the_least_number_of_tokens(specs: dict[str, Speculator], mode: str) -> None:
    """While another token may come, ``min_new_tokens`` forbids the end."""
    spec, prompt = specs[mode], [5, 6, 5, 6, 5]
    several = regex_guide("(ab){1,3}", common())
    for draft_len in spec.engine.draft_lens:
        spec.set_tier(draft_len)
        for drawn in ({}, {"do_sample": True, "seed": 3}):
            request = spec.engine.submit(
                prompt, eos_token_id=[EOS], min_new_tokens=10, guide=several, logit_bias={EOS: 50.0}, **drawn
            )
            *text, end = request.result().token_ids
            assert common().decode(text) == "ababab" and end == EOS and len(text) < 10


def test_several_eos_tokens(specs: dict[str, Speculator]) -> None:
    """One of them beyond the tokenizer, one an ordinary token of it."""
    ordinary, spec = common().convert_tokens_to_ids("c"), specs["random_drafts"]
    for draft_len in TIERS:
        spec.set_tier(draft_len)
        for eos in ([VOCAB - 1], [EOS, VOCAB - 1], [ordinary]):
            guide = regex_guide("(ab|b|bc){2,4}", common())
            bias = {token: 50.0 for token in eos}
            request = spec.engine.submit([3, 4], eos_token_id=eos, max_new_tokens=NEW, guide=guide, logit_bias=bias)
            text = request.result().token_ids
            assert request.finish_reason == "eos" and text[-1] in eos
            assert guide.matches(text[:-1]) and not set(text[:-1]) & set(eos)
