"""Heads: from hidden states (B, T, d_model) to what the model is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from qkv.config.base import Positive, PositiveFloat, Probability, Problem, Tuple, Variant, expecting
from qkv.config.embedding import AdaptiveTable, FullTable, TokenTable
from qkv.config.ffn import Activation
from qkv.config.norm import LayerNorm, Norm
from qkv.config.parameter import Parameter, Table, linear, under

HeadScale = Annotated[PositiveFloat | Literal["rsqrt_d_model"], expecting("a positive number or 'rsqrt_d_model'")]


class Head(Variant):
    """The union of heads."""

    reads: ClassVar[Literal["past", "both sides", "either"]] = "either"
    """`past`: predicts the next token and needs a causal decoder; `both sides`: fills gaps and needs an encoder."""

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        """The head's own tensors; a tied head borrows the token table."""
        return {}


class NoHead(Head):
    """Hidden states only."""

    kind: Literal["none"] = "none"


class LanguageModel(Head):
    """logits = hidden * scale @ table^T + bias, one per vocabulary entry: (B, T, V) (Vaswani 2017, section 3.4)."""

    kind: Literal["lm"] = "lm"
    tied: bool
    """Whether the matrix is the token table itself (Press and Wolf 2016): one storage, one gradient."""
    bias: bool = False
    scale: HeadScale = 1.0
    """Multiplies hidden states first; T5 ties its head and uses `rsqrt_d_model`."""
    softcap: PositiveFloat | None = None
    """logits become softcap * tanh(logits / softcap) (Gemma 2)."""
    reads = "past"

    def factor(self, d_model: int) -> float:
        """The number that multiplies hidden states."""
        return d_model**-0.5 if self.scale == "rsqrt_d_model" else float(self.scale)

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        table = {} if self.tied else {"weight": Parameter((vocab_size, d_model), "head")}
        return table | ({"bias": Parameter((vocab_size,), "zeros")} if self.bias else {})


class MaskedLanguageModel(Head):
    """BERT's: logits = norm(activation(transform(hidden))) @ table^T + bias (Devlin 2018).

    Pre-training has a second head beside it, which decides whether the row's second segment follows its first.
    """

    kind: Literal["masked-lm"] = "masked-lm"
    tied: bool = True
    activation: Activation = "gelu"
    norm: Norm = LayerNorm(eps=1e-12)
    next_sentence: bool = False
    """Whether it has the tensors of `next-sentence`, too, below that name; they are read where pairs are trained."""
    reads = "both sides"

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        table = under("transform", linear(d_model, d_model, "projection", bias=True))
        table |= under("norm", self.norm.parameters(d_model))
        if not self.tied:
            table["weight"] = Parameter((vocab_size, d_model), "head")
        if self.next_sentence:
            table |= under("next_sentence", NextSentence().parameters(vocab_size, d_model))
        return table | {"bias": Parameter((vocab_size,), "zeros")}


class Pooler(Head):
    """pooled = tanh(dense(hidden of the first token)): (B, d_model) (Devlin 2018)."""

    kind: Literal["pooler"] = "pooler"

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        return under("pooler", linear(d_model, d_model, "projection", bias=True))


class NextSentence(Head):
    """Two logits from the pooler's vector: (B, 2); class 0: the second segment follows the first (Devlin 2018)."""

    kind: Literal["next-sentence"] = "next-sentence"
    reads = "both sides"

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        table = under("pooler", linear(d_model, d_model, "projection", bias=True))
        return table | under("classifier", linear(d_model, 2, "head", bias=True))


class Classifier(Head):
    """logits (B, n_classes) for the whole sequence, from one vector per row (Radford 2018; Devlin 2018)."""

    kind: Literal["classifier"] = "classifier"
    n_classes: Positive
    pooling: Literal["first", "last", "mean"] = "first"
    """The first real token (BERT), the last real token (GPT), or the mean over real tokens."""
    hidden: Literal["none", Activation] = "tanh"
    """The activation of a dense layer before the classifier (BERT, RoBERTa: tanh; RoFormer: gelu), or `none`."""
    bias: bool = True
    dropout: Probability = 0.0

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        table = {} if self.hidden == "none" else under("pooler", linear(d_model, d_model, "projection", bias=True))
        return table | under("classifier", linear(d_model, self.n_classes, "head", bias=self.bias))


