"""``speccompile.wrap``: checks its options, builds the executables, and returns a speculator."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from speccompile.acceptance import Rule
from speccompile.adapters.options import Adapters
from speccompile.calibration.calibration import Calibration
from speccompile.compiler.build import build
from speccompile.compiler.default_pool import replacing_pool
from speccompile.compiler.memory import memory_named
from speccompile.compiler.options import DEFAULT_MODE, WrapOptions
from speccompile.compiler.package import check_fits, read_package, read_wrap_options
from speccompile.compiler.plan import Plan, make_plan, warn_of_positions
from speccompile.compiler.sharding import abandoned_on_error, join_ranks
from speccompile.errors import UnsupportedSharded
from speccompile.graph_capture.adapters import inner_model
from speccompile.graph_capture.sharded import tensor_parallel_group
from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.hidden_states.records import about
from speccompile.hidden_states.writer import RecordWriter
from speccompile.lowering.object_code import install_machine_code
from speccompile.modes.auto import Auto, Failed, first_that_works, replacing
from speccompile.ops.cpu.free_originals import freeing_originals
from speccompile.ops.cpu.quantized import QuantizedPacks, packs_for, quantizing
from speccompile.passes.base import Pass
from speccompile.ranks.ranks import Ranks
from speccompile.runtime.learning import Learning
from speccompile.runtime.policy_controller import AnyPolicy
from speccompile.sampling.user import Processor
from speccompile.speculator.speculator import Speculator
from speccompile.utils.build_lock import one_build
from speccompile.utils.kv_forms import KVForm
from speccompile.utils.not_given import NOT_GIVEN, NotGiven
from speccompile.utils.progress import Progress, listening, logger
from speccompile.utils.storage import CacheFolder, PackageStorage, Storage
from speccompile.utils.weight_forms import Weights


def wrap(
    model: PreTrainedModel,
    mode: str | Sequence[str] | NotGiven | None = NOT_GIVEN,
    *,
    tiers: Sequence[int] | None = None,
    max_batch: int = 1,
    max_len: int | None = None,
    backend: str = "auto",
    policy: str | AnyPolicy | None = None,
    acceptance: str | Rule | None = None,
    deterministic: bool | None = None,
    weights: Weights = "same",
    calibration: Calibration | str | Path | None = None,
    kv: KVForm = "same",
    kv_memory: int | str | None = None,
    max_waiting: int = 1024,
    prefill_budget: int | None = None,
    prefix_reuse: bool = True,
    state_checkpoints: int | None = None,
    sampling: bool = False,
    logits_processor: Processor | Sequence[Processor] | None = None,
    scores: bool = False,
    free_originals: bool = False,
    consume: bool = False,
    save_hidden_states: SaveHiddenStates | str | Path | None = None,
    passes: Sequence[Pass] = (),
    learn: Learning | None = None,
    adapters: Adapters | None = None,
    rank_timeout: float = 60.0,
    progress: Progress | None = None,
    **mode_options: Any,
) -> Speculator:
    """Return a speculator, which decodes with ``model`` speculatively and emits the same text.

    Args:
        model: a causal LM with a KV cache, in eval mode, on one device; or a PEFT model over one, whose adapter is in
            its layers (LoRA and its like). It does not change, unless ``free_originals``; on CUDA some of its weights
            move in memory, and keep their values. Weights may change in place later. After a change of hooks, modules,
            active adapters or settings, requests raise ``ModelChanged`` until :meth:`Speculator.rebuild` is called.
        mode: How to draft. A name of ``speccompile.modes.available()``; None is ``none``. Of several (``["suffix",
            "ngram"]``), for each row the first whose draft is good enough (``min_score=``, expected accepted tokens).
            ``auto`` chooses by the options (``head=``, ``draft=``) and by the contents of the model's checkpoint;
            ``explain()`` reports why. Without ``mode``, it is ``auto`` with ``head=`` or ``draft=``, else ``ngram``.
        tiers: Draft lengths to build, 0 among them, and trees (`speccompile.Tree`). None is (0, 1, 3, 7), each
            limited to the drafter's most drafts. A policy chooses among the draft lengths. A tree runs after
            ``set_tier(tree)``, or with ``policy=Fixed(tree)``.
        max_batch: Number of slots: most requests that run at a time. Further requests wait. Steps run over the
            smallest of 1, 2, 4, ... rows that holds the live requests.
        max_len: Most tokens of a sequence, prompt included. By default the model's positions, but no more than 2048;
            with several slots, no more than the default pool of ``kv_memory`` holds. ``explain()`` reports which.
        backend: What compiles the steps. ``auto``, ``eager``, ``inductor``, or, on CUDA, ``cudagraph``; or the name of
            a backend that was registered.
        policy: What chooses the draft length of each step. ``"fixed:K"``, ``"schedule:1=7,4=3"`` (from so many live
            rows on, that K), ``"schedule:<=4=7,<=8=3"`` (up to so many live rows, that K, and 0 above the last:
            TensorRT-LLM's ``draft_len_schedule``), ``"cost"`` (most expected tokens per second; the tiers are timed
            before the first step), ``"ema"`` (SGLang's), ``"gate"`` (no drafts while too few are accepted), these with
            options (``"ema:alpha=0.3,candidates=0/3/7"``), an object of :mod:`speccompile.policies`, or one with
            ``choose(live_rows) -> K``. None is ``"cost"``, and the largest tier under acceptance rules by which drawn
            text depends on the draft length.
        acceptance: The rule that accepts or rejects draft tokens. ``exact``: the text does not depend on the drafts.
            ``rejection``: the distribution of drawn tokens does not depend on the drafts. ``block``: likewise, and it
            accepts more of the drafts that have probabilities (mode ``early_exit``). ``typical`` and ``relaxed`` are
            lossy. A name, or an object of :mod:`speccompile.acceptance` such as ``Typical(threshold=0.2)``. None is
            ``exact``, unless the variable TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS requests ``Forced`` (for
            benchmarks).
        deterministic: Whether logits are independent, in every bit, of the tier and of the other rows. None does so
            where it costs nothing: on a CPU, by the package's kernels, which keep a row's order of sums. With True and
            without these kernels, all tiers run the widest tier's shape.
        weights: The form of the weights of linears and embeddings. ``int8`` rounds them to 8 bits in groups of 64
            inputs. ``int4`` rounds them to 4 bits in groups of 32, and embeddings and lm_heads to ``int8``. Routers of
            experts keep their values, unless a mapping names them. Both round what is multiplied with the weights to 8
            bits, in each step. That is another model: it is faster, and its text differs. ``spec.check`` compares with
            that model. A mapping gives forms to modules:
            ``{"*": "int4", "layers.0": "int8", "mlp.down_proj": "same"}``. A name matches the modules whose path
            contains it. Of several names that match, the one with the most parts decides; of these, the one with the
            most letters. ``"*"`` is all other weights (``"same"`` by default).
            :class:`~speccompile.quantized.QuantizedWeights` are integers of a checkpoint that is quantised already: the
            linears that they name multiply with these, without a second rounding. The model's own values of them are
            released, and may be on the meta device. The model's own forward then raises (call ``spec(input_ids)``).
        calibration: What `speccompile.calibrate` gathered, or its file: `int4` rounds by it. For each group it chooses
            the scale with the least loss at large inputs. It must be of this model, and have the inputs of all weights
            in ``int4``.
        kv: The form of cached keys and values. ``bfloat16`` and ``float16`` round each once, when it is written: the
            arena needs half the bytes of float32, and steps without drafts at long contexts are faster. ``int8`` needs
            little more than a quarter: 32 features share a scale. That is another model; ``spec.check`` compares with
            it. A drafter's network keeps its own dtype.
        kv_memory: The size of a pool of pages of KV that all slots share, in tokens or as ``4GiB``. If it and
            ``max_len`` are left out, several slots on a CPU have 2048 tokens for each. A request holds pages for the
            tokens that it has, and shares the whole pages of a beginning that another sequence has. While there are too
            few, requests wait, or stop and are read again later. Without a pool each slot has a piece for ``max_len``
            tokens: if only ``max_len`` is given, with one slot, on CUDA, and for a model that keeps a recurrent state
            or gathers its keys and values.
        max_waiting: Most requests of ``spec.engine`` that wait for a slot.
        prefill_budget: Most prompt tokens that ``spec.engine`` processes between two decode steps. On a CPU None
            processes them in the steps, or in chunks between steps, and keeps a step with its prompts within the time
            of 2 usual steps. On CUDA None is 512.
        prefix_reuse: Whether a prompt that begins like another sequence in the arena reuses the KV of that one.
            Where tiers run one shape for ``deterministic=True``, no prompt reuses KV.
        state_checkpoints: Tokens between two checkpoints of recurrent state, from which a prompt continues that
            differs from a known sequence. For models that keep such state. The state is known only near the end of a
            sequence. Without checkpoints, a prompt that differs from the sequence earlier is processed from its
            beginning. A checkpoint is a copy of a slot's state, at the first end of a step or prompt chunk after every
            so many tokens; no prompt chunk is longer than that. Each slot holds
            ``(max_len - 1) // state_checkpoints`` of them; ``explain()`` reports their bytes.
        sampling: Whether the executables that draw tokens are built at once. ``spec.prepare(sampling=True)`` does so
            later. Otherwise the first request that samples, or that uses any other processor, waits some seconds for
            the build.
        logits_processor: Your own ``LogitsProcessor``, or a list of them, for every request. They are called as
            transformers calls them: ``processor(input_ids [B, P] int64, scores [B, V] float32) -> scores``, after the
            penalties and before temperature and the processors after it. Each is traced into the steps, and the trace
            is compared with the processor over many sequences. A processor that reads values in Python, keeps state
            between calls, or depends on lengths or other rows is refused.
        scores: Whether the arena holds ``output_logits`` and ``output_scores``. That is N * T * V * 8 bytes, N being
            ``max_batch + 1`` and T the largest tier + 1 (4 slots, K=7, a vocabulary of 50,000: 16 MB). Steps are not
            slower for requests without these options. ``logprobs`` and ``prompt_logprobs`` do not need it.
        free_originals: Whether to keep one copy of the weights. Each packed weight replaces the model's own as soon as
            it is packed; there are never two copies of all. The model's own forward still works, but slowly: it unpacks
            a weight whenever it reads it. The model's weights cannot be changed, and it cannot be wrapped again. A
            failed wrap restores the weights. Needs kernels that read packed weights (a CPU, Inductor, a C++ compiler).
        consume: The older name of ``free_originals``.
        save_hidden_states: The folder for the target's hidden states of every sequence. Or a
            :class:`~speccompile.hidden_states.SaveHiddenStates`, which has further options. Hidden states are kept for
            all slots until their sequences end (N * S * M values for each layer). Then they are written, each position
            once, without those of rejected drafts. ``mode="save_hidden_states"`` is the plain decoder with this option.
        passes: Your own passes. Objects of classes derived from :class:`speccompile.passes.Pass`; each is put into
            every pipeline that has its anchor (``after`` or ``before``), verified, printed and stored as the package's
            own passes are.
        learn: How the draft head learns from what is served: an `OnlineTraining`. See
            :mod:`speccompile.training`. For the modes ``eagle3`` and ``eagle3_one_model``, also beside a lookup. The
            text does not change, and no buffer moves. Hidden states are kept for all slots until their sequences end.
        adapters: How many LoRA adapters can be loaded at a time: an `Adapters(count=...)`. Their buffers are part of
            the arena. :meth:`Speculator.add_adapter` loads one, and ``submit(..., adapter=name)`` chooses it.
        rank_timeout: Seconds without an answer after which a rank of a sharded model counts as lost. It must be longer
            than the longest step. A rank that has ended is noticed at once.
        progress: called with ``(description, begins)`` when a part of the build begins (True) and when it has ended
            (False), also for executables that a request builds later. The logger ``speccompile`` reports the same
            with seconds, at level INFO. The callback must not wait for another thread that builds: one thread of a
            process builds at a time.
        mode_options: options of the mode, such as ``max_ngram=3``.

    Raises:
        UserError: an option or the model is not valid; ``speccompile.errors`` has a class for each reason.
        CaptureMismatch: the captured graph does not compute what the model computes.
    """
    if mode is NOT_GIVEN:
        mode = DEFAULT_MODE if mode_options.keys().isdisjoint(Auto.options) else Auto.name
    options = WrapOptions(
        mode=mode,
        tiers=tiers,
        max_batch=max_batch,
        max_len=max_len,
        backend=backend,
        policy=policy,
        acceptance=acceptance,
        deterministic=deterministic,
        weights=weights,
        calibration=calibration,
        kv=kv,
        kv_memory=kv_memory,
        max_waiting=max_waiting,
        prefill_budget=prefill_budget,
        prefix_reuse=prefix_reuse,
        state_checkpoints=state_checkpoints,
        sampling=sampling,
        logits_processor=logits_processor,
        scores=scores,
        free_originals=free_originals or consume,
        save_hidden_states=save_hidden_states,
        passes=passes,
        learn=learn,
        adapters=adapters,
        rank_timeout=rank_timeout,
        mode_options=mode_options,
    )
    with listening(progress), one_build():
        model, ranks = join_ranks(inner_model(model), options)
        with abandoned_on_error(ranks):
            return _wrap(model, options, ranks=ranks)


def load(path: str | os.PathLike[str], model: PreTrainedModel, *, progress: Progress | None = None) -> Speculator:
    """Call ``wrap`` with the options of the speculator that :meth:`Speculator.save` wrote to ``path``.

    The captures, steps and compiled code are read from the package. The capture check runs, as in every wrap. A package
    holds code: load only a package whose code you would run.

    Args:
        path: of the package.
        model: of the class, configuration and weights' shapes that were wrapped; weights may have other values.
        progress: as for ``wrap``.

    Raises:
        CorruptPackage: the file is missing, cut off or changed.
        ForeignPackage: it was written for another model, by other versions, or on another kind of machine.
        SpecCompileError: as ``wrap``.
    """
    path, model = Path(path), inner_model(model)
    if tensor_parallel_group(model) is not None:
        raise UnsupportedSharded(what="load()", reason="a package holds the steps of a whole model; call wrap")
    package = read_package(path)
    check_fits(package, path, model)
    install_machine_code(package.files)
    with listening(progress), one_build():
        return _wrap(model, read_wrap_options(package.manifest), PackageStorage(package.files))


def _wrap(
    model: PreTrainedModel, options: WrapOptions, storage: Storage | None = None, ranks: Ranks | None = None
) -> Speculator:
    options, quantized = _with_packs(model, options)

    def attempt(failed: Failed) -> Speculator:
        started = time.perf_counter()
        return _built(model, _planned(model, options, failed, ranks), storage, started)

    with quantizing(model, quantized):
        return first_that_works(attempt)


def _wrap_anew(model: PreTrainedModel, options: WrapOptions, spec: Speculator) -> None:
    """Build ``spec`` again.

    The build lock is not held while the old engine closes: closing waits for a step, and the step may wait for a build.
    """

    def attempt(failed: Failed) -> None:
        started = time.perf_counter()
        plan = _planned(model, options, failed)
        while True:
            spec.close_to_rebuild()
            with one_build():
                # Another thread may have rebuilt it before the lock was free.
                if spec.closed:
                    _built(model, plan, None, started, spec)
                    return

    _, quantized = _with_packs(model, options)
    try:
        with quantizing(model, quantized):
            first_that_works(attempt)
    except BaseException:
        # An option that is refused before the build leaves the speculator open.
        if spec.closed:
            spec.close()
        raise


def _with_packs(model: PreTrainedModel, options: WrapOptions) -> tuple[WrapOptions, QuantizedPacks | None]:
    """The options, with quantised weights replaced by their packs, and the packs."""
    packs = packs_for(model, options.weights)
    return options if packs is None else replace(options, weights=packs), packs


@one_build()
def _planned(model: PreTrainedModel, options: WrapOptions, failed: Failed, ranks: Ranks | None = None) -> Plan:
    """The plan, without the choices of ``auto`` that failed.

    Raises:
        ChoiceFailed: what ``auto`` chooses now cannot be built.
    """
    return make_plan(model, options, passed_over=failed, ranks=ranks)


def _built(
    model: PreTrainedModel, plan: Plan, storage: Storage | None, started: float, into: Speculator | None = None
) -> Speculator:
    """Build a speculator, or build ``into``, which is closed, again.

    Raises:
        ChoiceFailed: what ``auto`` chose cannot be built.
    """
    if plan.config.quantized is not None:
        plan.config.quantized.install(model)
    # Before the build: an error of the folder is reported at once.
    form = plan.config.target_form
    writer = None if plan.saves is None else RecordWriter(plan.saves, about(model, plan.saves, form))
    try:
        CacheFolder().drop_unread()
        with freeing_originals(model, plan.options.free_originals) as freed:
            with replacing(plan.config.choice), replacing_pool(plan.config), memory_named(model, plan.info):
                built = build(model, plan.info, plan.config, storage, freed)
            warn_of_positions(model, plan.info, plan.config.max_len)
            parts = (model, built, plan.policy, plan.options, writer)
            if into is None:
                spec = Speculator(*parts, _wrap_anew)
            else:
                spec = into
                spec.take(*parts)
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    # A handler may format the record later, when the speculator has changed.
    logger.info("wrapped in %.2f s: %s", time.perf_counter() - started, repr(spec))
    return spec
