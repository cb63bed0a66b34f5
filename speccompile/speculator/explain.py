"""``spec.explain()``: a description of the build, with reasons."""

from __future__ import annotations

import math
import re
from collections import Counter

from speccompile.adapters.buffers import PREFIX
from speccompile.compiler.build import Build
from speccompile.compiler.config import MIXED_TOKENS, BuildConfig
from speccompile.hidden_states.options import FINAL
from speccompile.lowering.collective_list import collectives_called
from speccompile.lowering.recorded_step import MOST_TOKENS, RecordedStep
from speccompile.passes.target.choose_experts import ChooseExperts
from speccompile.passes.target.join_weights import JoinWeights
from speccompile.policies.base import LearningPolicy
from speccompile.runtime.engine import Engine
from speccompile.runtime.prefill import LONGEST_WAIT
from speccompile.sampling.host import CALLED_ON_HOST
from speccompile.utils.devices import MOVE, traits_of, unused_gpu


def explain(config: BuildConfig, build: Build, engine: Engine) -> str:
    """Describe the build in a few lines of plain text."""
    lines = explanation(config, build, engine)
    width = max(len(name) for name in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def explanation(config: BuildConfig, build: Build, engine: Engine) -> dict[str, str]:
    """Return the lines of :func:`explain` by name."""
    info, layout = build.info, build.arena.layout
    largest = build.largest
    bodies = ", ".join(
        f"{body.name} x{len(body.layers)}" if body.layers else body.name
        for body in build.model.last.graph.bodies.values()
    )
    forwards = "by one forward" if config.mode.one_forward else "by as many forwards as the policy's draft length"
    drafts = f"computed inside the step, {forwards}"
    if config.mode.ready and config.mode.split:
        drafts = "ready when a step ends if a lookup found some; for other rows by separate executables of the network"
    elif config.mode.ready:
        drafts = "ready when a step ends: the smallest tier that serves them runs next"
        drafts += ", or a tree that was chosen" * bool(config.trees)
    elif config.mode.split:
        drafts = f"computed before the step, by separate executables of the drafter, {forwards}"
        if config.drafts_in_segments:
            drafts += "; the policy may stop between them, and the tier of the drafts so far verifies them"
    return {
        "model": f"{info.name}, {info.num_layers} layers, vocabulary {info.vocab_size}, {info.dtype}, {info.device}",
        "mode": f"{config.mode.name}: {config.mode.explain()}",
        **({} if config.choice is None else {"auto": f"{config.choice.name}, since {config.choice.reason}"}),
        "drafts": drafts,
        "tiers": f"K in {engine.draft_lens}, each for {_counted(engine.table.row_counts, 'row')}; "
        f"prefill chunks of {tuple(sorted({width for width, _ in engine.table.prefill}))}",
        **({} if not config.trees else {"trees": _trees(config)}),
        "engine": _engine(config, engine),
        **_recurrent(config, build, engine),
        "policy": _policy(config, engine),
        "acceptance": f"{config.rule.name}: {config.rule.explain()}",
        "lossless": _lossless(config),
        **_saved(config, engine),
        **_processors(config),
        "on the host": _on_host(config, build),
        "deterministic": _deterministic(config),
        **_ranks(config, build),
        "backend": f"{config.backend.name}: {config.backend.reason}",
        **_idle_gpu(build),
        "weights": _weights(build) + _dequantised(build),
        **_draft_weights(config),
        **_kv(config, build),
        **_pool(build),
        **_experts(build),
        **_adapters(build, engine),
        **({} if config.inputs is None else {"images": config.inputs.explain()}),
        "kernels": f"{config.kernels.settled().reason}; {_kernels(build)}",
        **({} if build.captures is None else {"CUDA graphs": build.captures.explain()}),
        **_recorded(engine, build),
        "bodies": bodies,
        "passes": " -> ".join(largest.stages),
        "state": f"{build.arena.nbytes / 2**20:.1f} MiB in {len(build.arena)} tensors, "
        f"{_counted((layout.max_batch,), 'slot')} of {layout.max_len} tokens"
        + (f" ({config.max_len_reason})" if config.max_len_reason else ""),
        "capture check": f"largest logit difference {build.capture_difference:.2g}",
        "built in": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in build.seconds.items()),
    }


