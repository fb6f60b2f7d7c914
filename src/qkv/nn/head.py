"""Heads: from hidden states (B, T, D) to logits.

`forward(hidden, table, valid)` answers (logits or None, pooled or None). `table` is the module of the token table,
which a tied head borrows; `valid` (B or 1, T) marks the real tokens, for heads that make one vector of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv import config as c
from qkv.nn.embedding import AdaptiveTable, FullTable
from qkv.nn.ffn import ACTIVATIONS
from qkv.nn.registry import implements, make

Answer = tuple[Tensor | None, Tensor | None]
Hidden = Float[Tensor, "B T D"]
Valid = Bool[Tensor, "_ T"]


def first_real(hidden: Hidden, valid: Valid) -> Float[Tensor, "B D"]:
    """The hidden state of each row's first real token."""
    place = torch.arange(hidden.shape[1], device=hidden.device)
    return _rows(hidden, torch.where(valid, place, hidden.shape[1] - 1).min(1).values)


def _rows(hidden: Hidden, index: Tensor) -> Float[Tensor, "B D"]:
    return hidden[torch.arange(len(hidden), device=hidden.device), index.expand(len(hidden))]


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module, nn.Embedding | nn.Linear)
    return module.weight


def _tied(table: nn.Module) -> Tensor:
    assert isinstance(table, FullTable)
    return table.weight


@implements(c.NoHead)
class NoHead(nn.Module):
    """Hidden states only."""

    def __init__(self, config: c.NoHead, vocab_size: int, d_model: int) -> None:
        super().__init__()

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        return None, None


