"""The object that ``wrap`` returns: it decodes, checks, changes tiers, learns and saves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

from speccompile.adapters.peft_source import read_adapter
from speccompile.compiler.adapter_heads import head_values
from speccompile.compiler.build import saved_files
from speccompile.compiler.package import check_savable, make_manifest, write_package
from speccompile.compiler.save_weights import save_weights
from speccompile.errors import InvalidOption, NoMemory, UnusableInputs
from speccompile.graph.keys import DRAWING
from speccompile.graph.state import DrafterMemory
from speccompile.multimodal.source import SourceEncoder
from speccompile.runtime.check import CheckReport, Reference, check_texts
from speccompile.runtime.collect import save_texts
from speccompile.runtime.drafter_memory import read_memory, write_memory
from speccompile.runtime.inputs import read_count, read_prompt
from speccompile.runtime.policy_controller import Fixed, check_tier
from speccompile.runtime.request_options import SaveOptions
from speccompile.runtime.target import EosTokens
from speccompile.runtime.token_trace import read_top
from speccompile.speculator.generation import Generation
from speccompile.speculator.inspection import Inspection
from speccompile.speculator.model_interface import ModelInterface
from speccompile.utils.numbers import python_numbers
from speccompile.utils.options import flag

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

    from speccompile.runtime.engine import Engine


class Speculator(Generation, Inspection, ModelInterface):
    """A wrapped model, created by :func:`speccompile.wrap`. It is a context manager that closes itself."""

    def check(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
        *,
        max_new_tokens: int = 64,
        eos_token_id: EosTokens = None,
        reference: Reference = "transformers",
        adapter: str | None = None,
    ) -> CheckReport:
        """Decode ``prompts`` (token ids each) and compare the result with plain decoding.

        Args:
            reference: ``transformers`` is the model's own greedy ``generate``, on all ranks of a sharded model;
                ``plain`` is this speculator's K=0 tier.
            adapter: the name of the LoRA adapter that both use; None means the model without adapters.

        Returns:
            Whether both are equal, and for each difference its position and the logit change that explains it. With
            ``weights="int8"`` it also has the change that rounding causes there by itself: two forwards of such a model
            never agree better than that. ``plain`` must always be equal.
        """
        engine, target = self._open()
        if isinstance(target.encoder, SourceEncoder):
            reason = "check only has prompts; compare spec.generate(...) with model.generate(...)"
            raise UnusableInputs(reason=reason)
        if reference not in ("transformers", "plain"):
            raise InvalidOption(
                where="check", name="reference", value=reference, reason="use 'transformers' or 'plain'"
            )
        max_new_tokens = read_count("check", "max_new_tokens", max_new_tokens)
        target.check()
        eos = target.eos(eos_token_id)
        token_ids = [read_prompt(given, index, engine.arena.layout) for index, given in enumerate(prompts)]
        assert self._answer is not None
        found = engine.adapters.find("check", adapter)
        return check_texts(engine, target, token_ids, max_new_tokens, eos, reference, self._answer, found)

    def add_adapter(
        self,
        name: str,
        source: str | os.PathLike[str] | PeftModel,
        head: str | os.PathLike[str] | nn.Module | None = None,
    ) -> None:
        """Load a LoRA adapter between two steps. Nothing is compiled and no buffer moves. Requests can then name it.

        Args:
            name: any name that no loaded adapter has.
            source: a folder that PEFT's ``save_pretrained`` wrote, the name of such a repository, or a ``PeftModel``
                with one active adapter, over another copy of the base model.
            head: the draft head of requests with this adapter, of the sizes of the one that ``wrap`` received: a head
                or its checkpoint, as ``draft=`` accepts it; or a LoRA adapter of that head, as ``source``. None is the
                shared head.

        Raises:
            InvalidOption: the model was wrapped without ``adapters=``, or a head is given without
                ``Adapters(head_rank=...)``.
            InvalidAdapter: the adapter cannot be read, is not plain LoRA, exceeds the buffers, or has the name of a
                loaded adapter; or the head is not the shared one with other weights.
            InvalidHead: the checkpoint of the head cannot be read.
            AdaptersFull: no position for an adapter is free.
            InsideStep: the caller is a callback of a step.
        """
        engine, target = self._open()
        engine.loop.refuse_callback("add_adapter()")
        build = self._build
        assert build is not None
        pairs = read_adapter(name, source, engine.adapters.check_name(name), target.model)
        engine.adapters.add(name, pairs, head_values(name, head, build.config, build.info, target.model))

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter, so no further request can name it. Requests that wait or run keep it until they end; then
        its position is free.

        Raises:
            InvalidOption: the model was wrapped without ``adapters=``.
            UnknownAdapter: no adapter of that name is loaded.
            InsideStep: the caller is a callback of a step.
        """
        self.engine.adapters.remove(name)

    def learn(self, steps: int) -> Any:
        """Train the draft head now, on the texts that were served. Use the new weights if they draft better on the
        newest of these. Other threads may decode meanwhile.

        Args:
            steps: training steps.

        Returns:
            A :class:`~speccompile.training.online_learner.Learnt`: the number of steps, whether the new weights are in
            use, and the acceptance before and after.

        Raises:
            InvalidOption: the model was wrapped without ``learn=``.
            InsideStep: the caller is a callback of a step.
            TrainingDiverged: the loss is not finite. The head does not change.
        """
        self.engine.loop.refuse_callback("learn()")
        return self.learner.learn(read_count("learn", "steps", steps))

    def save_head(self, folder: str | os.PathLike[str]) -> None:
        """Write the current draft head, with all that it has learnt, as a checkpoint that ``draft=`` loads.

        Raises:
            InvalidOption: the model was wrapped without ``learn=``.
            InsideStep: the caller is a callback of a step.
            OSError: the folder cannot be written.
        """
        self.engine.loop.refuse_callback("save_head()")
        self.learner.save(Path(folder))

    def save_hidden_states(
        self,
        texts: Sequence[Sequence[int] | torch.Tensor],
        *,
        ids: Sequence[str | None] | None = None,
        loss_masks: Sequence[Sequence[int]] | None = None,
        max_new_tokens: int = 1,
        do_sample: bool | None = None,
        seed: int | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        """Save the hidden states of many texts, and, with ``max_new_tokens`` above 1, of the model's continuations.
        Texts that already have records are skipped, so a new process continues where a killed one stopped. The method
        returns when all records are on the disk.

        Args:
            texts: token ids each.
            ids: Ids of the records. None is a digest of the text; equal texts share one record.
            loss_masks: For each text a 0 or 1 for each of its tokens. None is all 1 if the model adds no continuation,
                else all 0.
            max_new_tokens: Most new tokens. The last token has no hidden states, so 1 saves only the texts.
            do_sample: Whether tokens are drawn; otherwise the most likely one is chosen.
            seed: Seed of what is drawn. Text i draws as ``seed + i`` does.
            progress: Whether to show a bar on stderr, if that is a terminal.
            options: options of the sampling pipeline, as :meth:`generate` accepts them.

        Raises:
            InvalidOption: the wrap does not save hidden states.
            RecordsNotWritten: records cannot be written to the disk.
            UserError: an argument is not valid.
            RequestFailed: a text could not be processed; the records of the other texts are kept.
        """
        engine, target = self._open()
        save_texts(
            engine,
            target,
            self.hidden_states,
            texts,
            SaveOptions(
                ids=ids,
                loss_masks=loss_masks,
                max_new_tokens=max_new_tokens,
                do_sample=do_sample,
                seed=seed,
                progress=progress,
                sampling=options,
            ),
        )

    def set_tier(self, draft_len: int | None) -> None:
        """Use draft length ``draft_len`` from the next step on; allowed at any time, also while decoding.

        It replaces the policy. None returns to the policy of ``wrap``, which starts without history; tiers that it has
        timed are not timed again.

        Raises:
            UnknownTier: no tier of that draft length was built.
        """
        engine, _ = self._open()
        if draft_len is None:
            engine.policy = self._wrap_policy
            return
        draft_len = python_numbers(draft_len)
        check_tier(draft_len, engine.draft_lens)
        engine.policy = Fixed(draft_len)

    @contextlib.contextmanager
    def record_trace(
        self, path: str | os.PathLike[str], *, tokens: bool = False, top: int | None = None
    ) -> Iterator[None]:
        """Record a trace within the ``with`` statement. ``path`` receives JSON lines with the offered drafts, the
        accepted drafts and the duration of each step, for ``speccompile policy-lab``. Record with ``policy="fixed:K"``
        of the largest tier: a smaller tier does not verify all offered drafts, so the fate of the others is unknown.

        Args:
            path: path of the file, which is overwritten.
            tokens: Also record the tokens: prompts, drafts, what was emitted, and the drafter and the score of each
                draft. :func:`speccompile.traces.read_token_trace` reads them as columns, and
                :func:`speccompile.traces.replay` judges another drafter on them.
            top: With ``tokens``, the number of the target's likeliest tokens to record at each emitted token, with
                their log-probabilities and the entropy of the target's distribution. None is 4. They need
                ``wrap(scores=True)``, and steps of the kind ``scored``, which are slower than greedy ones. 0 records
                none, with the steps that run without a trace; the ids of rejected drafts are then unknown.

        Raises:
            InvalidOption: a tier is a tree; or an option is not valid, or needs another wrap.
            OSError: ``path`` cannot be written.
        """
        engine, _ = self._open()
        likeliest = read_top(tokens, top, engine.arena)
        if likeliest:
            # A step that waits for its executable would have a wrong duration.
            engine.prepare("scored", watched=True)
        layout = engine.arena.layout
        about = {
            "drafters": list(self.mode.drafter_names),
            "max_len": layout.max_len,
            "vocab_size": layout.vocab_size,
            "text_invariant": self._config.rule.text_invariant,
        }
        engine.policies.record(path, top=likeliest, about=about)
        try:
            yield
        finally:
            engine.policies.end_record()

    def prepare(self, *, sampling: bool = False, mixed: bool = False) -> None:
        """Build executables now for which the first request that needs them would wait.

        Args:
            sampling: tiers that draw tokens, for requests with ``do_sample`` or a processor.
            mixed: tiers that process prompts along with a step of other requests. With ``sampling`` also those that
                draw tokens.

        Raises:
            InvalidOption: an argument is not True or False.
            Closed: the speculator was closed.
        """
        flag("prepare", "sampling", sampling)
        flag("prepare", "mixed", mixed)
        engine, _ = self._open()
        kinds = {self._config.kind, *([kind for kind in self._config.kinds if kind in DRAWING] if sampling else [])}
        for kind in sorted(kinds):
            engine.prepare(kind, watched=mixed)

    # --- keeping ---------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a package to the file ``path``, completely or not at all; :func:`speccompile.load` reads it.

        The package has the options given to ``wrap``, the captured graph, the steps built so far, and Inductor's code
        for the decoder layers. The code includes machine code, which is compiled once more for the package (some 20 s).
        The package has no weights and no requests. See :mod:`speccompile.compiler.package`.

        Raises:
            CannotSave: an option of ``wrap`` is your own code (a logits processor, a policy, an acceptance rule), or
                the model has hooks, or its weights were freed. Nothing is compiled in this case.
            LoweringError: Inductor's caches are off, so nothing can be saved, or it cannot compile.
            OSError: ``path`` cannot be written.
        """
        engine, target = self._open()
        self._refuse_sharded("save()", "each rank has only the steps of its part")
        assert self._build is not None
        # The backend that "auto" chose: steps and bodies are built for it.
        given = replace(self._options, backend=self._config.backend.name)
        if (choice := self._config.choice) is not None:
            # The options of "auto" are those of its choice.
            given = replace(given, mode=choice.mode, mode_options=choice.options)
        path = Path(path)
        check_savable(path, target.model, given)
        files = saved_files(target.model, self._build, self._config.backend, engine.table.built)
        write_package(path, make_manifest(target.model, given, engine.arena.layout.tensors, files), files)

    def save_memory(self, path: str | os.PathLike[str]) -> None:
        """Write what the drafter has learned from earlier requests to the file ``path``, completely or not at all:
        the tables of mode ``recycle``, and the texts that ``suffix`` remembers. Requests may run.

        The file holds parts of the texts of these requests.

        Raises:
            NoMemory: the mode learns nothing from earlier requests.
            UnsupportedSharded: the model is sharded over ranks.
            InsideStep: the caller is a callback of a step.
            OSError: ``path`` cannot be written.
        """
        engine, memory = self._memory("save")
        write_memory(Path(path), memory, engine.arena, engine.loop)

    def load_memory(self, path: str | os.PathLike[str]) -> None:
        """Replace what the drafter has learned by what :meth:`save_memory` wrote. Requests may run.

        Raises:
            NoMemory: the mode learns nothing from earlier requests.
            CorruptMemory: the file is damaged.
            ForeignMemory: it is of another mode, of other options, or of another vocabulary.
            UnsupportedSharded: the model is sharded over ranks.
            InsideStep: the caller is a callback of a step.
            OSError: ``path`` cannot be read.
        """
        engine, memory = self._memory("load")
        read_memory(Path(path), memory, engine.arena, engine.loop)

    def _memory(self, verb: str) -> tuple[Engine, DrafterMemory]:
        engine, _ = self._open()
        self._refuse_sharded(f"{verb}_memory()", "all ranks draft from one memory, and a file would be of one rank")
        engine.loop.refuse_callback(f"{verb}_memory()")
        mode = self._config.mode
        memory = mode.memory if self._config.max_draft_len else DrafterMemory()
        if not memory.tables:
            raise NoMemory(mode=mode.label, verb=verb)
        return engine, memory

    def save_weights(
        self,
        folder: str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        head: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the rounded weights of the target, as steps read them, with its configuration, to a new folder that
        :func:`speccompile.pretrained.load` maps. :func:`speccompile.quantize` writes the same without a wrap.

        Args:
            folder: a new folder; the folder that it is in must exist.
            tokenizer: is written too. Commands need it.
            head: folder of a draft head, which is copied; mode ``auto`` uses it.

        Raises:
            CannotSaveWeights: no weight is rounded, the model is on a GPU, has an adapter in its layers, or is not what
                transformers loads with its configuration.
            UnsupportedSharded: each rank has only a part of the weights.
            InvalidOption: ``folder`` contains files.
            OSError: the disk is full or cannot be written.
        """
        _, target = self._open()
        self._refuse_sharded("save_weights()", "each rank has only the weights of its part")
        assert self._build is not None
        head = None if head is None else Path(head).expanduser().absolute()
        path = Path(folder).expanduser().absolute()
        save_weights(path, target.model, self._build.packs, tokenizer=tokenizer, head=head)


# transformers' pipelines log an error for a class that is not registered for their task.
for _mapping in (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
):
    cast(Any, _mapping).register(Speculator, Speculator, exist_ok=True)
