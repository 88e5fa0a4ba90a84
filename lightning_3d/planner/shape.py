"""The sizes of a transformer, and the parameters that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_3d.errors import ConfigError
from lightning_3d.planner import checks

NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("gelu", "relu", "gelu_new")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A stack of equal transformer layers between an embedding and a head.

    Left-out sizes follow the two common families: without ``gated_mlp`` a GPT (biases, LayerNorm, learned positions,
    FFN of 4 x hidden), with it a Llama (no biases, RMSNorm, rotary positions, FFN of 8/3 x hidden).
    """

    layers: int
    """Transformer layers (blocks)."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Attention (query) heads of a layer."""
    kv_heads: int | None = None
    """Heads of keys and values; ``None``: as many as ``heads``."""
    head_dim: int | None = None
    """Width of a head; ``None``: ``hidden / heads``."""
    ffn_hidden: int | None = None
    """Inner width of the MLP; ``None``: as the family has it."""
    vocab: int = 51200
    """Rows of the embedding, padding included."""
    seq_len: int = 2048
    """Tokens of a training sample."""
    gated_mlp: bool = False
    """Whether the MLP has a gate beside its up projection (SwiGLU, GeGLU)."""
    tied_embeddings: bool = True
    """Whether the head uses the embedding's matrix."""
    biases: bool | None = None
    """Whether linear layers have biases; ``None``: as the family has it."""
    norm: str | None = None
    """``"layernorm"`` or ``"rmsnorm"``; ``None``: as the family has it."""
    learned_positions: bool | None = None
    """Whether positions are a learned table of ``seq_len`` rows; ``None``: as the family has it."""
    embedding_norm: bool = False
    """Whether a norm follows the embedding (BLOOM)."""
    causal: bool = True
    """Whether a token sees only those before it; fused attention kernels then skip half of the work."""
    dropout: bool | None = None
    """Whether layers drop out activations in training, and keep masks of a byte an element; ``None``: a GPT does."""
    activation: str = "gelu"
    """Of an MLP without a gate, as its module computes it: ``"gelu"`` (or another of one kernel), ``"relu"``, or
    ``"gelu_new"``, written out in seven operations."""
    packed_attention: bool | None = None
    """Whether one projection gives queries, keys and values; ``None``: a GPT does."""
    scores: bool = False
    """Whether the module's attention computes its scores instead of calling a fused kernel (BLOOM of transformers)."""
    experts: int = 0
    """Experts of a mixture-of-experts layer; 0: a dense MLP."""
    experts_per_token: int = 2
    """Routed experts that a token passes."""
    shared_experts: int = 0
    """Experts that every token passes besides."""
    expert_ffn_hidden: int | None = None
    """Inner width of an expert; ``None``: that of the MLP."""
    dense_layers: int = 0
    """First layers that keep a dense MLP in a mixture of experts."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "seq_len"):
            checks.positive(name, getattr(self, name))
        for name in ("kv_heads", "head_dim", "ffn_hidden", "expert_ffn_hidden"):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name), also=" or None")
        if self.norm is not None:
            checks.one_of("norm", self.norm, NORMS)
        checks.one_of("activation", self.activation, ACTIVATIONS)
        if self.head_dim is None and self.hidden % self.heads:
            raise ConfigError(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}, so the width of a head is not known."
                " Give head_dim, or other sizes."
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: every head of keys and values"
                " serves the same number of query heads. Use a divisor."
            )
        if self.experts < 0 or self.shared_experts < 0 or not 0 <= self.dense_layers <= self.layers:
            raise ConfigError(
                f"experts={self.experts}, shared_experts={self.shared_experts} must not be negative, and"
                f" dense_layers={self.dense_layers} lies between 0 and layers={self.layers}."
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} must be between 1 and experts={self.experts}."
            )

    # Widths, with the family's defaults filled in.

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Width of all queries, and of what attention gives back."""
        return self.head_width * self.heads

    @property
    def kv_width(self) -> int:
        """Width of all keys; values have as much."""
        return self.head_width * (self.kv_heads or self.heads)

    @property
    def ffn_width(self) -> int:
        """Inner width of a dense MLP."""
        if self.ffn_hidden is not None:
            return self.ffn_hidden
        return -(-8 * self.hidden // (3 * 256)) * 256 if self.gated_mlp else 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.expert_ffn_hidden or self.ffn_width

    @property
    def has_biases(self) -> bool:
        """Whether linear layers have biases."""
        return not self.gated_mlp if self.biases is None else self.biases

    @property
    def norm_size(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm_kind == "layernorm" else 1)

    @property
    def norm_kind(self) -> str:
        """``"layernorm"`` or ``"rmsnorm"``."""
        return self.norm or ("rmsnorm" if self.gated_mlp else "layernorm")

    @property
    def has_position_table(self) -> bool:
        """Whether positions are a learned table."""
        return not self.gated_mlp if self.learned_positions is None else self.learned_positions

    @property
    def position_parameters(self) -> int:
        """Parameters of the table of positions."""
        return self.seq_len * self.hidden if self.has_position_table else 0

    @property
    def turns_packed(self) -> bool:
        """Whether queries and keys of one projection are turned by rotary positions; alibi (BLOOM) turns nothing."""
        packed = not self.gated_mlp if self.packed_attention is None else self.packed_attention
        return packed and not self.has_position_table and not self.embedding_norm

    @property
    def has_dropout(self) -> bool:
        """Whether layers drop out activations in training."""
        return not self.gated_mlp if self.dropout is None else self.dropout

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    # Parameters.

    @property
    def attention_parameters(self) -> int:
        """Of the attention of one layer, without its norm."""
        weights = 2 * self.hidden * (self.query_width + self.kv_width)
        return weights + (self.query_width + 2 * self.kv_width + self.hidden) * self.has_biases

    def mlp_parameters(self, width: int) -> int:
        """Of a dense MLP, or an expert, of inner width ``width``."""
        matrices = 3 if self.gated_mlp else 2
        return matrices * self.hidden * width + ((matrices - 1) * width + self.hidden) * self.has_biases

    @cached_property
    def layer_parameters(self) -> int:
        """Of one dense layer: ``12 h^2 + 13 h`` for a GPT (Narayanan et al. 2021, eq. 2)."""
        return self.attention_parameters + self.mlp_parameters(self.ffn_width) + 2 * self.norm_size

    @property
    def router_parameters(self) -> int:
        """Of the router of one layer with experts."""
        return self.hidden * self.experts

    @cached_property
    def moe_layer_parameters(self) -> int:
        """Of one layer with experts, all of them."""
        experts = (self.experts + self.shared_experts) * self.mlp_parameters(self.expert_width)
        return self.attention_parameters + self.router_parameters + experts + 2 * self.norm_size

    @cached_property
    def embedding_parameters(self) -> int:
        """Of the embedding, positions and its norm."""
        return self.vocab * self.hidden + self.position_parameters + self.embedding_norm * self.norm_size

    @property
    def head_parameters(self) -> int:
        """Of the head's own matrix; none if it is tied."""
        return 0 if self.tied_embeddings else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        layers = (self.layers - self.moe_layers) * self.layer_parameters + self.moe_layers * self.moe_layer_parameters
        return layers + self.embedding_parameters + self.norm_size + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes; all of them in a dense model."""
        unused = (self.experts - self.experts_per_token) * self.mlp_parameters(self.expert_width)
        return self.parameters - self.moe_layers * unused
