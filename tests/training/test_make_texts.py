"""The target writes training texts: what a text is, which ones are dropped, and that a killed run continues."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import speccompile
from speccompile.errors import InvalidInput, InvalidOption, NoTexts, TextsNotWritten
from speccompile.training import SavedTexts, TextOptions, make_texts, most_tokens, read_texts, text_maker, text_writer
from speccompile.utils import whole_files
from support.chats import END, ScriptedTarget, Write, chat_model, chat_tokenizer, short_turns
from support.errors import raises
from support.killed import killed
from support.tiny import greedy

TOKENIZER = chat_tokenizer()
OPTIONS = TextOptions(tokens=2000, max_user_tokens=20, max_answer_tokens=20)
OPENING, CLOSING = "<|user|>", "<|end|> <|assistant|>"


class Killed(BaseException):
    pass


def write(
    folder: Path, options: TextOptions = OPTIONS, target: ScriptedTarget | None = None, **changes: Any
) -> SavedTexts:
    spec: Any = ScriptedTarget(**changes) if target is None else target
    return make_texts(spec, TOKENIZER, folder, options, progress=False)


def decoded(texts: SavedTexts) -> list[str]:
    return [str(TOKENIZER.decode(text.input_ids.tolist())) for text in texts]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def lines(path: Path, *items: str) -> Path:
    path.write_text("\n".join(items))
    return path


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, each written again and again."""
    monkeypatch.setattr(text_writer, "FILE_TOKENS", 700)
    monkeypatch.setattr(text_maker, "SAVE_SECONDS", 0.0)


# --- what a text is ----------------------------------------------------------------------------


def test_a_real_target_writes_the_user_turn_and_greedily_its_own_answer(tmp_path: Path) -> None:
    model = chat_model()
    options = TextOptions(tokens=100, temperature=0, user_temperature=1.0, max_user_tokens=30, max_answer_tokens=10)
    assert most_tokens(TOKENIZER, options) == 43
    with speccompile.wrap(model, mode="none", tiers=(0,), backend="eager", max_batch=4, max_len=43) as spec:
        texts = make_texts(spec, TOKENIZER, tmp_path, options, progress=False)
        assert spec.engine.idle
    assert texts.tokens >= 100
    for text in texts:
        prompt, answer = text.input_ids[: text.answer_start].tolist(), text.input_ids[text.answer_start :].tolist()
        user = str(TOKENIZER.decode(prompt)).removeprefix(OPENING).removesuffix(CLOSING)
        assert prompt == TOKENIZER(f"{OPENING}{user}{CLOSING}")["input_ids"]
        expected = greedy(model, prompt, 10)
        end = expected.index(END) + 1 if END in expected else 10
        assert answer == expected[:end]


def test_a_text_is_a_user_turn_and_an_answer_in_the_template(tmp_path: Path) -> None:
    texts = write(tmp_path)
    assert texts.tokens >= OPTIONS.tokens and len(texts) > 50 and len(texts.files) > 2
    for text, shown in zip(texts, decoded(texts), strict=True):
        assert shown.startswith(OPENING) and shown.count("<|") == 4 and shown.endswith("<|end|>")
        assert TOKENIZER.decode(text.input_ids[: text.answer_start].tolist()).endswith(CLOSING)
        assert text.loss_mask.tolist() == [0] * text.answer_start + [1] * (len(text.input_ids) - text.answer_start)
    numbers = [text.number for text in texts]
    assert numbers == sorted(set(numbers))


def test_an_answer_that_is_too_long_ends_there_and_a_user_turn_drops_the_text(tmp_path: Path) -> None:
    texts = write(tmp_path, TextOptions(tokens=500, max_user_tokens=8, max_answer_tokens=6))
    assert texts.dropped["long"] > 5
    assert max(text.answer_start for text in texts) == 1 + 7 + 2
    lengths = {len(text.input_ids) - text.answer_start for text in texts}
    assert max(lengths) == 6 and any(text.input_ids[-1] != END for text in texts)