def _recorded(engine: Engine, build: Build) -> dict[str, str]:
    """Count recorded steps; return nothing without a backend that records."""
    steps = [part.executable for tier in engine.table.built for part in (*tier.segments, tier)]
    bound = [step for step in steps if isinstance(step, RecordedStep)]
    if not bound:
        return {}
    refusals = sorted({step.refusal for step in bound if step.refusal is not None})
    owned = build.step_memory.nbytes
    line = f"{len(bound)} of {len(steps)} executables, those of at most {MOST_TOKENS} tokens, at their first run"
    line += f"; {owned / 2**20:.1f} MiB so far" * bool(owned)
    return {"recorded": line + "".join(f"; not recorded: {refusal}" for refusal in refusals)}


def _idle_gpu(build: Build) -> dict[str, str]:
    gpu = unused_gpu(build.info.device)
    return {} if gpu is None else {"unused GPU": f"{gpu}; {MOVE}"}


def _counted(numbers: tuple[int, ...], noun: str) -> str:
    """Format counts with a noun: ``1 row``, ``1, 2 and 4 rows``."""
    return f"{_list(numbers)} {noun}" + "s" * (numbers != (1,))


def _weights(build: Build) -> str:
    packs = build.packs
    if packs.freed is not None:
        size = f"{len(packs)} of them in {packs.nbytes / 2**20:.1f} MiB"
        return f"originals freed: {size}, which the model itself unpacks at each use"
    joined = f"; {build.model[JoinWeights.name].note}" if JoinWeights.name in build.model else ""
    if not packs:
        return "the model's own, in one copy" + joined
    # Tied weights have one pack.
    own = sum({weight.data_ptr(): weight.nbytes for weight in packs.weights.values()}.values()) / 2**20
    quantized = [pack for pack in packs if pack.format]
    others, left = len(packs) - len(quantized), packs.nbytes / 2**20
    lines = []
    if quantized:
        held = sum(pack.nbytes for pack in quantized) / 2**20
        values = sum(math.prod(pack.shape) for pack in quantized) * 4 / 2**20
        lines.append(
            f"{len(quantized)} of {quantized[0].format} as stored, {held:.1f} MiB instead of {values:.1f} MiB in "
            "float32, and the model itself has no copy"
        )
        left -= held
    if others:
        lines.append(f"{others} packed, a second copy of {left:.1f} MiB beside the model's own {own:.1f} MiB")
    saves = f"; free_originals=True keeps one copy and saves {own:.1f} MiB" if not quantized else ""
    return "; ".join(lines) + saves + joined


def _draft_weights(config: BuildConfig) -> dict[str, str]:
    """The form of the weights of the mode's network; nothing for a mode without one."""
    if config.network is None:
        return {}
    if config.network.weights == "same":
        return {"draft weights": "the network's own"}
    unchanged = "; the text does not depend on drafts" if config.rule.text_invariant else ""
    return {"draft weights": f"rounded to {config.network.weights}{unchanged}"}


def _kv(config: BuildConfig, build: Build) -> dict[str, str]:
    """The form of cached keys and values, if it is not the model's own."""
    if config.kv is None:
        return {}
    kv = [f"{letter}_{layer}" for layer in build.observed.kv for letter in "kv"]
    a_token = sum(build.arena[name][0, 0].nbytes for name in kv)
    dtype = str(config.kv).removeprefix("torch.")
    return {"keys and values": f"rounded to {dtype} when they are written, {a_token} bytes a token"}


