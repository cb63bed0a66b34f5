"""What two ranks do together in the tests, by name, when nothing fails."""

from __future__ import annotations

import contextlib
import io
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import speccompile
from speccompile import Speculator, Tree
from speccompile.cli import generate, inspect
from speccompile.compiler.options import WrapOptions
from speccompile.errors import RankError, UserError
from speccompile.graph.step_graph import StepGraph
from speccompile.guides import regex_guide
from speccompile.lowering.collective_list import collectives_called
from speccompile.modes.dflash.checkpoints import load_dflash
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.policies import Fixed
from speccompile.runtime import check
from speccompile.utils.kv_memory import KVMemory
from support.dice import Dice
from support.guide_tokenizers import EOS, common
from support.our_kernels import our_kernels

PROMPTS = ([5, 6, 7, 8] * 4, list(range(30)), [3], [9, 9, 8, 7, 9, 9, 8])
EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
NEW = 14
HEAD_IDS = [0, 7, 149, 150, 299]
REFERENCES: tuple[check.Reference, ...] = ("transformers", "plain")
#: Of the target: more than the tokens of the guide.
VOCAB = 300
#: Below 64 tokens there is one chunk width less to build.
SIZES: dict[str, Any] = {"backend": "eager", "max_batch": 2, "max_len": 63, "rank_timeout": 20}
DRAWN: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 50,
    "repetition_penalty": 1.2,
}
TREE = Tree.static([[0], [1], [0, 0], [0, 1]])