def test_the_seed_changes_all_texts_and_slots_and_the_order_of_ends_none(tmp_path: Path) -> None:
    first = decoded(write(tmp_path / "a"))
    assert first == decoded(write(tmp_path / "b", slots=7, order=3))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    other = TextOptions(tokens=2000, max_user_tokens=20, max_answer_tokens=20, seed=1)
    assert not set(first) & set(decoded(write(tmp_path / "c", other)))


def test_prompts_of_files_come_first_and_then_drawn_turns_if_wanted(tmp_path: Path) -> None:
    path = lines(tmp_path / "prompts.txt", "a b c", "", "d e f")
    only = write(tmp_path / "only", TextOptions(prompts=path, max_user_tokens=20, max_answer_tokens=20))
    assert [shown.split("<|end|>")[0] for shown in decoded(only)] == [f"{OPENING} a b c ", f"{OPENING} d e f "]
    more = TextOptions(tokens=500, prompts=[path], draw=True, max_user_tokens=20, max_answer_tokens=20)
    both = decoded(write(tmp_path / "both", more))
    assert both[:2] == decoded(only) and len(both) > 10


def test_every_second_drawn_turn_continues_a_beginning(tmp_path: Path) -> None:
    path = lines(tmp_path / "beginnings.txt", "x y", "z")
    options = TextOptions(tokens=1000, beginnings=path, max_user_tokens=20, max_answer_tokens=20)
    texts = write(tmp_path / "texts", options)
    begun = {text.number: shown for text, shown in zip(texts, decoded(texts), strict=True) if text.number % 2}
    assert len(begun) > 10
    for number, shown in begun.items():
        assert shown.startswith(f"{OPENING} x y" if number // 2 % 2 == 0 else f"{OPENING} z")
    tight = TextOptions(beginnings=path, max_user_tokens=2, max_answer_tokens=20)
    with raises(InvalidInput):
        write(tmp_path / "tight", tight)


def test_a_template_whose_turns_end_with_text_stops_at_that(tmp_path: Path) -> None:
    """The stand-in does not know stop strings: it ends by itself after one."""
    tokenizer = chat_tokenizer("{% for m in messages %}<|user|>{{ m['content'] }} ! {% endfor %}")

    def turns(prompt: Sequence[int], seed: int | None) -> list[int]:
        return [*short_turns(prompt, seed)[:-1], *tokenizer("! a")["input_ids"], END]

    spec: Any = ScriptedTarget(turns)
    spec.generation_config.eos_token_id = END
    texts = make_texts(spec, tokenizer, tmp_path, OPTIONS, progress=False)
    prompts = [str(tokenizer.decode(text.input_ids[: text.answer_start].tolist())) for text in texts]
    assert all(prompt.count("!") == 1 and prompt.endswith(" !") for prompt in prompts)


# --- which texts are dropped -------------------------------------------------------------------


def prompted(tmp_path: Path, *prompts: str, write_with: Write = short_turns, **options: Any) -> SavedTexts:
    path = lines(tmp_path / "prompts.jsonl", *(json.dumps({"prompt": prompt}) for prompt in prompts))
    wanted = TextOptions(prompts=path, max_user_tokens=40, max_answer_tokens=40, **options)
    return write(tmp_path / "texts", wanted, ScriptedTarget(write_with, max_len=100))


def test_a_user_turn_is_kept_once_whatever_its_case_and_punctuation(tmp_path: Path) -> None:
    texts = prompted(tmp_path, "a b c", "a b c d", " a , b c !", "a b c", "a b", "  , . ")
    assert [text.number for text in texts] == [0, 1, 4]
    assert dict(texts.dropped) == {"duplicate": 2, "empty": 1}


def test_a_duplicate_of_a_text_that_was_dropped_is_kept(tmp_path: Path) -> None:
    def first_empty(prompt: Sequence[int], seed: int | None) -> list[int]:
        return [END] if len(prompt) == 6 else short_turns(prompt, seed)

    texts = prompted(tmp_path, "a b c", "a b c !", write_with=first_empty)
    assert [text.number for text in texts] == [1] and dict(texts.dropped) == {"empty": 1}


def test_turns_that_repeat_themselves_are_dropped(tmp_path: Path) -> None:
    def loops(prompt: Sequence[int], seed: int | None) -> list[int]:
        return [5, 6, 7] * 13 + [END] if len(prompt) % 2 else short_turns(prompt, seed)

    texts = prompted(tmp_path, "a b c", "a b c d", write_with=loops)
    assert [text.number for text in texts] == [0] and dict(texts.dropped) == {"repetition": 1}


def test_texts_that_overlap_with_an_excluded_file_are_dropped(tmp_path: Path) -> None:
    long = "a b c d e f g h i j k l m n o p"
    turns = [{"turns": [long, "q r"]}, {"turns": ["s t u v w x"]}]
    path = lines(tmp_path / "excluded.jsonl", *map(json.dumps, turns))

    def quotes(prompt: Sequence[int], seed: int | None) -> list[int]:
        return TOKENIZER(f"z z {long} z <|end|>")["input_ids"] if len(prompt) == 4 else short_turns(prompt, seed)

    whole = ["z b c d e f g h i j k l m n z", "z z a b c d e f g h i j k l m z", "q r !", "a q r", "z s t u , v w x"]
    texts = prompted(tmp_path, *whole, "z", write_with=quotes, exclude=path)
    assert [text.number for text in texts] == [3] and dict(texts.dropped) == {"excluded": 5}


def test_a_target_whose_turns_are_all_dropped_is_no_endless_run(tmp_path: Path) -> None:
    target = ScriptedTarget(lambda prompt, seed: [5] * 40)
    with raises(NoTexts, count=text_maker.MOST_DROPPED, reasons="256 long"):
        write(tmp_path, OPTIONS, target)
    assert all(request.finished or request.cancelled for request in target.requests)


# --- killed and continued ----------------------------------------------------------------------


def dies_after(steps: int, target: ScriptedTarget) -> Callable[[], None]:
    step = target.step

    def stepping() -> None:
        if target.steps == steps:
            raise Killed
        step()

    return stepping


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_stops_anywhere_continues_to_the_same_bytes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole")
    draw = random.Random(seed)
    for order in range(100):
        target = ScriptedTarget(slots=draw.randint(1, 8), order=order)
        monkeypatch.setattr(target, "step", dies_after(draw.randint(0, 60), target))
        # Saved at each step, or only at the end.
        monkeypatch.setattr(text_maker, "SAVE_SECONDS", draw.choice([0.0, 1000.0]))
        try:
            write(tmp_path / "parts", OPTIONS, target)
        except Killed:
            continue
        break
    assert order > 2 and files(tmp_path / "whole") == files(tmp_path / "parts")


def test_counts_of_dropped_texts_do_not_depend_on_the_order_of_ends(tmp_path: Path) -> None:
    """Duplicates whose answers are dropped for another reason."""

    def few(prompt: Sequence[int], seed: int | None) -> list[int]:
        draw = random.Random(f"{seed}")
        if len(prompt) == 1:
            return [draw.randrange(3, 15), END]
        return [5, 6] * 20 if draw.random() < 0.3 else short_turns(prompt, seed)

    wanted = TextOptions(prompts=(), tokens=100, max_user_tokens=20, max_answer_tokens=40)
    for order in range(8):
        write(tmp_path / str(order), wanted, ScriptedTarget(few, max_len=100, order=order, slots=8))
    assert all(files(tmp_path / str(order)) == files(tmp_path / "0") for order in range(8))
    dropped = read_texts(tmp_path / "0").dropped
    assert dropped["duplicate"] > 3 and dropped["repetition"] > 1


def test_a_killed_process_continues_to_the_same_bytes(tmp_path: Path) -> None:
    options = TextOptions(tokens=5000, max_user_tokens=20, max_answer_tokens=20)

    def reported(folder: Path, pipe: int) -> None:
        target = ScriptedTarget()
        step = target.step

        def stepping() -> None:
            if any(folder.glob("*.npz")):
                os.write(pipe, b".")
            time.sleep(0.005)
            step()

        target.step = stepping  # type: ignore[method-assign]
        write(folder, options, target)

    for seconds in (0.05, 0.2):
        killed(reported, tmp_path / "parts", seconds)
    assert read_texts(tmp_path / "parts").tokens < options.tokens
    write(tmp_path / "parts", options)
    write(tmp_path / "whole", options)
    assert files(tmp_path / "whole") == files(tmp_path / "parts")


def test_more_tokens_extend_a_folder_and_as_many_leave_it(tmp_path: Path) -> None:
    write(tmp_path / "parts", TextOptions(tokens=1000, max_user_tokens=20, max_answer_tokens=20))
    write(tmp_path / "parts")
    before = files(tmp_path / "parts")
    target = ScriptedTarget()
    write(tmp_path / "parts", OPTIONS, target)
    write(tmp_path / "whole")
    assert before == files(tmp_path / "parts") == files(tmp_path / "whole") and not target.requests


@pytest.mark.parametrize("changes", [{"seed": 1}, {"temperature": 0.5}, {"max_answer_tokens": 30}])
def test_a_folder_of_other_options_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path)
    before = files(tmp_path)
    other = TextOptions(**{"tokens": 3000, "max_user_tokens": 20, "max_answer_tokens": 20} | changes)
    reason = re.compile(f"were written with {next(iter(changes))} ")
    with raises(InvalidInput, name=f"the folder {tmp_path}", reason=reason):
        write(tmp_path, other)
    assert files(tmp_path) == before