def _pool(build: Build) -> dict[str, str]:
    """The pool of pages of KV, if there is one."""
    layout = build.arena.layout
    if layout.paging is None:
        return {}
    pages, size = layout.paging.count - 1, layout.paging.size
    nbytes = sum(tensor.nbytes for tensor in layout.tensors.values() if tensor.in_pages)
    return {"KV in pages": f"{pages} of {size} tokens, {nbytes / 2**20:.1f} MiB, which all slots share"}


def _dequantised(build: Build) -> str:
    info = build.info
    if not info.dequantised_from:
        return ""
    dtype = str(info.dtype).removeprefix("torch.")
    # Values of FP8 and FP4 are not integers.
    is_float = re.search("fp[48]", info.dequantised_from.lower())
    advice = "" if is_float else ": pretrained.load_quantized keeps integers, if they can be read exactly"
    return f"; they were stored as {info.dequantised_from} and dequantised to {dtype} when the model was loaded{advice}"


def _experts(build: Build) -> dict[str, str]:
    return {"experts": build.model[ChooseExperts.name].note} if ChooseExperts.name in build.model else {}


def _adapters(build: Build, engine: Engine) -> dict[str, str]:
    buffers = build.config.adapters
    if buffers is None:
        return {}
    tensors = build.arena.layout.tensors.values()
    size = sum(tensor.nbytes for tensor in tensors if tensor.name.startswith(PREFIX)) / 2**20
    names = ", ".join(f"{item.name} (rank {item.rank}, {item.linears} linears)" for item in engine.adapters.loaded)
    heads = build.config.head_adapters
    on = f"{len(buffers.linears)} linears"
    if heads is not None:
        on += f", and for their heads of rank {heads.max_rank} on {len(heads.linears)} linears"
    return {
        "adapters": f"buffers for {buffers.count} of rank {buffers.max_rank} on {on}, "
        f"{size:.1f} MiB in {buffers.dtype}; loaded: {names or 'none'}"
    }


def _recurrent(config: BuildConfig, build: Build, engine: Engine) -> dict[str, str]:
    if not build.observed.recurrent:
        return {}
    layout, interval = build.arena.layout, config.state_checkpoints
    size = sum(layout.recurrent.values()) / 2**10
    known = (
        "It is only known at the end of a sequence: a prompt that continues from there reuses it, and other prompts "
        "are processed from their beginning (state_checkpoints=n keeps copies for them)"
    )
    if layout.checkpoints:
        copies = sum(copy.nbytes for copy in layout.checkpoints.values()) / layout.max_batch / 2**10
        known = (
            "A prompt that continues from the end of a known sequence reuses it; one that leaves a known sequence "
            f"continues from the last checkpoint before. There is one about every {interval} tokens, up to "
            f"{config.checkpoints} in {copies:.0f} KiB for each slot"
        )
    elif not engine.prefix_reuse:
        known = "Prompts are processed from their beginning"
        known += ", and state_checkpoints has no effect, since prefix reuse is off" * (interval is not None)
    if engine.prefix_reuse and any(shape.prompts_differ for shape in build.observed.recurrent.values()):
        known += (
            ". Only prompts are reused, since the model limits the time steps of a prompt's tokens and of no others"
        )
    return {
        "recurrent state": f"{len(build.observed.recurrent)} recurrences, {size:.0f} KiB for each slot; a step absorbs "
        f"the tokens that the one before it accepted. {known}. Prompts have separate chunks, and drafts are chains"
    }


def _processors(config: BuildConfig) -> dict[str, str]:
    names = ", ".join(processor.name for processor in config.logits_processors)
    return {"logits processors": f"{names}: in every step, before temperature, top_k, ..."} if names else {}


def _ranks(config: BuildConfig, build: Build) -> dict[str, str]:
    if config.ranks is None:
        return {}
    counts, nbytes = Counter[str](), Counter[str]()
    for call in collectives_called(build.largest.graph):
        counts[call.name] += call.calls
        nbytes[call.name] += call.nbytes
    sent = ", ".join(f"{count} x {name} ({nbytes[name] / 2**10:.1f} KiB)" for name, count in counts.items())
    drafter = ""
    if config.network is not None:
        drafter = "; drafts are rank 0's, and the drafter is replicated but for modules that it shares with the target"
    return {
        "ranks": f"{config.ranks.size} (tensor parallel), this is {config.ranks.rank}; the largest tier sends "
        f"{sent} from each rank in a step, beside one message of rank 0{drafter}"
    }