def repeated(tokens: list[int], draft_len: int) -> list[int]:
    """What followed the newest token the last time."""
    before = [place for place, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return tokens[before[-1] + 1 :][:draft_len] if before else []


#: No processor but the temperature: each rank chooses from its part of the logits.
ALONE: dict[str, Any] = {"do_sample": True, "temperature": 1.1, "top_k": 0}

#: Options of ``wrap`` by mode; a text as ``draft`` is a folder. The policy asks for any tier at any step, and each text
#: is that of the plain decoder.
MODES: dict[str, dict[str, Any]] = {
    "early_exit": {"exit_layer": 1},
    "eagle3": {"draft": "eagle3"},
    "suffix_and_head": {"mode": ["suffix", "recycle", "eagle3_one_model"], "draft": "eagle3", "prefill_budget": None},
    "tree": {"mode": "eagle3_one_model", "draft": "eagle3", "tiers": (0, TREE), "policy": Fixed(TREE), "max_batch": 1},
    "mtp": {"mode": ["prediction", "mtp"], "draft": "mtp", "tiers": (0, 2)},
    "dflash": {"draft": "dflash"},
    # Of little more than one sequence: a request stops for another one, and is read again.
    "pages": {"mode": "eagle3_one_model", "draft": "eagle3", "kv_memory": KVMemory(80, tokens=80, page=16)},
    "user_provided": {"draft": repeated, "host": True},
}
#: Each mode whose requests with a temperature alone are tried in steps of their own; elsewhere they would differ in
#: nothing that the mode does.
DRAWS_ALONE = ("tree", "mtp")
FAMILIES = ("gemma2", "qwen3_next", "gpt_oss")
#: Its steps commit recurrent state, so it has drafts.
RECURRENT = "qwen3_next"
#: What the rank's own lm_head is in the case ``own_numbers``: whole on every rank.
WHOLE_LM_HEAD = DistributedConfig(tp_size=2, tp_plan={"lm_head": "replicate"})

Case = Callable[[PreTrainedModel, int, Path], Any]


def texts(spec: Speculator, *, new: int = NEW, **options: Any) -> list[list[int]]:
    """Of requests side by side, in ragged rows."""
    requests = [
        spec.engine.submit(prompt, max_new_tokens=new + 2 * index, seed=index if options else None, **options)
        for index, prompt in enumerate(PROMPTS)
    ]
    return [request.result().token_ids for request in requests]


def wrapped(model: PreTrainedModel, folder: Path, mode: Any, **options: Any) -> Speculator:
    options = {"mode": mode, "tiers": (0, 3), **SIZES, **options}
    options.setdefault("policy", Dice(options["tiers"]))
    if isinstance(options.get("draft"), str):
        options["draft"] = str(folder / options["draft"])
    return speccompile.wrap(model, **options)


def together(spec: Speculator, lead: Callable[[], Any]) -> Any:
    """What ``lead`` returns on rank 0; the other follows meanwhile."""
    with spec:
        return lead() if spec.rank == 0 else spec.follow()


def all_texts(spec: Speculator, *, alone: bool = True) -> dict[str, Any]:
    """Of requests of each kind. Those that follow a guide run beside others that draw."""
    guide = {"guide": regex_guide("([ab]{2}c){2}", common()), "eos_token_id": EOS}
    mixed = [ALONE | guide, DRAWN, guide, DRAWN]
    return {
        "greedy": texts(spec),
        **({"alone": texts(spec, **ALONE)} if alone else {}),
        "mixed": [
            request.result().token_ids
            for request in [
                spec.engine.submit(prompt, max_new_tokens=9 + index, seed=index, **options)
                for index, (prompt, options) in enumerate(zip(PROMPTS, mixed, strict=True))
            ]
        ],
    }


def mode(name: str) -> Case:
    def case(model: PreTrainedModel, rank: int, folder: Path) -> Any:
        # Fewer steps to build: that of one mode, and of the case ``engine``, read prompts along with the rows.
        spec = wrapped(model, folder, **({"mode": name, "prefill_budget": 16} | MODES[name]))
        return together(
            spec,
            lambda: (
                all_texts(spec, alone=name in DRAWS_ALONE)
                | {"explain": spec.explain(), "preempted": spec.stats.preemptions}
            ),
        )

    return case


def head(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """What a DFlash head reads of a sharded embedding and lm_head, which are the target's own modules."""
    with wrapped(model, folder, "none", tiers=(0,), policy=None) as spec:
        loaded = load_dflash(folder / "dflash", spec._open()[1].model)
        embedded = loaded.embed(torch.tensor([HEAD_IDS]))
        return {"embedded": embedded.tolist(), "logits": loaded.logits(embedded).tolist()}


def own_numbers(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Rank 1 would choose other tokens, and propose other drafts: its whole lm_head and its Medusa heads are wrong."""
    other = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=WHOLE_LM_HEAD)
    spec = wrapped(other.eval(), folder, "medusa", draft="medusa", policy="fixed:3")
    if rank == 1:
        _negate([spec._build.weights["lm_head.weight"], *spec._config.mode.draft.parameters()])  # type: ignore
    return together(spec, lambda: {"greedy": texts(spec), "acceptance": spec.stats.acceptance_length})


#: The rule compares with the drafter's probabilities, and its text depends on them.
BY_COINS: dict[str, Any] = {"draft": "eagle3", "acceptance": "rejection", "policy": "fixed:3"}
HOT: dict[str, Any] = {"do_sample": True, "temperature": 1.5}


def rejection(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Probabilities of the drafter, and logits of the target, which are other numbers on rank 1: its whole lm_head and
    its part of the sums differ in their last bits, and its drafter is another one."""
    other = AutoModelForCausalLM.from_pretrained(folder / "target", distributed_config=WHOLE_LM_HEAD)
    spec = wrapped(other.eval(), folder, "eagle3_one_model", **BY_COINS)
    if rank == 1:
        _nudge(spec)
        _negate(spec._build.drafter.network.module.parameters())  # type: ignore[union-attr]
    return together(spec, lambda: {"drawn": texts(spec, new=20, **HOT)})


def _nudge(spec: Speculator) -> None:
    """Change the last bit of every weight."""
    for weight in spec._build.weights.values():  # type: ignore[union-attr]
        weight.data = torch.nextafter(weight.data, torch.full_like(weight.data, torch.inf))


def _negate(weights: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.neg_()


def scored(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Log-probabilities, and a pass that reads the logits."""
    spec = wrapped(model, folder, "none", tiers=(0,), policy=None, scores=True, passes=[BestLogits()])

    def lead() -> Any:
        notes = {name: spec.stages[name].note for name in ("best_logits", "choose_from_shards")}
        return {"scored": log_probabilities(spec), "notes": notes, "greedy": texts(spec, new=4)}

    return together(spec, lead)


@dataclass(frozen=True)
class BestLogits(Pass):
    """Reads the logits of all ranks."""

    name: ClassVar[str] = "best_logits"
    looks_for: ClassVar[str] = "logits"
    before: ClassVar[str] = "choose_from_shards"
    requires: ClassVar[Facts] = facts("step_logits")

    def run(self, graph: StepGraph) -> Changes:
        graph.insert(lambda logits: logits.amax(-1), graph.values["logits"])
        return Changes(1, f"of {graph.values['logits'].meta['val'].shape[-1]} tokens")


def log_probabilities(spec: Speculator) -> list[Any]:
    """Of new tokens, of a prompt, and of the likeliest tokens."""
    options: dict[str, Any] = {"logprobs": True, "prompt_logprobs": True, "top_logprobs": 2}
    result = spec.engine.submit(PROMPTS[3], max_new_tokens=6, **options).result()
    return [result.logprobs, result.prompt_logprobs, result.top_logprobs]


def rounded(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Weights of the target in int8, and its keys and values in float16, by our kernels."""
    other = AutoModelForCausalLM.from_pretrained(folder / "wide", distributed_config=DistributedConfig(tp_size=2))
    spec = rounded_spec(other.eval())
    return together(spec, lambda: {"greedy": texts(spec)})


def rounded_spec(model: PreTrainedModel) -> Speculator:
    with our_kernels() as backend:
        return speccompile.wrap(
            model, "ngram", weights="int8", kv="float16", tiers=(0, 3), **(SIZES | {"backend": backend})
        )


def family(name: str) -> Case:
    def case(model: PreTrainedModel, rank: int, folder: Path) -> Any:
        plan = DistributedConfig(tp_plan="auto") if name == "gemma2" else DistributedConfig(tp_size=2)
        other = AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=plan)
        drafts = {} if name == RECURRENT else {"tiers": (0,), "policy": None}
        spec = wrapped(other.eval(), folder, "ngram" if name == RECURRENT else "none", **drafts)
        return together(spec, lambda: {"greedy": texts(spec)})

    return case


def engine(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """Random tiers, guides, allowed tokens, cancels after each number of steps, and long silence. Rank 1's logits
    differ in their last bits; what is chosen is the same on both."""
    spec = wrapped(model, folder, ["suffix", "ngram"], rank_timeout=1.5, policy="fixed:3")
    if rank == 1:
        _nudge(spec)

    def lead() -> Any:
        rng, found = random.Random(0), {}
        requests = [spec.engine.submit(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        while not all(request.finished for request in requests):
            spec.set_tier(rng.choice((0, 3)))
            spec.engine.step()
        found["random tiers"] = [request.result().token_ids for request in requests]
        found |= all_texts(spec)
        allowed = spec.engine.submit(
            PROMPTS[2], max_new_tokens=6, prefix_allowed_tokens_fn=lambda row, ids: [7, 8, 9 + len(ids)]
        )
        found["allowed"] = allowed.result().token_ids
        kept = []
        for steps in range(6):
            stays = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW)
            goes = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW)
            for _ in range(steps):
                spec.engine.step()
            goes.cancel()
            kept.append(stays.result().token_ids)
        found["beside cancelled"] = kept
        found["check"] = [str(spec.check([PROMPTS[0]], max_new_tokens=8, reference=name)) for name in REFERENCES]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, "transformers_greedy", _with_another_end(check.transformers_greedy))
            found["difference"] = asdict(spec.check([PROMPTS[0]], max_new_tokens=8).differences[0])
        # Longer than the time-out: the leader's signs of life keep the follower waiting.
        time.sleep(2)
        found["after silence"] = spec.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW)[0].tolist()
        found["collectives"] = [(call.name, call.calls, call.nbytes) for call in spec.collectives(3)]
        found["stage"] = spec.stages["choose_from_shards"].python
        drawn = spec.engine.tiers[3, 2, "drawn"].graph
        found["drawn collectives"] = [(call.name, call.nbytes) for call in collectives_called(drawn)][-1]
        return found

    return together(spec, lead)


def _with_another_end(greedy: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """All ranks compute the text, and rank 0 reports another last token."""

    def other(*arguments: Any) -> list[int]:
        *text, last = greedy(*arguments)
        return [*text, (last + 1) % VOCAB]

    return other


def example(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """What ``examples/tensor_parallel.py`` prints, of a model whose attention is whole on both ranks."""
    with printing() as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(EXAMPLE), str(folder / "one_head")])
        patch.setattr(speccompile, "wrap", partial(speccompile.wrap, backend="eager", tiers=(0, 3), policy="fixed:3"))
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def command(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """What ``speccompile generate`` and ``speccompile inspect`` print of the same model."""
    options = WrapOptions(mode="ngram", backend="eager", tiers=(0, 3), policy="fixed:3", max_len=512)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with printing() as printed:
        generate.run(
            str(folder / "one_head"), "one two", options, None, {"max_new_tokens": 8}, chat=False, stored=False
        )
    shown: dict[str, Any] = {"draft_len": 3, "stage": None, "build": True, "measure": None, "html": None}
    with printing() as inspected:
        more: dict[str, Any] = {"as_json": True, "prompts": None, "new_tokens": 8, "trace": None, "stored": False}
        inspect.run(str(folder / "one_head"), options, None, **shown, **more)
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        signal.signal(number, handler)
    return {"generate": printed.getvalue(), "inspect": inspected.getvalue()}


@contextlib.contextmanager
def printing() -> Iterator[io.StringIO]:
    """What is printed inside. The process group stays for the cases that follow."""
    destroy = torch.distributed.destroy_process_group
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(torch.distributed, "destroy_process_group", lambda group=None: group and destroy(group))
        yield printed


def refused(model: PreTrainedModel, rank: int, folder: Path) -> Any:
    """What does not work: by the class of its error."""
    found = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (UserError, RankError) as error:
            found[name] = type(error).__name__

    note("tiers", lambda: wrapped(model, folder, "ngram", tiers=(0, 2 + rank)))
    note("passes", lambda: wrapped(model, folder, "ngram", passes=[BestLogits()] * rank))
    for option in ({"free_originals": True}, {"save_hidden_states": str(folder / "states")}, {"calibration": "file"}):
        note(next(iter(option)), lambda option=option: wrapped(model, folder, "ngram", **option))
    saving = {"mode": "save_hidden_states", "output_directory": str(folder / "states"), "tiers": (0,), "policy": None}
    note("the mode", lambda: wrapped(model, folder, **saving))
    heads = AutoModelForCausalLM.from_pretrained(folder / "one_head", distributed_config=DistributedConfig(tp_size=2))
    note("KV heads", lambda: wrapped(heads.eval(), folder, "ngram"))
    spec = wrapped(model, folder, "none", tiers=(0,), policy=None)
    note("follow", spec.follow if rank == 0 else lambda: None)
    note("submit", lambda: None if rank == 0 else spec.engine.submit([1], max_new_tokens=1))
    note("save", lambda: spec.save(folder / "package"))
    note("rebuild", spec.rebuild)
    note("forward", lambda: spec(torch.tensor([[1, 2]])))
    note("report", spec.report)
    if rank == 0:
        note("processor", lambda: spec.engine.submit([1], logits_processor=[lambda ids, scores: scores]))
    together(spec, lambda: None)
    return found


CASES: dict[str, Case] = {
    **{name: mode(name) for name in MODES},
    "head": head,
    "own_numbers": own_numbers,
    "rejection": rejection,
    "scored": scored,
    "rounded": rounded,
    **{name: family(name) for name in FAMILIES},
    "engine": engine,
    "example": example,
    "command": command,
    "refused": refused,
}
