"""Multi-token prediction (MTP) modules as a head: each a projection and a decoder layer of the target's own class.

After DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2; as transformers has it in
``modeling_layers.MtpModel``. Row i of module k (from 0 on) reads the token at position i + k + 1 and what the module
before it left at row i, the first one the target's hidden state there. It predicts the token at i + k + 2. Its KV of
row i lies at place i of its own cache.
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
    """How the modules attend, and what each puts into the cache, by module."""

    route: Route
    kv: dict[int, KVShape]


class MtpModule(nn.Module):
    """Norms, projection and decoder layer. The norm after them belongs to the head."""

    def __init__(self, target: PreTrainedModel, config: PreTrainedConfig, index: int, variant: MtpVariant) -> None:
        super().__init__()
        size = config.hidden_size
        self.hidden_first = variant.hidden_first
        self.enorm = norm_of(target, config)
        self.hnorm = norm_of(target, config)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(decoder_layers(target)[1][-1])(config, index)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **layer: Any) -> torch.Tensor:
        """``embedded``, ``hidden`` ``[B, T, M]``; ``layer``: what the decoder layer takes besides."""
        both = [self.enorm(embedded), self.hnorm(hidden)]
        out: torch.Tensor = self.block(self.eh_proj(torch.cat(both[::-1] if self.hidden_first else both, -1)), **layer)
        return out


class MtpHead(DraftHead):
    """M modules, which share the target's embedding, final norm, rotary table and lm_head: the very modules.

    Args:
        target: whose hidden states they read.
        modules: M.
        variant: how they are put together; None is what is known of the target's family.

    Raises:
        InvalidHead: no such module can be made of the target's layers; says why.
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
        try:
            self.config = module_config(text, modules, self.variant)
            built = [MtpModule(target, self.config, index, self.variant) for index in range(modules)]
            self.masks = [layer_mask(self.config, index) for index in range(modules)]
            self.rotary_options = [rotary_options(self.config, index) for index in range(modules)]
        except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            kind = type(decoder_layers(target)[1][-1]).__name__
            raise InvalidHead(source=SOURCE, reason=f"a {kind} cannot be made: {error_line(error)}") from error
        self.layers = nn.ModuleList(built)
        own_norm = self.variant.last_norm
        self.norms = nn.ModuleList([norm_of(target, self.config) if own_norm else nn.Identity() for _ in built])
        self.embed_tokens, self.final_norm = target.get_input_embeddings(), base.norm
        self.rotary_emb, self.lm_head = base.rotary_emb, target.get_output_embeddings()
        self._settle(target)

    def _settle(self, target: PreTrainedModel) -> None:
        """Own tensors on the target's device, each in the dtype that it has in the target's last layer: some families
        keep a few in float32. What is shared stays as it is."""
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
        """The first module alone: what is used again for every draft token."""
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
        """Seen from a few tokens, as a target's is.

        Raises:
            InvalidHead: a module cannot be captured by either route; says why.
        """
        reasons = []
        for route in ("attention", "eager"):
            try:
                return self._observe(route)
            except UnsupportedByRoute as unfit:
                reasons.append(str(unfit))
            except Exception as error:
                if route == "attention":
                    # As one that reads its mask as a tensor.
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
            raise UnsupportedByRoute(
                "chooses the keys to attend to by an index, which is kept of a target's layers alone"
            )
        return Observed(route, cache.observed)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        """Rows of all modules, over the same tokens. Passes take it apart, and give each module its own.

        Args:
            input_ids: int64 ``[B, T]``; position_ids: ``[B, T]``, the rows.
            hidden_states: ``[B, T, M]``, what the target's last layer left there.

        Returns:
            Of each module k: ``hidden_k`` ``[B, T, M]``, what its layer leaves, ``normed_k``, what its lm_head reads,
            and ``carried_k``, which of both is carried on. ``fused``: what module 0 reads, where that is not
            ``hidden_states`` itself. ``logits`` ``[B, T, V]`` of the last one. Of a single module ``hidden`` and
            ``carried`` as well.
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
                # Tokens stand so far after their rows; none but the distances counts, and transformers computes these.
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
    """What module ``index`` attends to, by the type of its layer, as ``MtpModel.create_masks_for_mtp_layer``.

    Raises:
        ValueError: no such type is known.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None or kinds[index] == "full_attention":
        return Mask()
    if kinds[index] == "sliding_attention":
        return Mask(window=config.sliding_window)
    raise ValueError(f"a module of layer type {kinds[index]!r} is not supported")


def rotary_options(config: PreTrainedConfig, index: int) -> dict[str, str]:
    """What the target's rotary table is asked for besides positions: where a config has rotary parameters by type of
    layer (Mellum), the type of this one; as ``MtpModel.forward_layer``."""
    by_type = any(isinstance(value, dict) for value in (getattr(config, "rope_parameters", None) or {}).values())
    return {"layer_type": config.layer_types[index]} if by_type else {}


def causal_mask(
    positions: torch.Tensor, places: int | torch.SymInt, dtype: torch.dtype, mask: Mask | None = None
) -> torch.Tensor:
    """Additive, ``[B, 1, T, S]``: a query at ``positions`` ``[B, T]`` attends to what ``mask`` lets it, None being all
    places up to its own."""
    key = torch.arange(cast(int, places), device=positions.device)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
    seen = (mask or Mask()).sees(positions[:, None, :, None], key)
    return torch.where(seen, torch.zeros_like(hidden), hidden)


def norm_of(target: PreTrainedModel, config: PreTrainedConfig) -> nn.Module:
    """A new norm of the class that the target's layers begin with."""
    kind: Callable[..., nn.Module] = type(cast(nn.Module, decoder_layers(target)[1][-1].input_layernorm))
    return kind(config.hidden_size, eps=config.rms_norm_eps)


def module_config(text: PreTrainedConfig, modules: int, variant: MtpVariant) -> PreTrainedConfig:
    """The config that decoder layers of ``modules`` are made from, by their index: as ``get_mtp_config`` of
    transformers where a family has it, else the target's with full attention in all layers."""
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