def _on_host(config: BuildConfig, build: Build) -> str:
    if build.captures is not None or config.ranks is not None:
        refused = " and ".join(CALLED_ON_HOST)
        drafts = "with the drafts that it allows" if config.drafts_known else "without drafts"
        return (
            f"a guide before each step, {drafts}; prefix_allowed_tokens_fn before each token, without drafts; "
            f"{refused} are refused"
        )
    names = ", ".join(("prefix_allowed_tokens_fn", *CALLED_ON_HOST))
    return f"{names} of a request are called before each of its tokens, and it has no drafts; others have drafts"


def _saved(config: BuildConfig, engine: Engine) -> dict[str, str]:
    if config.saved is None or engine.saver is None:
        return {}
    layers = ", ".join("the final norm" if layer == FINAL else str(layer) for layer in config.saved.layers)
    writer = engine.saver.writer
    saved = f"of layers {layers} beside the final norm, to {writer.folder}; {len(writer.written)} records are there"
    return {"hidden states": saved}


def _policy(config: BuildConfig, engine: Engine) -> str:
    costs = engine.policies.costs
    asks = isinstance(engine.policy, LearningPolicy) and engine.policy.uses_costs
    notes = [f"at first a step needed {costs.describe(1)} (one row)"] if asks and costs is not None else []
    if len(engine.draft_lens) > 1 and not config.rule.text_invariant:
        notes.append(f"by {config.rule.name!r} text depends on the draft length, so the largest tier is the default")
    return "; ".join([str(engine.policy), *notes])


def _lossless(config: BuildConfig) -> str:
    if config.rule.lossless:
        return "yes: emitted tokens have the distribution of the model's own tokens"
    return f"no: {config.rule.name!r} changes the distribution of emitted tokens"


def _trees(config: BuildConfig) -> str:
    """Draw each tree, indented."""
    return "".join("\n  " + tree.draw().replace("\n", "\n  ") for tree in config.trees).lstrip("\n ")


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)


def _engine(config: BuildConfig, engine: Engine) -> str:
    tokens = engine.prompts.budget.tokens
    budget = f"as many as keep a step within {LONGEST_WAIT:g} usual ones" if tokens is None else str(tokens)
    along = f", {MIXED_TOKENS} of them along with a step" if tokens is None and config.mixes else ""
    return (
        f"{_counted((engine.arena.layout.max_batch,), 'slot')}, at most {engine.options.max_waiting} waiting; "
        f"prompt tokens between two steps: {budget}{along}; prefix reuse {'on' if engine.prefix_reuse else 'off'}; "
        f"results are read {'one step late' if engine.scheduler.late else 'when a step ends'}"
    )


def _deterministic(config: BuildConfig) -> str:
    if config.one_shape:
        return f"yes: every tier runs {[config.max_batch, config.width(0)]}, attention in blocks; proved at build"
    if config.keeps_bits:
        return "yes: no kernel's order of sums depends on what else is computed; proved at build"
    return (
        "no: logits may differ in the last bits between tiers (deterministic=True prevents it, at the cost of "
        "running every tier at the widest one's shape)"
    )


def _kernels(build: Build) -> str:
    if build.observed.route == "attention":
        packed = f"weights: {build.packs.describe()}; {build.packs.nbytes / 2**20:.0f} MiB" if build.packs else ""
        by = "split over the cache" if traits_of(build.info.device).triton_ops else "by SDPA, row by row"
        return packed or f"attention {by} over live keys"
    return f"the model's own attention, over a copy of each row's whole cache ({build.observed.reason})"
