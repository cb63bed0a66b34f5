"""Saved hidden states are those that transformers computes of the text, whatever drafted, read or ran beside it."""

from __future__ import annotations

import copy
import itertools
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, wrap
from speccompile.errors import Closed, InvalidInput, InvalidOption, RecordsNotWritten, RequestFailed
from speccompile.heads import Eagle3Head
from speccompile.hidden_states import Record, SavedHiddenStates, SaveHiddenStates
from speccompile.hidden_states.records import about
from speccompile.hidden_states.writer import RecordWriter
from speccompile.runtime.request import Request
from speccompile.runtime.saver import Saver
from support.errors import raises
from support.killed import killed
from support.saved_states import LAYERS, wrapped
from support.tiny import greedy, random_prompt, tiny_llama

NEW = 12
#: In forked processes, where each one is of seconds.
KILLS = int(os.environ.get("SPECCOMPILE_KILLS", "4"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    model = tiny_llama(layers=3)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    return model


class Scripted:
    """Drafts the text that is coming for as long as chance has it, and then something else."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.chance = random.Random(0)
        self.texts: list[list[int]] = []

    def __call__(self, tokens: list[int], draft_len: int) -> list[int]:
        coming = [text for text in self.texts if text[: len(tokens)] == tokens]
        if not coming:
            self.texts.append(tokens + greedy(self.model, tokens, NEW + 8))
            coming = self.texts[-1:]
        right = self.chance.randrange(draft_len + 1)
        drafts = coming[0][len(tokens) :][:right]
        return [*drafts, *[self.chance.randrange(128) for _ in range(draft_len - len(drafts))]]


@pytest.fixture(scope="module")
def scripted(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculator]:
    """Some drafts of each step are right and others are not."""
    folder = tmp_path_factory.mktemp("scripted")
    with wrapped(model, folder, "user_provided", draft=Scripted(model), host=True, prefill_budget=8) as spec:
        yield spec


def assert_right(model: LlamaForCausalLM, record: Record, text: list[int], layers: tuple[int, ...] = LAYERS) -> None:
    """All of ``text`` but its last token, which was not read."""
    assert record.input_ids.tolist() == text[:-1]
    with torch.no_grad():
        states = model(record.input_ids[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(record.hidden_state, states[-1][0], rtol=1e-5, atol=1e-5)
    wanted = torch.cat([states[layer + 1 if layer >= 0 else -1][0] for layer in layers], dim=-1)
    torch.testing.assert_close(record.aux_hidden_state, wanted, rtol=1e-5, atol=1e-5)


def saved(spec: Speculator, id: str) -> Record:
    spec.hidden_states.flush()
    return SavedHiddenStates(spec.hidden_states.folder)[id]


# --- while speculating ---------------------------------------------------------------------------


def test_a_ragged_batch_while_tiers_change(model: LlamaForCausalLM, scripted: Speculator) -> None:
    chance = random.Random(1)
    prompts = [random_prompt(length, length) for length in (1, 3, 9, 40, 23, 2, 17)]
    requests = [
        scripted.engine.submit(prompt, max_new_tokens=chance.randrange(1, NEW), record=f"ragged {index}")
        for index, prompt in enumerate(prompts)
    ]
    stats = scripted.stats
    accepted, drafts = stats.accepted_tokens, stats.draft_tokens
    while not all(request.finished for request in requests):
        scripted.set_tier(chance.choice((0, 1, 4, 4)))
        scripted.engine.step()
    scripted.set_tier(4)
    # Drafts were accepted, and others rejected, so that rows of both kinds were there.
    assert 0 < stats.accepted_tokens - accepted < stats.draft_tokens - drafts
    for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        text = prompt + request.result().token_ids
        record = saved(scripted, f"ragged {index}")
        assert_right(model, record, text)
        assert record.loss_mask.tolist() == ([0] * len(prompt) + [1] * len(request.new_tokens))[:-1]


def test_a_known_beginning(model: LlamaForCausalLM, scripted: Speculator) -> None:
    """Its rows are those of the text that it was known from: a copy, or in place."""
    prompt = random_prompt(30, 99)
    first = scripted.engine.submit(prompt, max_new_tokens=8, record="first")
    text = prompt + first.result().token_ids
    for name, again in {"on": [*text, 5, 6], "copy": [*text[:25], 7], "whole": text[:-1]}.items():
        request = scripted.engine.submit(again, max_new_tokens=4, record=name)
        assert request.result().stats.reused_tokens > 20
        assert_right(model, saved(scripted, name), again + request.new_tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "seed": 3, "temperature": 1.5},
        {"prompt_logprobs": True},
        {"num_draft_tokens": 0},
        {"stopping_criteria": lambda ids, _: torch.tensor([ids.shape[1] >= 18])},
    ],
    ids=["drawn", "prompt scored", "no drafts", "stopped among accepted drafts"],
)
def test_all_kinds_of_steps(model: LlamaForCausalLM, scripted: Speculator, options: dict[str, Any]) -> None:
    prompt = random_prompt(14, 5)
    request = scripted.engine.submit(prompt, max_new_tokens=NEW, record=repr(options), **options)
    assert_right(model, saved_after(scripted, request, repr(options)), prompt + request.new_tokens)


def saved_after(spec: Speculator, request: Any, id: str) -> Record:
    request.result()
    return saved(spec, id)


@pytest.mark.parametrize("layers", [(-1,), (0, -1)], ids=str)
def test_a_text_of_one_position(model: LlamaForCausalLM, tmp_path: Path, layers: tuple[int, ...]) -> None:
    """Of which the final states are all that was kept, or lie in it as they are written."""
    saves = SaveHiddenStates(tmp_path, write_interval=1, eagle3_layers_to_capture=layers)
    with wrap(model, "none", max_batch=2, max_len=32, backend="eager", save_hidden_states=saves) as spec:
        beside = spec.engine.submit(random_prompt(5, 1), max_new_tokens=8)
        spec.engine.submit([5], max_new_tokens=1).result()
        beside.result()
        assert len(beside.new_tokens) == 8
        spec.engine.submit([6], max_new_tokens=1).result()
        assert spec.engine.capacity().free_slots == 2
    assert sorted(len(record.input_ids) for record in SavedHiddenStates(tmp_path).values()) == [1, 1, 12]


def test_a_wrap_that_is_dropped_writes_the_records_that_wait(model: LlamaForCausalLM, tmp_path: Path) -> None:
    saves = SaveHiddenStates(tmp_path, 20, eagle3_layers_to_capture=(-1,))
    spec = wrap(model, "none", max_batch=1, max_len=32, backend="eager", save_hidden_states=saves)
    spec.generate(torch.tensor([[5, 3, 9]]), max_new_tokens=2)
    assert not SavedHiddenStates(tmp_path)
    del spec
    assert len(SavedHiddenStates(tmp_path)) == 1


def test_requests_that_end_by_themselves_are_saved(scripted: Speculator) -> None:
    """Each that ends by itself, unless it says no; under its own id or a number."""
    engine, writer = scripted.engine, scripted.hidden_states
    writer.flush()
    before, prompt = writer.written, random_prompt(6, 7)
    engine.submit(prompt, max_new_tokens=2, record=False).result()
    cancelled = engine.submit(prompt, max_new_tokens=50, record="cancelled")
    while len(cancelled.new_tokens) < 3:
        engine.step()
    cancelled.cancel()
    failing = engine.submit(prompt, max_new_tokens=9, record="failed", stopping_criteria=lambda *_: 1 / 0)
    with pytest.raises(RequestFailed):
        failing.result()
    ids = torch.tensor([prompt])
    scripted.generate(ids, torch.ones_like(ids), max_new_tokens=2, record=False)
    scripted.check([prompt], max_new_tokens=2)
    writer.flush()
    assert writer.written == before
    # Those two ids are free again.
    for name in ("cancelled", "failed"):
        engine.submit(prompt, max_new_tokens=2, record=name).result()
    with raises(InvalidOption, name="record", reason=re.compile("a record with that id is in")):
        engine.submit(prompt, max_new_tokens=2, record="failed")
    scripted.generate(ids.repeat(2, 1), torch.ones(2, 6), max_new_tokens=2)
    writer.flush()
    new = writer.written - before
    assert new > {"cancelled", "failed"} and len(new) == 4
    assert all(id.startswith("data-") for id in new - {"cancelled", "failed"})
    for wrong in ("", 7, None):
        with raises(InvalidOption, name="record"):
            engine.submit(prompt, record=wrong)  # type: ignore[arg-type]


def test_beside_a_head_of_other_layers(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Its taps are its own. Prompts are read along with steps here, and the final norm is among the layers."""
    head = Eagle3Head.random(model, taps=(0, 1, 1))
    layers = SaveHiddenStates(tmp_path, eagle3_layers_to_capture={-1, 1})
    sizes: dict[str, Any] = {"tiers": (0, 2), "max_batch": 2, "max_len": 63, "backend": "eager", "policy": "fixed:2"}
    with wrap(model, "eagle3_one_model", draft=head, save_hidden_states=layers, **sizes) as spec:
        first = spec.engine.submit(random_prompt(5), max_new_tokens=30, record="first")
        while len(first.new_tokens) < 3:
            spec.engine.step()
        along = spec.engine.submit(random_prompt(26, 1), max_new_tokens=8, record="along")
        spec.engine.run()
        assert spec.engine.mixed_tiers
        for request, id in ((first, "first"), (along, "along")):
            assert request.new_tokens == greedy(model, request.prompt, len(request.new_tokens))
            assert_right(model, saved(spec, id), request.prompt + request.new_tokens, (1, -1))


def test_trees(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Of a drafter whose second choices are right now and then."""
    like = copy.deepcopy(model)
    with torch.no_grad():
        for index, weight in enumerate(like.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
            weight.add_(noise, alpha=0.1 * float(weight.std(correction=0)))
    shapes = (Tree.dynamic(nodes=8, depth=3, branches=3), Tree.static([(0,), (1,), (0, 0), (1, 0)]))
    with wrapped(
        model, tmp_path, "draft_target", draft=like, tiers=(0, *shapes), policy="fixed:0", max_batch=1
    ) as spec:
        for drawn in (False, True):
            for shape in shapes:
                prompt, id = random_prompt(11, int(shape)), f"{shape} {drawn}"
                spec.set_tier(shape)
                spec.stats.reset()
                request = spec.engine.submit(prompt, max_new_tokens=20, record=id, do_sample=drawn, seed=2)
                record = saved_after(spec, request, id)
                assert_right(model, record, prompt + request.new_tokens)
                assert spec.stats.acceptance_length > 1.1


def test_steps_of_one_shape(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with wrapped(model, tmp_path, "ngram", tiers=(0, 2), policy="fixed:2", deterministic=True) as spec:
        prompt = random_prompt(8) * 2
        request = spec.engine.submit(prompt, max_new_tokens=NEW, record="one")
        assert_right(model, saved_after(spec, request, "one"), prompt + request.new_tokens)


# --- many texts ----------------------------------------------------------------------------------


def saving(model: LlamaForCausalLM, folder: Path) -> Speculator:
    """One that drafts nothing."""
    return wrap(
        model,
        "save_hidden_states",
        output_directory=folder,
        tiers=(0,),
        max_batch=2,
        max_len=63,
        backend="eager",
        write_interval=2,
        eagle3_layers_to_capture=LAYERS,
    )


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculator]:
    with saving(model, tmp_path_factory.mktemp("plain")) as spec:
        yield spec


def writes_to(spec: Speculator, model: LlamaForCausalLM, folder: Path) -> RecordWriter:
    """From here on ``spec`` does."""
    options = SaveHiddenStates(folder, 2, eagle3_layers_to_capture=LAYERS)
    saver = spec.engine.saver
    assert saver is not None
    saver.writer = RecordWriter(options, about(model, options))
    return saver.writer


def test_given_texts_with_their_masks(model: LlamaForCausalLM, plain: Speculator) -> None:
    texts = [random_prompt(length, length) for length in (4, 50, 11)]
    masks = [[0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2) for text in texts]
    plain.save_hidden_states(texts, ids=["a", "b", "c"], loss_masks=masks, progress=False)
    for id, text, mask in zip("abc", texts, masks, strict=True):
        record = saved(plain, id)
        assert_right(model, record, [*text, 0])
        assert record.loss_mask.tolist() == mask
    # They are there, and nothing runs.
    passes = plain.stats.prefill_tokens
    plain.save_hidden_states(texts, ids=["a", "b", "c"], progress=False)
    assert plain.stats.prefill_tokens == passes


def test_what_the_model_writes(model: LlamaForCausalLM, plain: Speculator) -> None:
    before, text = plain.hidden_states.written, random_prompt(7, 70)
    plain.save_hidden_states([text, text], max_new_tokens=5, progress=False)
    (id,) = plain.hidden_states.written - before
    record = saved(plain, id)
    assert_right(model, record, text + greedy(model, text, 5))
    assert record.loss_mask.tolist() == [0] * 7 + [1] * 4


def test_a_text_that_is_refused_may_come_again(plain: Speculator, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_prompt(7, 77)
    with monkeypatch.context() as patch:
        patch.setattr(plain.engine.loop, "enqueue", Mock(side_effect=Closed()))
        with pytest.raises(Closed):
            plain.save_hidden_states([text], ids=["again"], progress=False)
    plain.save_hidden_states([text], ids=["again"], progress=False)
    assert "again" in plain.hidden_states.written


def test_an_interrupt_while_a_text_is_queued_leaves_no_request(
    plain: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would save the text a second time."""
    text, turns = random_prompt(7, 78), plain.engine.loop
    enqueue = turns.enqueue

    def interrupted(requests: list[Request]) -> None:
        enqueue(requests)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turns, "enqueue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plain.save_hidden_states([text], ids=["interrupted"], progress=False)
    assert plain.engine.idle and "interrupted" not in plain.hidden_states.written
    plain.save_hidden_states([text], ids=["interrupted"], progress=False)
    assert "interrupted" in plain.hidden_states.written


def test_a_record_that_cannot_be_made(
    model: LlamaForCausalLM, plain: Speculator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is there, its slot goes to others, and that no record comes is reported."""
    own = plain.engine.saver.writer  # type: ignore[union-attr]
    text = random_prompt(7, 78)
    try:
        writer = writes_to(plain, model, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(Saver, "_record", Mock(side_effect=MemoryError("no memory")))
            # One more than there are slots.
            requests = [plain.engine.submit(text, max_new_tokens=3, record=name) for name in "abc"]
            assert [request.result().token_ids for request in requests] == [greedy(model, text, 3)] * 3
        with raises(RecordsNotWritten, reason=re.compile("no memory")):
            writer.close()
    finally:
        plain.engine.saver.writer = own  # type: ignore[union-attr]


def test_wrong_collections(plain: Speculator) -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("ids", ["a"], "each of the 2 texts"),
        ("ids", ["a", "a"], "twice"),
        ("loss_masks", [[1]], "each of the 2 texts"),
        ("loss_masks", [[1], [2]], "text 1"),
    ]
    for name, value, reason in wrong:
        with raises(InvalidInput, name=name, reason=re.compile(reason)):
            plain.save_hidden_states([[5], [6]], **{name: value})


def test_killed_and_started_again(model: LlamaForCausalLM, plain: Speculator, tmp_path: Path) -> None:
    """The whole of it: texts are read, saved and reported, killed at some moment, and gone on with."""
    texts = [random_prompt(40, seed) for seed in range(120)]

    def child(folder: Path, pipe: int) -> None:
        # One of its own: two processes may not write for one speculator.
        spec, reported = saving(model, folder), frozenset[str]()
        writer = spec.engine.saver.writer  # type: ignore[union-attr]
        # Until it is killed, however fast the machine is; its first word is that five are there, however slow.
        for text in itertools.cycle(range(0, len(texts), 5)):
            spec.save_hidden_states(texts[text : text + 5], progress=False)
            if new := writer.written - reported:
                os.write(pipe, "".join(f"\n{id}\n" for id in new).encode())
            reported = writer.written

    chance, reported = random.Random(0), set()
    for _ in range(KILLS):
        reported |= killed(child, tmp_path, chance.uniform(0, 0.5))
        assert reported <= set(SavedHiddenStates(tmp_path))
    assert reported
    own = plain.engine.saver.writer  # type: ignore[union-attr]
    try:
        writer = writes_to(plain, model, tmp_path)
        plain.save_hidden_states(texts[:40], progress=False)
        writer.close()
    finally:
        plain.engine.saver.writer = own  # type: ignore[union-attr]
    found = SavedHiddenStates(tmp_path)
    assert len(found) >= 40
    by_text = {tuple(record.input_ids.tolist()): record for record in found.values()}
    for text in texts[:40]:
        assert_right(model, by_text[tuple(text)], [*text, 0])
