"""What ``wrap`` returns: decode, swap tiers, look at everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from speccompile.build import Build, BuildConfig, prefill_pipeline, tier_pipeline
from speccompile.errors import (
    Closed,
    InvalidInput,
    InvalidOption,
    ModelInTraining,
    UnknownOption,
    WeightsReplaced,
)
from speccompile.explain import explain
from speccompile.graph_capture.graph import Route
from speccompile.graph_capture.support import named_tensors
from speccompile.lowering.backends import Backend
from speccompile.lowering.tier import Tier
from speccompile.passes.pipeline import Pipeline, Stages
from speccompile.runtime.arena import Arena
from speccompile.runtime.check import CheckReport, first_difference, transformers_greedy
from speccompile.runtime.engine import Engine
from speccompile.runtime.generate import (
    Streamer,
    check_generation_config,
    decode,
    padded,
    read_prompt,
    read_prompts,
    token_list,
)
from speccompile.runtime.policy import Fixed, Policy, check_tier
from speccompile.runtime.stats import Stats

EosTokens = int | Sequence[int] | torch.Tensor | None


class Speculator:
    """A wrapped model. Made by :func:`speccompile.wrap`; a context manager that closes itself."""

    def __init__(self, model: PreTrainedModel, config: BuildConfig, build: Build, policy: Policy) -> None:
        self._model: PreTrainedModel | None = model
        self._config = config
        self._build: Build | None = build
        graph = build.tiers[max(build.tiers)].graph
        self._weights = {p.path: p.value for p in graph.ports.values() if p.path and not p.own and p.value is not None}
        self._engine: Engine | None = Engine(build.arena, build.tiers, build.prefill, policy, ready=config.mode.ready)

    # --- decoding --------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        eos_token_id: EosTokens = None,
        pad_token_id: int | None = None,
        streamer: Streamer | None = None,
        do_sample: bool = False,
        **unknown: Any,
    ) -> torch.Tensor:
        """Decode greedily, as ``model.generate(do_sample=False)`` does.

        Args:
            input_ids: int64 ``[B, P]``, padded on the left.
            attention_mask: ``[B, P]``, 0 at padding.
            max_new_tokens: most new tokens of a row. A row also ends at ``max_len``, with a warning.
            eos_token_id: one or several ids that end a row; None takes those of the model's generation_config.
            pad_token_id: what rows that end early are padded with; None takes generation_config's, else the first
                EOS id.
            streamer: a transformers streamer, for one row.
            do_sample: only False, for now.

        Returns:
            int64 ``[B, P + new]``, padded as transformers pads.

        Raises:
            UserError: see the classes in ``speccompile.errors``.
        """
        engine, model = self._open()
        if unknown:
            raise UnknownOption(
                where="generate",
                names=", ".join(sorted(unknown)),
                known="input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, streamer, do_sample",
            )
        if do_sample:
            raise InvalidOption(
                where="generate",
                name="do_sample",
                value=do_sample,
                reason="only greedy decoding is built; use False",
            )
        _check_max_new_tokens(max_new_tokens)
        self._check_model(model)
        eos = self._eos(eos_token_id)
        if not (pad_token_id is None or isinstance(pad_token_id, int)):
            raise InvalidInput(name="pad_token_id", reason="it has to be one token id")
        pad = model.generation_config.pad_token_id if pad_token_id is None else pad_token_id
        prompts = read_prompts(input_ids, attention_mask, pad, eos, engine.arena.layout)
        if streamer is not None:
            if not isinstance(streamer, Streamer):
                raise InvalidInput(name="streamer", reason="it has no methods put and end")
            if len(prompts) > 1:
                raise InvalidInput(name="streamer", reason="it can follow one row, and there are more")
            streamer.put(input_ids.cpu())
        requests = decode(engine, prompts, max_new_tokens=max_new_tokens, eos=eos, streamer=streamer)
        return padded(input_ids, requests, pad if pad is not None else eos[0] if eos else 0)

    def check(
        self,
        prompts: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
        *,
        max_new_tokens: int = 64,
        eos_token_id: EosTokens = None,
        reference: Literal["transformers", "plain"] = "transformers",
    ) -> CheckReport:
        """Decode ``prompts`` (token ids each) and compare with plain decoding.

        Args:
            reference: ``transformers`` is the model's own greedy ``generate``, ``plain`` this speculator's K=0 tier.

        Returns:
            Equal or not, and for each difference its place and the logit change that explains it.
        """
        engine, model = self._open()
        if reference not in ("transformers", "plain"):
            raise InvalidOption(
                where="check", name="reference", value=reference, reason="use 'transformers' or 'plain'"
            )
        _check_max_new_tokens(max_new_tokens)
        self._check_model(model)
        eos = self._eos(eos_token_id)
        differences = []
        token_ids = [read_prompt(given, index, engine.arena.layout) for index, given in enumerate(prompts)]
        for index, prompt in enumerate(token_ids):
            room = min(max_new_tokens, engine.arena.layout.max_len - len(prompt))
            got = decode(engine, [prompt], max_new_tokens=room, eos=eos)[0].new_tokens
            if reference == "transformers":
                expected = transformers_greedy(model, prompt, room, eos)
            else:
                policy, engine.policy = engine.policy, Fixed(0)
                try:
                    expected = decode(engine, [prompt], max_new_tokens=room, eos=eos)[0].new_tokens
                finally:
                    engine.policy = policy
            difference = first_difference(model, index, prompt, expected, got)
            if difference is not None:
                differences.append(difference)
        name = "transformers' greedy generate" if reference == "transformers" else "the K=0 tier"
        return CheckReport(len(prompts), name, tuple(differences))

    def set_tier(self, draft_len: int) -> None:
        """Use draft length ``draft_len`` from the next step on; allowed at any time, also while decoding.

        Raises:
            UnknownTier: no tier of that draft length was built.
        """
        engine, _ = self._open()
        check_tier(draft_len, engine.tiers)
        engine.policy = Fixed(draft_len)

    # --- looking ---------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self._open()[0]

    @property
    def tiers(self) -> Mapping[int, Tier]:
        """Tiers by draft length."""
        return self.engine.tiers

    @property
    def prefill(self) -> Mapping[int, Tier]:
        """Prefill executables by chunk width."""
        return self.engine.prefill_tiers

    @property
    def stages(self) -> Stages:
        """Stages of the largest tier, by pass; those of another are ``spec.tiers[K].stages``."""
        return self.tiers[max(self.tiers)].stages

    @property
    def arena(self) -> Arena:
        return self.engine.arena

    @property
    def backend(self) -> Backend:
        """What lowers step graphs here; any stage can be lowered with it."""
        self._open()
        return self._config.backend

    @property
    def stats(self) -> Stats:
        return self.engine.stats

    @property
    def policy(self) -> Policy:
        return self.engine.policy

    @property
    def route(self) -> Route:
        """How attention was captured: by the attention op (``"attention"``) or as the model's own (``"eager"``)."""
        self._open()
        assert self._build is not None
        return self._build.observed.route

    @property
    def route_reason(self) -> str:
        """Why not by the attention op; empty if by it."""
        self._open()
        assert self._build is not None
        return self._build.observed.reason

    @property
    def build_seconds(self) -> dict[str, float]:
        """Seconds of each part of the build."""
        self._open()
        assert self._build is not None
        return dict(self._build.seconds)

    def pipeline(self, draft_len: int | None = None, *, prefill: int | None = None) -> Pipeline:
        """The passes of a tier (or of a prefill width), to run, bisect or change: ``spec.pipeline(3).without(...)``.

        Its :meth:`~speccompile.passes.pipeline.Pipeline.run` takes ``spec.stages["outline"].graph``.
        """
        engine, _ = self._open()
        if draft_len is not None:
            check_tier(draft_len, engine.tiers)
        if prefill is not None:
            return prefill_pipeline(self._config, prefill)
        return tier_pipeline(self._config, max(self._config.tiers) if draft_len is None else draft_len)

    def explain(self) -> str:
        """What was built and why, in plain words."""
        engine, _ = self._open()
        assert self._build is not None
        return explain(self._config, self._build, engine)

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the arena, the executables and the model; the model itself stays as it was."""
        self._engine = self._build = self._model = None

    def __enter__(self) -> Speculator:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> tuple[Engine, PreTrainedModel]:
        if self._engine is None or self._model is None:
            raise Closed()
        return self._engine, self._model

    def _check_model(self, model: PreTrainedModel) -> None:
        """The model is still the one that was wrapped, and asks for nothing that is not built."""
        if model.training:
            raise ModelInTraining(model=type(model).__name__)
        check_generation_config(model.generation_config)
        now = named_tensors(model)
        for path, weight in self._weights.items():
            if now[path].data_ptr() != weight.data_ptr():
                raise WeightsReplaced(path=path)

    def _eos(self, given: EosTokens) -> list[int]:
        _, model = self._open()
        return token_list(model.generation_config.eos_token_id if given is None else given)


def _check_max_new_tokens(value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidOption(
            where="generate", name="max_new_tokens", value=value, reason="it has to be an int of at least 1"
        )
