"""What two ranks do together in the tests, by name. Both run every case, in this order."""

from __future__ import annotations

import contextlib
import io
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import speccompile
from speccompile import Speculator, Tree
from speccompile.errors import RankError, RequestFailed, UserError
from speccompile.guides import regex_guide
from speccompile.policies import Fixed
from support.guide_tokenizers import EOS, common

PROMPTS = ([5, 6, 7, 8] * 4, list(range(30)), [3], [9, 9, 8, 7, 9, 9, 8])
EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
NEW = 20
#: Of the target: more than the tokens of the guide.
VOCAB = 300
SIZES: dict[str, Any] = {"backend": "eager", "max_batch": 2, "max_len": 128, "rank_timeout": 20}
DRAWN: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.2,
}
TREE = Tree.static([[0], [1], [0, 0], [0, 1]])
#: Options of ``wrap`` by mode; a folder's name stands for the folder. Each text is that of the plain decoder.
MODES: dict[str, dict[str, Any]] = {
    "early_exit": {"exit_layer": 1},
    "eagle3": {"draft": "eagle3"},
    "suffix_and_head": {"mode": ["suffix", "eagle3_one_model"], "draft": "eagle3"},
    "tree": {"mode": "eagle3_one_model", "draft": "eagle3", "tiers": (0, TREE), "policy": Fixed(TREE)},
}
FAMILIES = ("qwen3_moe", "gemma2")

Case = Callable[[PreTrainedModel, int, Path], Any]


def texts(spec: Speculator, **options: Any) -> list[list[int]]:
    """Of requests side by side, in ragged rows."""
    requests = [
        spec.engine.submit(prompt, max_new_tokens=NEW + 2 * index, seed=index if options else None, **options)
        for index, prompt in enumerate(PROMPTS)
    ]
    return [request.result().token_ids for request in requests]


def wrapped(model: PreTrainedModel, folder: Path, mode: Any, **options: Any) -> Speculator:
    options = {"mode": mode, "tiers": (0, 3), "policy": "fixed:3", **SIZES, **options}
    if "draft" in options:
        options["draft"] = str(folder / options["draft"])
    return speccompile.wrap(model, **options)


def together(spec: Speculator, lead: Callable[[], Any]) -> Any:
    """What ``lead`` returns on rank 0; the other follows meanwhile."""
    with spec:
        return lead() if spec.rank == 0 else spec.follow()


def mode(name: str) -> Case:
    def case(model: PreTrainedModel, rank: int, folder: Path) -> Any:
        spec = wrapped(model, folder, **({"mode": name} | MODES[name]))

        return together(spec, lambda: {"greedy": texts(spec), "explain": spec.explain()})

    return case


def family(name: str) -> Case:
    def case(model: PreTrainedModel, rank: int, folder: Path) -> Any:
        other = AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=DistributedConfig(tp_size=2))
        spec = wrapped(other.eval(), folder, "ngram")
        return together(spec, lambda: {"greedy": texts(spec)})

    return case


