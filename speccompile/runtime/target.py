"""The target model for requests: checks whether it has changed since ``wrap``, and its settings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.acceptance import Rule
from speccompile.errors import (
    InvalidInput,
    InvalidOption,
    ModelInTraining,
    PlaceholderToken,
    UnusableInputs,
    WeightsReplaced,
)
from speccompile.graph.state import Layout
from speccompile.graph_capture.guards import ModelGuard
from speccompile.graph_capture.held_tensors import HeldTensors
from speccompile.graph_capture.model_info import tensor_holders
from speccompile.multimodal.encoder import FeatureEncoder
from speccompile.multimodal.features import PromptFeatures
from speccompile.multimodal.inputs import Features
from speccompile.multimodal.model_inputs import is_per_token, placeholder_tokens
from speccompile.multimodal.source import SourceEncoder, SourceFeatures
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.runtime.arguments import Settings
from speccompile.runtime.inputs import read_count, token_list
from speccompile.sampling.host import CALLED_ON_HOST
from speccompile.sampling.pipeline import registered_processors
from speccompile.sampling.request import Sampling, read_sampling
from speccompile.sampling.user import UserProcessor

#: Options that allow or forbid each token.
GUIDED = ("guide", "prefix_allowed_tokens_fn", *CALLED_ON_HOST)
#: New tokens of a submitted request if neither it nor the model's generation_config sets their number.
NEW_TOKENS = 128
#: Number of values of each weight that are compared to detect a change.
SAMPLES = 4

State = tuple[object, ...]
EosTokens = int | Sequence[int] | torch.Tensor | None


class Target:
    """The wrapped model and the weights that its executables are bound to.

    Args:
        weights: weights by the path of the model's own parameter or buffer.
        constants: other tensors that the executables read; modules and hooks of the model may hold them.
        packs: copies of some weights, which the executables read instead.
        layout: layout of the arena, with V and the names of state tensors.
        rule: the rule that accepts drafts.
        processors: the user's own processors, in every step.
        drafter: weights of the mode's own network, which may be the target's; packs and KV depend on them, too.
        calls_host: whether a step may call the host.
        kv: dtype to which the executables round keys and values; None is the model's own.
        encoder: embeds the images of prompts, or runs the encoder of an encoder-decoder; None if the model reads text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Mapping[str, torch.Tensor],
        constants: Sequence[torch.Tensor],
        packs: WeightPacks,
        layout: Layout,
        rule: Rule,
        processors: Sequence[UserProcessor] = (),
        drafter: Iterable[torch.Tensor] = (),
        *,
        calls_host: bool = True,
        kv: torch.dtype | None = None,
        encoder: FeatureEncoder | SourceEncoder | None = None,
    ) -> None:
        self.model, self.kv, self.encoder = model, kv, encoder
        self._guard = ModelGuard(model)
        self.processors = processors
        self._rule = rule
        self.calls_host = calls_host
        self._layout = layout
        holders = tensor_holders(model)
        self._weights = [(path, *holders[path], weight, weight.data_ptr()) for path, weight in weights.items()]
        self._held = HeldTensors(model, [*weights.values(), *constants], self._guard.hooks())
        self._watched, self._drafter = WatchedTensors([*weights.values(), *constants]), WatchedTensors(drafter)
        self.packs = packs
        _alive.add(self)
        # The drafter's state after a change that leaves all KV in use, and the state that it counts as.
        self._changed_drafter: tuple[State, State] | None = None
        self._packed_state = self._read_state()

    @property
    def addresses(self) -> set[int]:
        """Addresses of the weights that the executables read, with those of the drafter."""
        return {address for *_, address in self._weights} | self._drafter.addresses

    @property
    def only_chooses(self) -> bool:
        """Whether the scores of a step's processors are only used to choose tokens."""
        return self._rule.draws_without_scores and not self.processors and "kept_scores" not in self._layout.tensors

    def release(self) -> None:
        """Allow the weights to move, since the executables have ended."""
        _alive.discard(self)

    @property
    def settings(self) -> Settings:
        """The settings of requests without a generation_config."""
        return Settings(self.model.generation_config)

    def check(self, settings: Settings | None = None) -> None:
        """Check that the model is unchanged. This runs before every request, some 0.6 ms for a model of 400 modules.

        Args:
            settings: settings of the request, if they have been checked; None checks the model's own.

        Raises:
            ModelInTraining, ModelChanged, WeightsReplaced: the model's text would differ from the wrapped model's.
            InvalidOption: its generation_config has an option that is not supported.
        """
        if self.model.training:
            raise ModelInTraining(model=type(self.model).__name__)
        if settings is None:
            self.settings.check()
        if not self._guard.unchanged():
            self._guard.check()
        for path, holder, name, weight, address in self._weights:
            now = holder.get(name)
            if now is None or (now.data_ptr() != address and not _is_rebuilt(now, weight)):
                raise WeightsReplaced(path=path)
        self._held.check()
        self.state_of_weights()

    def state_of_weights(self) -> tuple[object, ...]:
        """Return a value that differs after a change of weights in place. Earlier KV is then no longer the model's.

        It has torch's own marks of changes, and some values of each weight, since a change through ``.data`` (as in a
        merge of adapters) leaves no mark. Packed copies are updated.
        """
        state = self._read_state()
        if state != self._packed_state:
            self.packs.refresh()
            self._packed_state = state
        return state

    def change_drafter(self, change: Callable[[], None]) -> None:
        """Call ``change``, which changes weights of the drafter and their packs, between two steps. KV stays in use:
        the target's does not depend on the drafter, and the drafter's does not affect the text."""
        before = self._read_state()[1]
        change()
        self._changed_drafter = self._drafter.state(), before

    def _read_state(self) -> tuple[State, State]:
        drafter = self._drafter.state()
        if self._changed_drafter is not None and drafter == self._changed_drafter[0]:
            drafter = self._changed_drafter[1]
        return self._watched.state(), drafter

    def eos(self, given: EosTokens, settings: Settings | None = None) -> list[int]:
        """Return the given EOS ids. For None, return those of the generation_config that are in the vocabulary.

        Raises:
            InvalidInput, TooManyEosTokens: they are not token ids of the model.
        """
        if given is None:
            ids = token_list((settings or self.settings).config.eos_token_id)
            return [token for token in ids if 0 <= token < self._layout.vocab_size]
        ids = token_list(given)
        if wrong := [token for token in ids if not 0 <= token < self._layout.vocab_size]:
            reason = f"{wrong[0]} is not a token id (0 .. {self._layout.vocab_size - 1}); use [] for none"
            raise InvalidInput(name="eos_token_id", reason=reason)
        return ids

    def new_tokens(
        self,
        where: str,
        given: Any,
        prompt_length: int,
        settings: Settings | None = None,
        default: int = NEW_TOKENS,
    ) -> int:
        """Return the given ``max_new_tokens``; for None, that of the generation_config, or else ``default``.

        Raises:
            InvalidOption: it is not a whole number of at least 1.
        """
        settings = settings or self.settings
        config = settings.config
        if given is None and config.max_new_tokens is None and config.max_length is not None:
            most = read_count(settings.source("max_length"), "max_length", config.max_length) - prompt_length
            if most < 1:
                reason = f"the prompt already has {prompt_length} tokens; give max_new_tokens"
                raise InvalidOption(where=where, name="max_length", value=config.max_length, reason=reason)
            return most
        value = config.max_new_tokens if given is None else given
        return read_count(where, "max_new_tokens", default if value is None else value)

    def sampling(
        self,
        where: str,
        options: Mapping[str, Any],
        *,
        do_sample: bool | None,
        seed: int | None,
        eos: list[int],
        settings: Settings | None = None,
    ) -> Sampling | None:
        """Return a request's checked options. Options that it does not have are those of the generation_config."""
        settings = settings or self.settings
        sampling = read_sampling(
            where,
            options,
            do_sample=do_sample,
            seed=seed,
            config=settings.config,
            eos=eos,
            vocab_size=self._layout.vocab_size,
            num_logits=self._layout.num_logits,
            source=settings.source,
        )
        if self._rule.greedy_only and sampling is not None and sampling.values.get("temperature"):
            reason = f"the acceptance rule {self._rule.name!r} is for greedy decoding; use False, or wrap with another"
            raise InvalidOption(where=where, name="do_sample", value=True, reason=reason)
        values = {} if sampling is None else sampling.values
        for processor in registered_processors():
            given = [option.name for option in processor.options if option.name in values]
            if given and processor.state[0].name not in self._layout.tensors:
                reason = f"its processor {processor.name!r} was registered after wrap; call spec.rebuild()"
                raise InvalidOption(where=where, name=given[0], value=values[given[0]], reason=reason)
        guided = [name for name in GUIDED if name in values]
        if self._rule.breaks_guides and guided:
            reason = f"the acceptance rule {self._rule.name!r} accepts tokens that it forbids; wrap with another"
            raise InvalidOption(where=where, name=guided[0], value=values[guided[0]], reason=reason)
        called = [name for name in CALLED_ON_HOST if name in values]
        if called and not self.calls_host:
            reason = (
                "it is called on the host in the middle of a step, which a CUDA graph and the ranks of a sharded model "
                'cannot do; wrap with backend="inductor" and one rank, or give processors that are tensor operations '
                "to wrap(logits_processor=...)"
            )
            raise InvalidOption(where=where, name=called[0], value=values[called[0]], reason=reason)
        return Sampling({}) if sampling is None and self.processors else sampling

    def features(self, input_ids: torch.Tensor, kept: torch.Tensor, inputs: Mapping[str, Any]) -> list[Features | None]:
        """Embed the images of a batch of prompts. Arguments are those of
        :meth:`~speccompile.multimodal.encoder.FeatureEncoder.encode`.

        Raises:
            UnusableInputs: the model embeds only text, or cannot use the inputs.
        """
        if self.encoder is None and not inputs:
            return [None] * len(input_ids)
        if self.encoder is None:
            reason = f"{type(self.model).__name__} is decoded as a model of text, which has no {min(inputs)}"
            raise UnusableInputs(reason=reason)
        return [*self.encoder.encode(input_ids, kept, inputs)]

    def features_of_one(self, prompt: list[int], inputs: Mapping[str, Any] | Features | None) -> Features | None:
        """Embed the images of one prompt, or return the given embeddings. Inputs with a value for each token may be
        ``[P]`` or ``[1, P]``.

        Raises:
            UnusableInputs: the model embeds only text, cannot use the inputs, or they are those of another prompt.
        """
        ids = torch.tensor([prompt])
        if isinstance(self.encoder, SourceEncoder) and not isinstance(inputs, PromptFeatures):
            return self.encoder.encode_one(prompt, inputs)
        if isinstance(inputs, SourceFeatures):
            raise UnusableInputs(reason="they are the output of an encoder, which this model does not have")
        if isinstance(inputs, PromptFeatures):
            placeholders = torch.tensor(sorted(placeholder_tokens(self.model.config)))
            if inputs.places.tolist() != torch.isin(ids[0], placeholders).nonzero()[:, 0].tolist():
                raise UnusableInputs(reason="they were embedded for a prompt with other placeholder tokens")
            return inputs
        given = {} if inputs is None else dict(inputs)
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and is_per_token(name):
                given[name] = value.reshape(1, -1)
        return self.features(ids, torch.ones_like(ids, dtype=torch.bool), given)[0]

    def check_prompt(self, prompt: list[int], features: Features | None = None) -> None:
        """Check that steps can continue ``prompt``.

        Args:
            features: the embeddings of its images.

        Raises:
            PlaceholderToken: it has a token that stands for an image or other input that is not text, without one.
            InvalidInput: it is shorter than a processor requires.
        """
        placeholders = {} if features is not None else placeholder_tokens(self.model.config)
        if found := placeholders.keys() & set(prompt):
            position = next(index for index, token in enumerate(prompt) if token in found)
            token = prompt[position]
            raise PlaceholderToken(position=position, token=token, name=placeholders[token])
        for processor in self.processors:
            if len(prompt) < processor.least:
                reason = f"it has {len(prompt)} tokens, and the logits processor {processor.name} fails for fewer than "
                raise InvalidInput(name="the prompt", reason=f"{reason}{processor.least}")