def test_a_folder_of_another_target_or_another_process_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    target = ScriptedTarget()
    target.target_id = "Other"
    with raises(InvalidInput, reason=re.compile("by the target Scripted, and this is Other")):
        write(tmp_path, OPTIONS, target)
    source = read_texts(tmp_path).source
    with text_writer.TextWriter(tmp_path, source), raises(InvalidInput, reason=re.compile("another process")):
        write(tmp_path)


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "parts", TextOptions(tokens=1000, max_user_tokens=20, max_answer_tokens=20))
    before = files(tmp_path / "parts")
    with monkeypatch.context() as full:
        full.setattr(whole_files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        with raises(TextsNotWritten, folder=str(tmp_path / "parts")):
            write(tmp_path / "parts")
    assert files(tmp_path / "parts") == before
    write(tmp_path / "parts")
    write(tmp_path / "whole")
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


# --- arguments ---------------------------------------------------------------------------------


def test_a_tokenizer_without_a_usable_template_is_refused(tmp_path: Path) -> None:
    spec: Any = ScriptedTarget()
    for template in (None, "{{ messages[-1]['content'] | lower }}", "{{ messages[-1]['content'] }}"):
        with raises(InvalidInput):
            make_texts(spec, chat_tokenizer(template), tmp_path / "texts", OPTIONS)
    assert not (tmp_path / "texts").exists()


def test_a_speculator_that_cannot_hold_the_texts_is_refused(tmp_path: Path) -> None:
    with raises(InvalidOption, name="max_len", value=42):
        write(tmp_path, OPTIONS, max_len=42)
    write(tmp_path, OPTIONS, max_len=43)


def test_a_vocabulary_of_more_than_65536_is_kept(tmp_path: Path) -> None:
    spec: Any = ScriptedTarget(lambda prompt, seed: [*short_turns(prompt, seed)[:-1], 70_000, END], vocab=70_001)
    tokenizer = chat_tokenizer()
    texts = make_texts(spec, tokenizer, tmp_path, OPTIONS, progress=False)
    assert all(text.input_ids[-2] == 70_000 and text.input_ids.dtype == torch.int64 for text in texts)
