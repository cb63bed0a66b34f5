"""Methods of ``speccompile bench``: names, heads, compositions and drafters by import path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from speccompile.bench.method_names import read_methods
from speccompile.bench.methods import resolve_methods
from speccompile.errors import InvalidOption, UnknownMode
from speccompile.modes import registry
from support.errors import raises

DRAFTERS = """
from torch import nn

from speccompile.modes.ngram import NGram


class Mine(NGram):
    name = "mine"


class Needs(NGram):
    def __init__(self, size): ...


def on_host(tokens, draft_len):
    return tokens[-draft_len:]


class Callable:
    def __call__(self, tokens, draft_len):
        return None


class Network(nn.Module):
    def forward(self, tokens, length, draft_len): ...


def wrong(tokens): ...


number = 3
"""


@pytest.fixture(autouse=True)
def drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_drafters_of_bench.py").write_text(DRAFTERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_modes", dict(registry._modes))
    yield


def resolved(*texts: str, **options: object) -> list[tuple[str, object, dict[str, object]]]:
    return [(each.name, each.mode, dict(each.options)) for each in resolve_methods(read_methods(texts), options)]


def test_a_method_is_a_mode_with_its_options() -> None:
    expected = [("ngram", "ngram", {"max_ngram": 5}), ("suffix+ngram", ["suffix", "ngram"], {"max_ngram": 5})]
    assert resolved("ngram", "suffix+ngram", max_ngram=5) == expected


def test_a_head_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a head"
    ((name, mode, options),) = resolved(f"suffix+eagle3_one_model={folder}")
    assert (name, mode) == ("suffix+eagle3_one_model=a head", ["suffix", "eagle3_one_model"])
    assert options == {"draft": str(folder)}


def test_a_class_of_a_mode_is_registered_by_its_path() -> None:
    path = "own_drafters_of_bench:Mine"
    assert resolved(path) == [(path, path, {})]
    assert registry.create(path, {"max_ngram": 2}).max_ngram == 2  # type: ignore[union-attr]
    assert resolved(f"suffix+{path}") == [(f"suffix+{path}", ["suffix", path], {})]


@pytest.mark.parametrize(("name", "host"), [("on_host", True), ("Callable", True), ("Network", False)])
def test_a_callable_is_the_users_drafter(name: str, host: bool) -> None:
    ((_, mode, options),) = resolved(f"own_drafters_of_bench:{name}")
    assert mode == "user_provided" and options["host"] is host
    assert callable(options["draft"]) and not getattr(options["draft"], "training", False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("own_drafters_of_bench:wrong", r"draft\(tokens, draft_len\) on the host"),
        ("own_drafters_of_bench:number", r"draft\(tokens, draft_len\) on the host"),
        ("own_drafters_of_bench:Needs", "its mode cannot be created"),
        ("own_drafters_of_bench:Missing", "cannot be imported"),
        ("no_such_module:Mine", "the current folder is searched, too"),
        ("ngram=folder", "its mode loads neither a head nor a draft model"),
        ("ngram=", "write it as MODE"),
        ("ngram+", "write it as MODE"),
        ("none", "a run always has the line K=0"),
    ],
)
def test_a_method_that_cannot_run_is_refused(text: str, reason: str) -> None:
    with raises(InvalidOption, name="--method", value=text, reason=re.compile(reason)):
        resolved(text)


def test_a_name_that_does_not_exist_is_refused() -> None:
    with raises(UnknownMode, name="telepathy"):
        resolved("telepathy")
    with raises(InvalidOption, name="--method", value="ngram", reason=re.compile("two methods have the name 'ngram'")):
        read_methods(["ngram", "suffix", "ngram"])


def test_an_option_that_no_method_has_is_refused() -> None:
    assert resolved("ngram", "suffix", max_depth=3)[0][2] == {}
    with raises(InvalidOption, name="--option", value="max_dept=3"):
        resolved("ngram", "suffix", max_dept=3)