#: Targets of the open speculators of this process.
_alive: weakref.WeakSet[Target] = weakref.WeakSet()


def addresses_in_use() -> set[int]:
    """Return the addresses of weights that executables of open speculators read."""
    return {address for target in list(_alive) for address in target.addresses}


class WatchedTensors:
    """Tensors whose values are watched for changes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        samples = [_sample(tensor.detach()) for tensor in self._tensors if _has_dense_storage(tensor.detach())]
        self._samples = [[sample for sample in samples if sample.dtype == dtype] for dtype in _dtypes(samples)]

    @property
    def addresses(self) -> set[int]:
        """Addresses of the tensors."""
        return {tensor.data_ptr() for tensor in self._tensors}

    def state(self) -> State:
        """Return torch's own marks of changes, and some values of each tensor."""
        marks = sum(0 if tensor.is_inference() else tensor._version for tensor in self._tensors)
        return marks, *(bytes(torch.cat(samples).view(torch.uint8).tolist()) for samples in self._samples)


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of some values, spread over the weight."""
    count = min(SAMPLES, weight.numel())
    return weight.as_strided((count,), (weight.numel() // count,))


def _has_dense_storage(weight: torch.Tensor) -> bool:
    # A subclass (quantised weights) may have any layout in memory.
    return type(weight) is torch.Tensor and weight.is_contiguous() and weight.numel() > 0


def _dtypes(tensors: list[torch.Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}


def _is_rebuilt(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a buffer begins with the earlier values: XGLM's forward builds a longer table of positions when a
    sequence needs one."""
    if isinstance(now, nn.Parameter) or (now.dtype, now.dim()) != (before.dtype, before.dim()):
        return False
    return torch.equal(now[tuple(slice(size) for size in before.shape)].to(before.device), before)