def engine(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Random tiers, guides, allowed tokens, cancels after each number of steps, and long silence. Rank 1's logits
    differ in their last bits; what is chosen is the same on both."""
    spec = wrapped(model, folder, ["suffix", "ngram"], tiers=(0, 1, 3), rank_timeout=1.5)
    if rank == 1:
        for weight in spec._build.weights.values():  # type: ignore[union-attr]
            weight.data = torch.nextafter(weight.data, torch.full_like(weight.data, torch.inf))

    def lead() -> Any:
        rng, found = random.Random(0), {}
        requests = [spec.engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        while not all(request.finished for request in requests):
            spec.set_tier(rng.choice((0, 1, 3)))
            spec.engine.step()
        found["random tiers"] = [request.result().token_ids for request in requests]
        guide = regex_guide("([ab]{2}c){2}", common())
        guided = spec.engine.submit(PROMPTS[2], max_new_tokens=9, guide=guide, eos_token_id=EOS).result()
        found["guided"] = [common().decode(guided.token_ids[:-1]), guided.token_ids[-1] == EOS]
        allowed = spec.engine.submit(
            PROMPTS[2], max_new_tokens=6, prefix_allowed_tokens_fn=lambda row, ids: [7, 8, 9 + len(ids)]
        )
        found["allowed"] = allowed.result().token_ids
        found["drawn"] = texts(spec, **DRAWN)
        kept = []
        for steps in range(6):
            stays = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
            goes = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW)
            for _ in range(steps):
                spec.engine.step()
            goes.cancel()
            kept.append(stays.result().token_ids)
        found["beside cancelled"] = kept
        # Longer than the time-out: the leader's signs of life keep the follower waiting.
        time.sleep(2)
        found["after silence"] = spec.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW)[0].tolist()
        found["collectives"] = [(call.name, call.calls, call.nbytes) for call in spec.collectives(3)]
        found["stage"] = spec.stages["choose_from_shards"].python
        return found

    return together(spec, lead)


def example(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """What ``examples/tensor_parallel.py`` prints, of a model whose attention is whole on both ranks."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(EXAMPLE), str(folder / "one_head")])
        patch.setattr(speccompile, "wrap", partial(speccompile.wrap, backend="eager", tiers=(0, 3), policy="fixed:3"))
        # Other cases follow.
        patch.setattr(torch.distributed, "destroy_process_group", _only_groups(torch.distributed.destroy_process_group))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def _only_groups(destroy: Callable[..., None]) -> Callable[..., None]:
    return lambda group=None: None if group is None else destroy(group)


def refused(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """What does not work: by the class of its error."""
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except UserError as error:
            found[name] = type(error).__name__

    for option in ({"consume": True}, {"save_hidden_states": str(folder / "states")}):
        note(next(iter(option)), lambda option=option: wrapped(model, folder, "ngram", **option))
    heads = AutoModelForCausalLM.from_pretrained(folder / "one_head", distributed_config=DistributedConfig(tp_size=2))
    note("KV heads", lambda: wrapped(heads.eval(), folder, "ngram"))
    spec = wrapped(model, folder, "none", tiers=(0,), policy=None)
    note("follow", spec.follow if rank == 0 else lambda: None)
    note("submit", lambda: None if rank == 0 else spec.engine.submit([1], max_new_tokens=1))
    note("save", lambda: spec.save(folder / "package"))
    note("rebuild", spec.rebuild)
    note("check", lambda: spec.check([[1, 2]]))
    note("forward", lambda: spec(torch.tensor([[1, 2]])))
    note("report", spec.report)
    if rank == 0:
        note("processor", lambda: spec.engine.submit([1], logits_processor=[lambda ids, scores: scores]))
    together(spec, lambda: None)
    return found


def slow(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Rank 1 takes its time; rank 0 alone measures, and chooses by it."""
    spec = wrapped(model, folder, "ngram", policy="cost")
    if rank == 1:
        _before_runs(spec, lambda number: time.sleep(0.01))
    return together(spec, lambda: {"greedy": texts(spec)})


def changed_token(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """A token of rank 1 becomes another one after some steps."""
    spec = wrapped(model, folder, "ngram")

    def change(number: int) -> None:
        if number == 12:
            spec.arena["tokens"][:, 0] += 1

    if rank == 1:
        _before_runs(spec, change)
    return together(spec, lambda: {"errors": _errors(spec)})


def stalled(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Rank 1 does not take part for longer than the time-out."""
    spec = wrapped(model, folder, "ngram", rank_timeout=1)
    if rank == 1:
        _before_runs(spec, lambda number: time.sleep(3 if number == 7 else 0))
    return together(spec, lambda: {"errors": _errors(spec)})


def killed(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Rank 1 is killed in the middle of a step."""
    spec = wrapped(model, folder, "ngram", rank_timeout=10)
    if rank == 1:
        _before_runs(spec, lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 7 else None)
    return together(spec, lambda: {"errors": _errors(spec)})


def _before_runs(spec: Speculator, call: Callable[[int], None]) -> None:
    """Call ``call`` with the number of each run before rank 1 runs it."""
    ranks = spec.engine.ranks
    assert ranks is not None
    numbers = iter(range(10**6))
    run = type(next(iter(ranks._programs.values()))).run_target

    class Slow:
        def __init__(self, tier: Any) -> None:
            self.tier = tier

        def run_target(self) -> None:
            call(next(numbers))
            run(self.tier)

    ranks._programs = {name: Slow(tier) for name, tier in ranks._programs.items()}  # type: ignore[misc]


def _errors(spec: Speculator) -> dict[str, str]:
    """The classes of the errors that a running request, a waiting one, and a later one end with."""
    found = {}
    requests = [spec.engine.submit(prompt, max_new_tokens=60) for prompt in PROMPTS]
    for name, request in (("running", requests[0]), ("waiting", requests[-1])):
        try:
            request.result()
        except RequestFailed as error:
            found[name] = type(error.__cause__).__name__
    try:
        spec.engine.submit([1])
    except RankError as error:
        found["later"] = type(error).__name__
    return found


CASES: dict[str, Case] = {
    **{name: mode(name) for name in MODES},
    **{name: family(name) for name in FAMILIES},
    "engine": engine,
    "example": example,
    "refused": refused,
    "slow": slow,
    "changed_token": changed_token,
    "stalled": stalled,
    # Last: there is no other rank afterwards.
    "killed": killed,
}
