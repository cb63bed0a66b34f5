"""Multi-token prediction (MTP) modules as a head. Each has a projection and a decoder layer of the target's own class.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2, and ``modeling_layers.MtpModel`` of
transformers. Row i of module k (from 0 on) reads the token at position i + k + 1, and the output of the module before
it at row i. Module 0 reads the target's hidden state there. The row predicts the token at position i + k + 2. Its KV is
stored at position i of the module's own cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from speccompile.errors import InvalidHead, error_line
from speccompile.graph.layer_state import KVShape
from speccompile.graph.step_graph import Route
from speccompile.graph_capture.attention import IMPLEMENTATION, Running, running
from speccompile.graph_capture.cache import RecordingCache, SlotCache, StepCache
from speccompile.graph_capture.experts import EXPERTS
from speccompile.graph_capture.masks import Mask, MaskLog, UnsupportedByRoute
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.modes.mtp.variants import DEEPSEEK, VARIANTS, MtpVariant
from speccompile.modes.network.draft_head import DraftHead, HeadCache
from speccompile.utils.transformers_version import CACHE

SOURCE = "of MTP modules"
ROWS, WIDTH = 2, 3


@dataclass(frozen=True)
class Observed:
    """Observed properties of the modules: the route by which their attention is captured, and the KV shapes of each."""

    route: Route
    kv: dict[int, KVShape]


class MtpModule(nn.Module):
    """The norms, projection and decoder layer of a module. The norm after them belongs to the head."""

    def __init__(self, target: PreTrainedModel, config: PreTrainedConfig, index: int, variant: MtpVariant) -> None:
        super().__init__()
        size = config.hidden_size
        self.hidden_first = variant.hidden_first
        self.enorm = norm_of(target, config)
        self.hnorm = norm_of(target, config)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(decoder_layers(target)[1][-1])(config, index)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **layer: Any) -> torch.Tensor:
        """The module's output ``[B, T, M]``.

        Args:
            embedded, hidden: ``[B, T, M]``.
            layer: further arguments of the decoder layer.
        """
        both = [self.enorm(embedded), self.hnorm(hidden)]
        out: torch.Tensor = self.block(self.eh_proj(torch.cat(both[::-1] if self.hidden_first else both, -1)), **layer)
        return out


class MtpHead(DraftHead):
    """A head of MTP modules. Embedding, final norm, rotary table and lm_head are the target's own.

    Args:
        target: the model whose hidden states the modules read.
        modules: the number of modules.
        variant: the structure of the modules; None is that of the target's family.

    Raises:
        InvalidHead: a module cannot be built from the target's layers. The message states the reason.
    """

    def __init__(self, target: PreTrainedModel, modules: int, variant: MtpVariant | None = None) -> None:
        super().__init__()
        base = target.get_decoder()
        for name in ("norm", "rotary_emb"):
            if not isinstance(getattr(base, name, None), nn.Module):
                raise InvalidHead(source=SOURCE, reason=f"{type(base).__name__} has no module {name!r} to share")
        text = target.config.get_text_config(decoder=True)
        self.variant = variant or VARIANTS.get(text.model_type, DEEPSEEK)
        self.vocab_size = int(text.vocab_size)
        #: The target's layer whose output the modules read.
        self.last_layer = len(decoder_layers(target)[1]) - 1
        try:
            self.config = module_config(text, modules, self.variant)
            built = [MtpModule(target, self.config, index, self.variant) for index in range(modules)]
            self.masks = [layer_mask(self.config, index) for index in range(modules)]
            self.rotary_options = [rotary_options(self.config, index) for index in range(modules)]
        except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            kind = type(decoder_layers(target)[1][-1]).__name__
            raise InvalidHead(source=SOURCE, reason=f"a {kind} cannot be created: {error_line(error)}") from error
        self.layers = nn.ModuleList(built)
        own_norm = self.variant.last_norm
        self.norms = nn.ModuleList([norm_of(target, self.config) if own_norm else nn.Identity() for _ in built])
        self.embed_tokens, self.final_norm = target.get_input_embeddings(), base.norm
        self.rotary_emb, self.lm_head = base.rotary_emb, target.get_output_embeddings()
        self._settle(target)

    def _settle(self, target: PreTrainedModel) -> None:
        """Move the head's own tensors to the target's device, each in the dtype that it has in the target's last layer.

        Some families keep a few tensors in float32. Shared modules are not changed.
        """
        like = dict(decoder_layers(target)[1][-1].state_dict())
        self.training = False
        for own in (self.layers, self.norms):
            own.to(target.device).eval().requires_grad_(False)
            for name, tensor in [*own.named_parameters(), *own.named_buffers()]:
                known = like.get(name.partition(".block.")[2])
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(target.dtype if known is None else known.dtype)

    @staticmethod
    def random(target: PreTrainedModel, modules: int = 1, seed: int = 0, variant: MtpVariant | None = None) -> MtpHead:
        """Modules with random weights, in the target's dtype, on its device."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            head = MtpHead(target, modules, variant)
            for name, weight in [*head.layers.named_parameters(), *head.norms.named_parameters()]:
                noise = torch.randn(weight.shape)
                if weight.dim() < 2:
                    # A norm stays close to its initial values; those of experts and biases may be uninitialized.
                    mean = weight.float().cpu() if "norm" in name or name.endswith("weight") else 0.0
                    weight.copy_(mean + 0.1 * noise)
                else:
                    weight.copy_(noise * weight.shape[-1] ** -0.5)
        return head

    def first(self) -> MtpHead:
        """A head of only the first module."""
        if len(self.layers) == 1:
            return self
        head = copy.copy(self)
        head._modules = {**self._modules, "layers": self.layers[:1], "norms": self.norms[:1]}
        return head

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def numbers(self) -> set[int]:
        return {value for value in self.config.to_dict().values() if isinstance(value, int)}

    @property
    def kv(self) -> Mapping[int, KVShape]:
        return {index: shape for index, shape in self.observed.kv.items() if index < len(self.layers)}

    @property
    def route(self) -> Route:
        return self.observed.route

    @cached_property
    def observed(self) -> Observed:
        """Properties of the modules, observed in a run on a few tokens, in the same way as a target's.

        Raises:
            InvalidHead: a module cannot be captured by either route. The message states the reason.
        """
        reasons = []
        for route in ("attention", "eager"):
            try:
                return self._observe(route)
            except UnsupportedByRoute as unfit:
                reasons.append(str(unfit))
            except Exception as error:
                if route == "attention":
                    # For example, a module that reads its mask as a tensor.
                    continue
                raise InvalidHead(source=SOURCE, reason=f"a module does not run: {error_line(error)}") from error
        raise InvalidHead(source=SOURCE, reason=f"a module cannot be captured: {reasons[-1]}")

    def _observe(self, route: Route) -> Observed:
        weight = cast(nn.Linear, self.layers[0].eh_proj).weight
        device = weight.device
        positions = torch.arange(WIDTH, device=device).repeat(ROWS, 1)
        tokens = torch.arange(ROWS * WIDTH, device=device).view(ROWS, WIDTH) % self.vocab_size
        hidden = torch.ones((ROWS, WIDTH, self.hidden_size), dtype=weight.dtype, device=device)
        cache = RecordingCache()
        with torch.no_grad():
            run = self._run(tokens, positions, hidden, cache, route, WIDTH)[1]
        if route == "attention" and run.attended < len(self.layers):
            raise UnsupportedByRoute("does not attend through transformers' attention interface")
        if cache.index:
            raise UnsupportedByRoute("chooses the keys to attend to by an index, which only a target's layers can have")
        return Observed(route, cache.observed)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        """Compute rows of all modules over the same tokens. Passes copy the modules one by one, with separate tokens.

        Args:
            input_ids: int64 ``[B, T]``; position_ids: ``[B, T]``, the rows' positions.
            hidden_states: ``[B, T, M]``, the output of the target's last layer at these positions.

        Returns:
            Values by name. For each module k: ``hidden_k`` ``[B, T, M]``, the output of its layer; ``normed_k``, the
                input of the lm_head; and ``carried_k``, the one of both that the next module reads. ``fused``, the
                input of module 0, if it is not ``hidden_states`` itself. ``logits`` ``[B, T, V]`` of the last module. A
                single module also has ``hidden`` and ``carried``.
        """
        gather = self.route == "eager"
        slots = SlotCache(cache.keys, cache.values, cache.slots, cache.positions, gather)
        places = next(iter(cache.keys.values())).shape[1]
        return self._run(input_ids, position_ids, hidden_states, slots, self.route, places)[0]

    def _run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        cache: StepCache,
        route: Route,
        places: int | torch.SymInt,
    ) -> tuple[dict[str, torch.Tensor], Running]:
        self.config._attn_implementation_internal = IMPLEMENTATION[route]
        named: dict[str, torch.Tensor] = {}
        embedded = self.embed_tokens(input_ids)
        carried = hidden_states
        if self.variant.normed_target:
            carried = named["fused"] = self.final_norm(hidden_states)
        run = Running(cache, position_ids, MaskLog())
        with running(run):
            for index, (module, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
                mask: Mask | torch.Tensor = self.masks[index]
                if route == "eager":
                    mask = causal_mask(position_ids, places, carried.dtype, self.masks[index])
                # The positions of the tokens, as in transformers. Attention only depends on their differences.
                positions = position_ids + (index + 1)
                hidden = module(
                    embedded,
                    carried,
                    attention_mask=mask,
                    position_ids=positions,
                    position_embeddings=self.rotary_emb(embedded, positions, **self.rotary_options[index]),
                    **{CACHE: cache},
                )
                normed = norm(hidden)
                carried = normed if self.variant.normed_carry else hidden
                named |= {f"hidden_{index}": hidden, f"normed_{index}": normed, f"carried_{index}": carried}
        if len(self.layers) == 1:
            named |= {"hidden": hidden, "carried": carried}
        return named | {"logits": self.lm_head(normed)}, run


def layer_mask(config: PreTrainedConfig, index: int) -> Mask:
    """The attention mask of module ``index``, by the type of its layer, as in ``MtpModel.create_masks_for_mtp_layer``.

    Raises:
        ValueError: the type is not known.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None or kinds[index] == "full_attention":
        return Mask()
    if kinds[index] == "sliding_attention":
        return Mask(window=config.sliding_window)
    raise ValueError(f"a module of layer type {kinds[index]!r} is not supported")


def rotary_options(config: PreTrainedConfig, index: int) -> dict[str, str]:
    """Further arguments of the target's rotary table, as in ``MtpModel.forward_layer``.

    If a config has rotary parameters by type of layer (Mellum), this is the type of module ``index``.
    """
    by_type = any(isinstance(value, dict) for value in (getattr(config, "rope_parameters", None) or {}).values())
    return {"layer_type": config.layer_types[index]} if by_type else {}


def causal_mask(
    positions: torch.Tensor, places: int | torch.SymInt, dtype: torch.dtype, mask: Mask | None = None
) -> torch.Tensor:
    """An additive mask ``[B, 1, T, S]`` for queries at ``positions`` ``[B, T]``. A ``mask`` of None allows all
    positions up to the query's own.

    Args:
        places: S.
    """
    key = torch.arange(cast(int, places), device=positions.device)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
    seen = (mask or Mask()).sees(positions[:, None, :, None], key)
    return torch.where(seen, torch.zeros_like(hidden), hidden)


def norm_of(target: PreTrainedModel, config: PreTrainedConfig) -> nn.Module:
    """A new norm of the class of the input norm of the target's layers."""
    kind: Callable[..., nn.Module] = type(cast(nn.Module, decoder_layers(target)[1][-1].input_layernorm))
    return kind(config.hidden_size, eps=config.rms_norm_eps)


def module_config(text: PreTrainedConfig, modules: int, variant: MtpVariant) -> PreTrainedConfig:
    """The config from which the decoder layers of the modules are created, by index.

    It is ``get_mtp_config`` of transformers if the family has it, else the target's config with full attention in all
    layers.
    """
    config = copy.deepcopy(text)
    if getattr(config, "num_mtp_layers", None) is not None:
        config.num_mtp_layers = modules
        config = config.get_mtp_config()
    else:
        config.num_hidden_layers = modules
        for name, value in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
            if getattr(config, name, None) is not None:
                setattr(config, name, [value] * modules)
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
    for name, value in variant.config.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config._attn_implementation_internal, config._experts_implementation_internal = "eager", EXPERTS
    return config