@implements(c.LanguageModel)
class LanguageModel(nn.Module):
    """hidden * factor @ table^T + bias, with Gemma's softcap."""

    def __init__(self, config: c.LanguageModel, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.factor, self.softcap = config.factor(d_model), config.softcap
        self.weight = None if config.tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if config.bias else None

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        scaled = hidden if self.factor == 1.0 else hidden * self.factor
        logits = F.linear(scaled, _tied(table) if self.weight is None else self.weight, self.bias)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits, None


@implements(c.MaskedLanguageModel)
class MaskedLanguageModel(nn.Module):
    """norm(activation(transform(hidden))) @ table^T + bias (Devlin 2018); pre-training calls `next_sentence`, too."""

    def __init__(self, config: c.MaskedLanguageModel, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.transform = nn.Linear(d_model, d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = make(config.norm, d_model)
        self.weight = None if config.tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.next_sentence = NextSentence(c.NextSentence(), vocab_size, d_model) if config.next_sentence else None

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        ready = self.norm(self.activation(self.transform(hidden)))
        return F.linear(ready, _tied(table) if self.weight is None else self.weight, self.bias), None


@implements(c.Pooler)
class Pooler(nn.Module):
    """tanh(dense(first token)) (Devlin 2018)."""

    def __init__(self, config: c.Pooler, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(d_model, d_model)

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        return None, torch.tanh(self.pooler(first_real(hidden, valid)))


@implements(c.NextSentence)
class NextSentence(nn.Module):
    """Does the second segment follow the first? Class 0 is yes (Devlin 2018)."""

    def __init__(self, config: c.NextSentence, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(d_model, d_model)
        self.classifier = nn.Linear(d_model, 2)

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        pooled = torch.tanh(self.pooler(first_real(hidden, valid)))
        return self.classifier(pooled), pooled


@implements(c.Classifier)
class Classifier(nn.Module):
    """One decision per row, from its first, last or mean real token."""

    def __init__(self, config: c.Classifier, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.pooler = None if config.hidden == "none" else nn.Linear(d_model, d_model)
        self.activation = None if config.hidden == "none" else ACTIVATIONS[config.hidden]
        self.classifier = nn.Linear(d_model, config.n_classes, bias=config.bias)

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        pooled = self.pool(hidden, valid)
        if self.pooler is not None and self.activation is not None:
            pooled = F.dropout(pooled, self.config.dropout, self.training)
            pooled = self.activation(self.pooler(pooled))
        return self.classifier(F.dropout(pooled, self.config.dropout, self.training)), pooled

    def pool(self, hidden: Hidden, valid: Valid) -> Float[Tensor, "B D"]:
        """One vector per row; padding has no say."""
        if self.config.pooling == "mean":
            weight = valid[..., None].to(hidden.dtype)
            return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        if self.config.pooling == "first":
            return first_real(hidden, valid)
        place = torch.arange(hidden.shape[1], device=hidden.device)
        return _rows(hidden, torch.where(valid, place, 0).max(1).values)


@implements(c.TokenClassifier)
class TokenClassifier(nn.Module):
    """One decision per token."""

    def __init__(self, config: c.TokenClassifier, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.classifier, self.dropout = nn.Linear(d_model, config.n_classes), config.dropout

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        return self.classifier(F.dropout(hidden, self.dropout, self.training)), None


@implements(c.Span)
class Span(nn.Module):
    """Scores of the first and the last token of an answer."""

    def __init__(self, config: c.Span, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(d_model, 2)

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        return self.classifier(hidden), None


@implements(c.AdaptiveSoftmax)
class AdaptiveSoftmax(nn.Module):
    """log p(token) = log p(cluster) + log p(token | cluster) (Grave 2016)."""

    def __init__(self, config: c.AdaptiveSoftmax, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.config, self.bounds = config, config.table.clusters(vocab_size, d_model)
        self.cluster_weight = nn.Parameter(torch.empty(len(config.cutoffs), d_model))
        self.cluster_bias = nn.Parameter(torch.empty(len(config.cutoffs)))
        self.biases = nn.ParameterList(torch.empty(stop - start) for start, stop, _ in self.bounds)
        self.clusters, self.projections = nn.ModuleDict(), nn.ModuleDict()
        for index, (start, stop, width) in enumerate(self.bounds):
            if not config.tied:
                self.clusters[str(index)] = nn.Embedding(stop - start, width)
            if config.projected and not config.ties_projection(index):
                self.projections[str(index)] = nn.Linear(width, d_model, bias=False)

    def forward(self, hidden: Hidden, table: nn.Module, valid: Valid) -> Answer:
        frequent = self.cutoff_scores(hidden, table)
        parts = [frequent[..., : self.bounds[0][1]]]
        for index in range(1, len(self.bounds)):
            inside = F.linear(self.project(hidden, index, table), self.matrix(index, table), self.biases[index])
            cluster = frequent[..., self.bounds[0][1] + index - 1, None]
            parts.append(cluster + inside.log_softmax(-1))
        return torch.cat(parts, -1), None

    def cutoff_scores(self, hidden: Hidden, table: nn.Module) -> Tensor:
        """Log-probabilities of the frequent tokens and of each cluster."""
        matrix = torch.cat((self.matrix(0, table), self.cluster_weight))
        bias = torch.cat((self.biases[0], self.cluster_bias))
        return F.linear(self.project(hidden, 0, table), matrix, bias).log_softmax(-1)

    def matrix(self, index: int, table: nn.Module) -> Tensor:
        """The cluster's rows: the head's own, or the token table's."""
        if not self.config.tied:
            return _weight(self.clusters[str(index)])
        if isinstance(table, FullTable):
            start, stop, _ = self.bounds[index]
            return table.weight[start:stop]
        assert isinstance(table, AdaptiveTable)
        return _weight(table.clusters[index])

    def project(self, hidden: Hidden, index: int, table: nn.Module) -> Tensor:
        """Hidden states in the cluster's width."""
        if not self.config.projected:
            return hidden
        if not self.config.ties_projection(index):
            return hidden @ _weight(self.projections[str(index)])
        assert isinstance(table, AdaptiveTable)
        return hidden @ _weight(table.projections[index])
