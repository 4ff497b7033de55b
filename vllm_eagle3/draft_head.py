"""Eagle3DraftHead: the EAGLE-3 draft head in plain PyTorch (trainer and oracle).

    taps (low, mid, high) --fc--> feature g --+
                                              +--> decoder layer --> hidden a
    embedding of the next token --------------+          |
                                     feature of the next step = a (EAGLE-3, fig. 5)
                                     draft logits = lm_head(norm(a))

The head keeps no cache. Attention is an argument, because the three users differ
only there: the trainer attends over all steps of an unrolled draft at once, the
oracle over a growing cache, a tree over ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# attend(layer, q, k, v) -> output
#   q: [batch, num_heads, tokens, head_dim], rotated
#   k, v: [batch, num_kv_heads, tokens, head_dim], k rotated
#   output: like q
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DraftHeadConfig:
    """Shape and switches of a head; field names follow the checkpoint's config.json.

    `tap_ids` are residual streams ENTERING a target layer (see `taps`).
    `fc_norm` and `norm_output` are the EAGLE-3.1 switches: a norm per tap in front
    of `fc`, and post-norm instead of pre-norm feedback between draft steps.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    tap_ids: tuple[int, ...]
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class RotaryEmbedding(nn.Module):
    """Rotary positions (RoFormer, eq. 34) with any scaling that transformers knows."""

    inv_freq: torch.Tensor

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        # On the CPU also for a head built on the meta device: these are no weights,
        # so nothing would fill them in later.
        with torch.device("cpu"):
            inv_freq, self.scaling = _rope_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        # A head cast to bfloat16 keeps fp32 frequencies: rounded ones are off by
        # whole radians after a few hundred positions.
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(
        self,
        x: torch.Tensor,  # [batch, heads, tokens, head_dim]
        positions: torch.Tensor,  # [batch, tokens] or [tokens]
    ) -> torch.Tensor:
        angles = positions[..., None].float() * self.inv_freq  # [.., tokens, dim/2]
        if angles.ndim == 3:
            angles = angles[:, None]
        cos = (angles.cos() * self.scaling).to(x.dtype)
        sin = (angles.sin() * self.scaling).to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


# Scalings whose frequencies depend on nothing but the config. The others (dynamic,
# longrope) change with the length of the sequence, in ways engines disagree on.
_STATIC_SCALINGS = ("linear", "llama3", "yarn")


def _rope_frequencies(config: DraftHeadConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2], fp32, and the factor on cos and sin."""
    kind = config.rope_parameters.get("rope_type", "default")
    if float(config.rope_parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(
            "partial_rotary_factor: got "
            f"{config.rope_parameters['partial_rotary_factor']}, want 1.0 (or none): "
            "a draft head rotates whole heads"
        )
    if kind == "default":
        theta = float(config.rope_parameters.get("rope_theta", 10000.0))
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        return theta**-exponents, 1.0
    if kind not in _STATIC_SCALINGS:
        raise ValueError(
            f"rope_type: got {kind!r}, want 'default' or one of "
            f"{list(_STATIC_SCALINGS)}; train the head with one of these "
            "(it needs not be the target's)"
        )
    # Scaled variants are many and change: transformers keeps them.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = LlamaConfig(
        hidden_size=config.head_dim * config.num_attention_heads,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return inv_freq, float(scaling)


class Attention(nn.Module):
    def __init__(self, config: DraftHeadConfig, input_size: int) -> None:
        super().__init__()
        dim, bias = config.head_dim, config.attention_bias
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = dim
        self.q_proj = nn.Linear(input_size, heads * dim, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=bias)

    def forward(
        self,
        x: torch.Tensor,  # [batch, tokens, input_size]
        positions: torch.Tensor,
        rotary: RotaryEmbedding,
        layer: int,
        attend: Attend,
    ) -> torch.Tensor:
        q, k, v = (self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = attend(layer, rotary(q, positions), rotary(k, positions), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act: got {config.hidden_act!r}, want 'silu'")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One draft layer; only the first one reads the token embedding."""

    def __init__(self, config: DraftHeadConfig, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        self.is_first = layer == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        if self.is_first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden if self.is_first else hidden)
        self.mlp = MLP(config)

    def forward(
        self,
        embeds: torch.Tensor,  # [batch, tokens, hidden]
        hidden: torch.Tensor,  # [batch, tokens, hidden]
        positions: torch.Tensor,
        rotary: RotaryEmbedding,
        attend: Attend,
    ) -> torch.Tensor:
        if self.is_first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            residual, x = hidden, self.input_layernorm(hidden)
        hidden = residual + self.self_attn(x, positions, rotary, self.layer, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3DraftHead(nn.Module):
    """The draft head. It does not own the embedding: that is the target's, frozen."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.target_hidden_size, config.rms_norm_eps
        num_taps = len(config.tap_ids)
        self.input_norm = (
            RMSNorm(num_taps * width, eps) if config.norm_before_fc else None
        )
        self.fc_norm = (
            nn.ModuleList(RMSNorm(width, eps) for _ in range(num_taps))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(num_taps * width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, False)
        self.rotary = RotaryEmbedding(config)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """[..., num_taps * target_hidden] -> features [..., hidden] (section 3.1)."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            chunks = taps.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, chunks, strict=True)
            taps = torch.cat([norm(chunk) for norm, chunk in pairs], dim=-1)
        return self.fc(taps)

    def forward(
        self,
        embeds: torch.Tensor,  # [batch, tokens, hidden]: embedding of token i+1
        features: torch.Tensor,  # [batch, tokens, hidden]: feature of token i
        positions: torch.Tensor,  # [batch, tokens] or [tokens]
        attend: Attend,
    ) -> torch.Tensor:
        """One draft step -> hidden [batch, tokens, hidden], before the final norm."""
        hidden = features
        for layer in self.layers:
            hidden = layer(embeds, hidden, positions, self.rotary, attend)
        return hidden

    def feedback(self, hidden: torch.Tensor) -> torch.Tensor:
        """The feature that the next draft step reads in place of the target's."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> logits over the draft vocabulary [..., draft_vocab]."""
        return self.lm_head(self.norm(hidden)) * self.config.logit_scale
