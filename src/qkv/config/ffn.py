"""Feed-forward networks: what each position computes on its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qkv.config.base import NonNegative, Positive, PositiveFloat, Probability, Problem, Variant
from qkv.config.parameter import Parameter, Table, linear, under

Activation = Literal["relu", "relu2", "gelu", "gelu-tanh", "quick-gelu", "silu", "sigmoid", "tanh"]
"""`gelu` is x * Phi(x) with erf, `gelu-tanh` its tanh form (0.044715), `quick-gelu` x * sigmoid(1.702 x); `relu2` is
max(0, x)^2."""


class FeedForward(Variant):
    """The union of feed-forward networks."""

    def parameters(self, d_model: int) -> Table:
        """The network's tensors."""
        raise NotImplementedError(f"{type(self).__name__} must define parameters(d_model)")


class Dense(FeedForward):
    """down(activation(up(x))) (Vaswani 2017, equation 2)."""

    kind: Literal["dense"] = "dense"
    d_ff: Positive
    activation: Activation
    bias: bool = False
    dropout: Probability = 0.0
    """Applied to the hidden activations in training."""

    def parameters(self, d_model: int) -> Table:
        up = under("up_proj", linear(d_model, self.d_ff, "ffn_input", bias=self.bias))
        return up | under("down_proj", linear(self.d_ff, d_model, "ffn_output", bias=self.bias))


class Gated(FeedForward):
    """down(activation(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu (Shazeer 2020, arXiv 2002.05202)."""

    kind: Literal["gated"] = "gated"
    d_ff: Positive
    activation: Activation = "silu"
    bias: bool = False
    dropout: Probability = 0.0
    """Applied to the hidden activations in training."""

    def parameters(self, d_model: int) -> Table:
        gate = under("gate_proj", linear(d_model, self.d_ff, "ffn_input", bias=self.bias))
        up = under("up_proj", linear(d_model, self.d_ff, "ffn_input", bias=self.bias))
        return gate | up | under("down_proj", linear(self.d_ff, d_model, "ffn_output", bias=self.bias))


class MixtureOfExperts(FeedForward):
    """Each token goes to `top_k` of `n_experts` gated networks, and through a shared one (Shazeer 2017; DeepSeek 2024).

    The router's scores are softmax or sigmoid of x . router; the experts' outputs are summed with the scores as
    weights. DeepSeek-V3 adds a correction to the scores for choosing only, and keeps each token inside its
    `top_groups` best of `n_groups` groups of experts. Ties go to the lower expert index.
    """

    kind: Literal["mixture-of-experts"] = "mixture-of-experts"
    n_experts: Positive
    top_k: Positive
    d_ff: Positive
    """Hidden width of one expert."""
    shared_d_ff: NonNegative = 0
    """Hidden width of the network that every token passes; 0 is none."""
    activation: Activation = "silu"
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """Whether the chosen experts' weights are divided by their sum."""
    scale: PositiveFloat = 1.0
    """Multiplies the weights at the end (DeepSeek's routed scaling factor)."""
    correction: bool = False
    """Whether a per-expert correction is added to the scores before choosing (DeepSeek-V3, auxiliary-loss-free)."""
    n_groups: Positive = 1
    top_groups: Positive = 1
    group_score: Literal["max", "top2"] = "max"
    """A group's score: its best expert (DeepSeek-V2) or the sum of its two best (V3)."""

    def problems(self) -> Iterator[Problem]:
        if self.n_experts % self.n_groups:
            yield "n_groups", f"must divide n_experts ({self.n_experts}), got {self.n_groups}"
            return
        if self.top_groups > self.n_groups:
            yield "top_groups", f"must be at most n_groups ({self.n_groups}), got {self.top_groups}"
        reachable = self.n_experts // self.n_groups * self.top_groups
        if self.top_k > reachable:
            yield "top_k", f"must be at most the {reachable} experts that a token can reach, got {self.top_k}"
        if self.group_score == "top2" and self.n_experts // self.n_groups < 2:
            yield "group_score", "'top2' needs at least two experts per group"

    @property
    def shared(self) -> Gated | None:
        """The network that every token passes, if there is one."""
        return Gated(d_ff=self.shared_d_ff, activation=self.activation) if self.shared_d_ff else None

    def parameters(self, d_model: int) -> Table:
        wide, narrow = (self.n_experts, self.d_ff, d_model), (self.n_experts, d_model, self.d_ff)
        table = under("router", linear(d_model, self.n_experts, "router", bias=False))
        if self.correction:
            table["router.correction"] = Parameter((self.n_experts,), "zeros")
        table["experts.gate_proj"] = Parameter(wide, "ffn_input")
        table["experts.up_proj"] = Parameter(wide, "ffn_input")
        table["experts.down_proj"] = Parameter(narrow, "ffn_output")
        return table | (under("shared", self.shared.parameters(d_model)) if self.shared else {})


FeedForward.members = (Dense, Gated, MixtureOfExperts)
