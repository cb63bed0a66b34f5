"""Traces with tokens: what a step drafted and emitted, as columns."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from speccompile import Speculator, Tree, wrap
from speccompile.errors import InvalidOption, InvalidTrace
from speccompile.runtime.request import Request
from speccompile.runtime.trace_reader import read_trace
from speccompile.tools.policy_lab.texts import texts_of
from speccompile.traces import TokenTrace, read_token_trace
from support.errors import raises
from support.tiny import tiny_llama

VOCAB = 128
#: Bytes of an emitted token in the file, at most; prompts not counted.
MOST_BYTES = 200


@pytest.fixture(scope="module")
def spec() -> Iterator[Speculator]:
    model = tiny_llama(vocab=VOCAB)
    shared = {"tiers": (0, 3), "max_len": 160, "backend": "eager", "max_batch": 2, "policy": "fixed:3"}
    with wrap(model, "early_exit", exit_layer=1, scores=True, prefix_reuse=False, **shared) as spec:
        yield spec


def prompts() -> list[list[int]]:
    return [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]


def decode(spec: Speculator, path: Path, **options: object) -> tuple[TokenTrace, list[Request]]:
    """Two requests side by side, recorded."""
    top = options.pop("top", None)
    with spec.record_trace(path, tokens=True, top=top):  # type: ignore[arg-type]
        requests = [
            spec.engine.submit(ids, max_new_tokens=30, top_logprobs=4, seed=1, **options)  # type: ignore[arg-type]
            for ids in prompts()
        ]
        for request in requests:
            request.result()
    return read_token_trace(path), requests


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9}])
def test_columns_are_those_of_the_requests(spec: Speculator, tmp_path: Path, options: dict[str, object]) -> None:
    trace, requests = decode(spec, tmp_path / "t.jsonl", **options)
    tokens, steps = trace.tokens, trace.steps
    for traced, request, ids in zip(trace.requests, requests, prompts(), strict=True):
        result = request.result()
        assert list(traced.prompt) == ids and list(traced.tokens) == result.token_ids
        # The second prompt is read along with a step, which emits its first token.
        begin = traced.before_steps
        assert (traced.max_new_tokens, traced.greedy) == (30, not options) and begin in (0, 1)
        own = tokens["request"] == traced.number
        assert tokens["token"][own].tolist() == result.token_ids[begin:]
        assert tokens["index"][own].tolist() == list(range(begin, 30))
        drafted = [by is not None for by in request.drafted_by[begin:]]
        assert tokens["accepted"][own].tolist() == drafted
        assert tokens["drafter"][own].tolist() == [0 if by else -1 for by in drafted]
        assert result.top_logprobs is not None
        for row, top in zip(np.flatnonzero(own), result.top_logprobs[begin:], strict=True):
            assert tokens["top_tokens"][row].tolist() == [token for token, _ in top]
            assert np.allclose(tokens["top_logprobs"][row], [value for _, value in top], atol=4e-3)
        own = steps["request"] == traced.number
        assert steps["accepted"][own].sum() == result.stats.accepted_tokens
        assert steps["proposed"][own].sum() == result.stats.draft_tokens
        assert steps["context"][own][0] == len(ids) + begin
    assert (tokens["step"][1:] >= tokens["step"][:-1]).all() and set(steps["rows"]) <= {1, 2}
    assert trace.drafters == ("early_exit",) and trace.draft_lens == (0, 3) and trace.vocab_size == VOCAB


def test_entropy_is_that_of_the_targets_distribution(spec: Speculator, tmp_path: Path) -> None:
    trace, requests = decode(spec, tmp_path / "t.jsonl", output_logits=True)
    logits = requests[0].result().logits
    assert logits is not None
    logprobs = logits[1:].log_softmax(-1)
    own = trace.tokens["request"] == trace.requests[0].number
    assert np.allclose(trace.tokens["entropy"][own], -(logprobs.exp() * logprobs).sum(-1), atol=4e-3)


def test_drafts_are_known_also_if_they_were_rejected(spec: Speculator, tmp_path: Path) -> None:
    trace, _ = decode(spec, tmp_path / "t.jsonl")
    drafts, steps, tokens = trace.drafts, trace.steps, trace.tokens
    assert len(drafts["step"]) == steps["proposed"].sum() and (drafts["token"] >= 0).all()
    assert drafts["accepted"].sum() == steps["accepted"].sum() and not drafts["accepted"].all()
    # After the accepted drafts the target emitted another token than the next draft.
    for step in np.flatnonzero(steps["accepted"] < steps["proposed"]):
        accepted = steps["accepted"][step]
        refused = (drafts["step"] == step) & (drafts["position"] == accepted)
        last = tokens["token"][tokens["step"] == step][accepted]
        assert drafts["token"][refused][0] != last
    # An early exit's drafts are a function of the tokens: without a trace they are the same.
    assert np.isnan(drafts["score"]).all()


def test_a_trace_is_compact_and_policy_lab_replays_it(spec: Speculator, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace, _ = decode(spec, path)
    prompt_bytes = sum(len(json.dumps(line.get("begun"))) for line in map(json.loads, path.read_text().splitlines()))
    assert (path.stat().st_size - prompt_bytes) / len(trace.tokens["token"]) <= MOST_BYTES
    assert len(texts_of(read_trace(path))) == 2


def test_without_scores_the_likeliest_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with wrap(tiny_llama(vocab=VOCAB), "suffix", tiers=(0, 3), max_len=64, backend="eager", policy="fixed:3") as plain:
        reason = re.compile(re.escape("wrap with scores=True, or record without them by top=0"))
        refused = raises(InvalidOption, where="record_trace", name="top", value=4, reason=reason)
        with refused, plain.record_trace(path, tokens=True):
            pass
        with plain.record_trace(path, tokens=True, top=0):
            result = plain.engine.submit(prompts()[0], max_new_tokens=30).result()
        # The steps are those that run without a trace.
        assert {kind for *_, kind in plain.engine.tiers} == {"greedy"}
    trace = read_token_trace(path)
    assert list(trace.requests[0].tokens) == result.token_ids
    assert trace.tokens["top_tokens"].shape == (29, 0) and np.isnan(trace.tokens["entropy"]).all()
    drafts = trace.drafts
    assert ((drafts["token"] >= 0) == drafts["accepted"]).all() and (drafts["score"] > 0).all()


@pytest.mark.parametrize(
    ("options", "name"),
    [({"top": 3}, "top"), ({"tokens": 1}, "tokens"), ({"tokens": True, "top": 21}, "top"),
     ({"tokens": True, "top": True}, "top")],
)  # fmt: skip
def test_invalid_options_are_refused(spec: Speculator, tmp_path: Path, options: dict[str, object], name: str) -> None:
    with raises(InvalidOption, where="record_trace", name=name), spec.record_trace(tmp_path / "t", **options):  # type: ignore[arg-type]
        pass


def test_trees_are_refused(tmp_path: Path) -> None:
    tiers = (0, Tree.dynamic(4, 2, 2))
    with (
        wrap(tiny_llama(vocab=VOCAB), tiers=tiers, max_len=64, backend="eager") as trees,
        raises(InvalidOption, where="record_trace"),
        trees.record_trace(tmp_path / "t", tokens=True, top=0),
    ):
        pass


def test_a_table_becomes_a_frame(spec: Speculator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    trace, _ = decode(spec, tmp_path / "t.jsonl")
    frame = trace.frame("tokens")
    assert isinstance(frame, pandas.DataFrame) and len(frame) == len(trace.tokens["token"])
    assert frame["top_tokens_0"].tolist() == trace.tokens["top_tokens"][:, 0].tolist()
    assert list(trace.frame("drafts")) == list(trace.drafts)
    with raises(InvalidOption, where="frame", name="table", value="rows"):
        trace.frame("rows")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with raises(InvalidOption, where="frame", reason=re.compile("pip install pandas")):
        trace.frame("steps")


def test_other_files_are_refused(spec: Speculator, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with spec.record_trace(path):
        spec.generate(torch.tensor([prompts()[0]]), max_new_tokens=8)
    with raises(InvalidTrace, reason=re.compile("it has no tokens; record with tokens=True")):
        read_token_trace(path)
    decode(spec, path)
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([head.replace('"tokens":1', '"tokens":9'), *lines]))
    with raises(InvalidTrace, reason=re.compile("its tokens are of format 9, and only 1 is read")):
        read_token_trace(path)
    broken = json.dumps(json.loads(lines[-1]) | {"packed": ["AAAA"]})
    path.write_text("\n".join([head, *lines[:-1], broken]))
    with raises(InvalidTrace, reason=re.compile("its tokens cannot be read")):
        read_token_trace(path)
