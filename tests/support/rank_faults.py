"""What two ranks do together in the tests when one of them is slow, wrong or stalled."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from speccompile import Speculator
from speccompile.errors import RankError, RequestFailed
from speccompile.lowering.tier import Tier
from speccompile.ranks.channel import RankMessage
from support.rank_cases import PROMPTS, Case, texts, together, wrapped

#: Of one row alone, which is less to build.
SMALL: dict[str, Any] = {"max_batch": 1, "tiers": (0,), "policy": None}

#: New tokens of each text of the slow rank.
SHORT = 8


def slow(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Rank 1 takes four times as long for each run; rank 0 alone measures, and chooses tiers by it. Also returns what
    each of them ran."""
    spec, ran = wrapped(model, folder, "ngram", policy="cost", max_batch=1), []

    def slowly(run: Callable[[], None], name: str) -> None:
        ran.append(name)
        started = time.perf_counter()
        run()
        time.sleep(3 * (time.perf_counter() - started))

    if rank == 1:
        with _runs_as(rank, slowly):
            together(spec, lambda: None)
        return {"ran": ran}
    ranks = spec.engine.ranks
    assert ranks is not None
    send = ranks._channel.send

    def noted(message: RankMessage) -> None:
        if message.action == "run":
            ran.append(message.name)
        send(message)

    ranks._channel.send = noted  # type: ignore[method-assign]
    return together(spec, lambda: {"greedy": texts(spec, new=SHORT), "ran": ran})


def changed_token(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """The newest token of each slot of rank 1 becomes another one after some steps."""
    spec = wrapped(model, folder, "ngram", **SMALL)

    def change() -> None:
        for slot, length in enumerate(spec.arena["length"].tolist()):
            if length:
                spec.arena["tokens"][slot, length - 1] += 1

    with _runs_as(rank, _once(12, change)):
        return together(spec, lambda: {"errors": _errors(spec)})


def stalled(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Rank 1 does not take part for longer than the time-out."""
    spec = wrapped(model, folder, "ngram", rank_timeout=1, **SMALL)
    with _runs_as(rank, _once(7, lambda: time.sleep(2.5))):
        return together(spec, lambda: {"errors": _errors(spec)})


def _once(number: int, call: Callable[[], None]) -> Callable[[Callable[[], None], str], None]:
    """Calls ``call`` before the run of that number."""
    numbers = itertools.count()

    def before(run: Callable[[], None], name: str) -> None:
        if next(numbers) == number:
            call()
        run()

    return before


@contextlib.contextmanager
def _runs_as(rank: int, call: Callable[[Callable[[], None], str], None]) -> Iterator[None]:
    """Each run of rank 1 is ``call(run, name)``."""
    run_target = Tier.run_target
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Tier, "run_target", lambda tier: call(lambda: run_target(tier), tier.name))
        yield


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


FAULTS: dict[str, Case] = {
    "slow": slow,
    "changed_token": changed_token,
    "stalled": stalled,
}
