"""Single steps: over the floor, by width, and what of them is neither target nor drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.floor import kv_bytes, weight_bytes
from benchmarks.gpu.rates import RATE
from benchmarks.gpu.timing import interleaved, synchronize
from speccompile import Speculator
from speccompile.graph.step_form import StepForm
from speccompile.lowering.tier import Tier, bind

#: Steps that follow one another without a pause are timed as one: in between nothing waits for the host.
TOGETHER = 8


def tier_of(spec: Speculator, draft_len: int, rows: int) -> Tier:
    """The greedy tier of that draft length and row count."""
    return next(tier for tier in spec.engine.tiers.values() if tier.name == StepForm(draft_len, rows).name)


def fill(spec: Speculator) -> None:
    """Random text and KV: over zeros kernels may be faster than over anything real."""
    arena = spec.arena
    arena["tokens"].random_(0, arena.layout.vocab_size)
    for name, tensor in arena.layout.tensors.items():
        if tensor.follows_text and tensor.dtype.is_floating_point:
            arena[name].normal_()


def place(spec: Speculator, rows: int, context: int) -> None:
    """So many live rows whose texts have ``context`` tokens."""
    arena = spec.arena
    arena["length"][:rows] = context
    arena["limit"][:rows] = arena.layout.max_len
    arena["alive"].fill_(False)
    arena["alive"][:rows] = True
    slots = torch.full((len(arena["slots"]),), arena.layout.dummy_slot, dtype=torch.int64)
    slots[:rows] = torch.arange(rows)
    arena["slots"].copy_(slots)
    synchronize(arena.device)


def clear(spec: Speculator) -> None:
    """No row is alive, as the engine left it."""
    spec.arena["alive"].fill_(False)
    spec.arena["slots"].fill_(spec.arena.layout.dummy_slot)


def many(run: Callable[[], object]) -> Callable[[], None]:
    def work() -> None:
        for _ in range(TOGETHER):
            run()

    return work


def measure_steps(
    spec: Speculator, figures: Figures, *, row_counts: tuple[int, ...], context: int, rounds: int, bandwidth: float
) -> None:
    """Every tier at every row count; tiers of one row count take turns. All drafts are accepted where the rule is
    :class:`~benchmarks.gpu.rates.AtRate`, else those that the mode has."""
    figures["cases"] = cases = []
    embedding, head = spec_weights(spec)
    fill(spec)
    if RATE in spec.arena:
        spec.arena[RATE].fill_(1.0)
    for rows in row_counts:
        tiers = {draft_len: tier_of(spec, draft_len, rows) for draft_len in sorted(spec.engine.draft_lens)}
        # As the last of the steps in a row begins.
        reached = {draft_len: context + (TOGETHER - 1) * (draft_len + 1) for draft_len in tiers}
        assert max(reached.values()) + max(tiers) + 1 <= spec.arena.layout.max_len, "the texts would end"
        works = {str(draft_len): many(tier.run) for draft_len, tier in tiers.items()}
        prepare = {name: lambda rows=rows: place(spec, rows, context) for name in works}
        seconds = interleaved(works, spec.arena.device, rounds, prepare)
        baseline = seconds["0"] / TOGETHER
        for draft_len, tier in tiers.items():
            step = seconds[str(draft_len)] / TOGETHER
            kv = kv_bytes(spec, rows, (context + reached[draft_len]) // 2)
            floor = (weight_bytes(tier, embedding, head) + kv) / bandwidth
            cases.append(
                {
                    "rows": rows,
                    "K": draft_len,
                    "milliseconds": 1e3 * step,
                    "floor_milliseconds": 1e3 * floor,
                    "over_floor": step / floor,
                    "to_plain": step / baseline,
                    "kv_bytes": kv,
                }
            )
    clear(spec)


def spec_weights(spec: Speculator) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and lm_head, by the ports of the captured graph."""
    ports = {port.path: port.value for port in spec.stages["capture"].graph.ports.values() if port.path}
    embedding, head = ports.get("model.embed_tokens.weight"), ports.get("lm_head.weight")
    some = next(value for value in (embedding, head) if value is not None)
    return (some if embedding is None else embedding), (some if head is None else head)


def measure_shares(
    spec: Speculator, figures: Figures, *, row_counts: tuple[int, ...], draft_lens: tuple[int, ...], context: int,
    rounds: int,
) -> None:  # fmt: skip
    """A tier next to its target alone: the same graph cut off after the logits, run in the same way."""
    figures["cases"] = cases = []
    fill(spec)
    for rows in row_counts:
        for draft_len in draft_lens:
            tier = tier_of(spec, draft_len, rows)
            target = target_alone(spec, tier)
            works = {"step": many(tier.run), "target": many(target)}
            prepare = {name: lambda rows=rows: place(spec, rows, context) for name in works}
            seconds = interleaved(works, spec.arena.device, rounds, prepare)
            cases.append(
                {
                    "rows": rows,
                    "K": draft_len,
                    "milliseconds": 1e3 * seconds["step"] / TOGETHER,
                    "target_milliseconds": 1e3 * seconds["target"] / TOGETHER,
                    "outside": 1 - seconds["target"] / seconds["step"],
                }
            )
    clear(spec)


def target_alone(spec: Speculator, tier: Tier) -> Callable[[], object]:
    """The step of ``tier`` up to its logits; one launch where there are CUDA graphs."""
    graph = tier.stages["verify_inputs"].graph.copy()
    graph.set_outputs(graph.values["logits"])
    graph.remove_dead_code()
    call = spec.backend.lower(graph, f"the target of {tier.name}")
    arguments = bind((graph.ports[node.name] for node in graph.placeholders), spec.arena)

    def run() -> Any:
        with torch.no_grad():
            return call(*arguments)

    return captured(run, spec.arena.device) if spec.backend.name == "cudagraph" else run


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``run`` as a CUDA graph."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