class TokenClassifier(Head):
    """logits (B, T, n_classes), one decision per token (Devlin 2018: named entities)."""

    kind: Literal["token-classifier"] = "token-classifier"
    n_classes: Positive
    dropout: Probability = 0.0

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        return under("classifier", linear(d_model, self.n_classes, "head", bias=True))


class Span(Head):
    """logits (B, T, 2): scores that the answer starts, and ends, at each token (Devlin 2018: SQuAD)."""

    kind: Literal["span"] = "span"

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        return under("classifier", linear(d_model, 2, "head", bias=True))


class AdaptiveSoftmax(Head):
    """Log-probabilities (B, T, V) through clusters of rarer and rarer tokens (Grave 2016; Transformer-XL).

    The first softmax ranges over the most frequent tokens and one entry per further cluster; each cluster has a
    softmax of its own over a narrower projection of the hidden state.
    log p(token) = log p(cluster) + log p(token | cluster). A `divisor` of 1 makes all clusters as wide as the model:
    their matrices may then be rows of one full token table, and the projections may be left out.
    """

    kind: Literal["adaptive"] = "adaptive"
    cutoffs: Tuple[Positive]
    divisor: Positive = 4
    tied: bool = True
    """Whether each cluster's matrix is that of the adaptive token table."""
    tied_projections: Tuple[bool] = ()
    """For each cluster, whether its projection is the token table's too; missing ones are not."""
    projected: bool = True
    """Whether hidden states are projected to the cluster's width, rather than read as they are."""
    reads = "past"

    @property
    def table(self) -> AdaptiveTable:
        """The layout of the clusters."""
        return AdaptiveTable(cutoffs=self.cutoffs, divisor=self.divisor)

    def ties_projection(self, cluster: int) -> bool:
        """Whether the cluster's projection is the token table's."""
        return self.projected and cluster < len(self.tied_projections) and self.tied_projections[cluster]

    def fits(self, tokens: TokenTable) -> bool:
        """Whether what is tied exists in this token table."""
        if any(self.tied_projections):
            return tokens == self.table
        rows = self.divisor == 1 and isinstance(tokens, FullTable)
        return not self.tied or rows or tokens == self.table

    def problems(self) -> Iterator[Problem]:
        if not self.cutoffs or list(self.cutoffs) != sorted(set(self.cutoffs)):
            yield "cutoffs", f"must be increasing and not empty, got {list(self.cutoffs)}"
        if len(self.tied_projections) > len(self.cutoffs) + 1:
            yield "tied_projections", f"has {len(self.tied_projections)} values for {len(self.cutoffs) + 1} clusters"
        if not self.projected and self.divisor != 1:
            yield "projected", f"must be true, since divisor {self.divisor} makes clusters narrower than the model"
        if not self.projected and any(self.tied_projections):
            yield "tied_projections", "must be empty, since projected is false"

    def parameters(self, vocab_size: int, d_model: int) -> Table:
        tail = len(self.cutoffs)
        table: Table = {
            "cluster_weight": Parameter((tail, d_model), "head"),
            "cluster_bias": Parameter((tail,), "zeros"),
        }
        for index, (start, stop, width) in enumerate(self.table.clusters(vocab_size, d_model)):
            if not self.tied:
                table[f"clusters.{index}.weight"] = Parameter((stop - start, width), "head")
            if self.projected and not self.ties_projection(index):
                table[f"projections.{index}.weight"] = Parameter((d_model, width), "projection")
            table[f"biases.{index}"] = Parameter((stop - start,), "zeros")
        return table


Head.members = (
    NoHead,
    LanguageModel,
    MaskedLanguageModel,
    NextSentence,
    Pooler,
    Classifier,
    TokenClassifier,
    Span,
    AdaptiveSoftmax,
)
