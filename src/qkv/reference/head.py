"""Heads: from hidden states (T, D) to what the model is asked for. NumPy, float64.

Each takes its own tensors, the token table (for tied heads), hidden (T, D) and `exists` (T,): -> (logits, pooled).

    lm, masked-lm, adaptive, token-classifier, span   logits (T, V or classes)
    next-sentence, classifier                         logits (classes,) from one vector of the row
"""

from __future__ import annotations

import numpy as np

from qkv.config import (
    AdaptiveSoftmax,
    Classifier,
    LanguageModel,
    MaskedLanguageModel,
    NextSentence,
    NoHead,
    Pooler,
    Span,
    TokenClassifier,
)
from qkv.errors import DataError
from qkv.reference.ops import Array, Mask, Weights, activation, below, linear, log_softmax, norm, softcap
from qkv.reference.registry import register

Result = tuple[Array | None, Array | None]


def no_head(config: NoHead, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """Hidden states only."""
    return None, None


def language_model(config: LanguageModel, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """hidden * factor @ table^T + bias, softcapped: (T, V)."""
    matrix = (table if config.tied else weights)["weight"]
    logits = (hidden * config.factor(hidden.shape[1])) @ matrix.T
    if config.bias:
        logits = logits + weights["bias"]
    return softcap(logits, config.softcap), None


def masked_language_model(
    config: MaskedLanguageModel, weights: Weights, table: Weights, hidden: Array, exists: Mask
) -> Result:
    """norm(activation(transform(hidden))) @ table^T + bias: (T, V)."""
    x = activation(config.activation, linear(below(weights, "transform"), hidden))
    x = norm(config.norm, below(weights, "norm"), x)
    matrix = (table if config.tied else weights)["weight"]
    return x @ matrix.T + weights["bias"], None


def pooler(config: Pooler, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """tanh(dense(first real token)): (D,)."""
    return None, np.tanh(linear(below(weights, "pooler"), hidden[_real(exists)[0]]))


def next_sentence(config: NextSentence, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """Two logits from the pooler's vector."""
    pooled = np.tanh(linear(below(weights, "pooler"), hidden[_real(exists)[0]]))
    return linear(below(weights, "classifier"), pooled), pooled


def classifier(config: Classifier, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """Class logits from the first, the last, or the mean of the real tokens."""
    real = _real(exists)
    pooled = {"first": hidden[real[0]], "last": hidden[real[-1]], "mean": hidden[real].mean(axis=0)}[config.pooling]
    if config.hidden != "none":
        pooled = activation(config.hidden, linear(below(weights, "pooler"), pooled))
    return linear(below(weights, "classifier"), pooled), pooled


def _real(exists: Mask) -> list[int]:
    real = [t for t, e in enumerate(exists) if e]
    if not real:
        raise DataError("valid: this head makes one vector of a row, but a row has no valid token")
    return real


def token_classifier(config: TokenClassifier, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """One decision per token: (T, classes)."""
    return linear(below(weights, "classifier"), hidden), None


def span(config: Span, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """Start and end scores: (T, 2)."""
    return linear(below(weights, "classifier"), hidden), None


def adaptive_softmax(config: AdaptiveSoftmax, weights: Weights, table: Weights, hidden: Array, exists: Mask) -> Result:
    """log p(token) = log p(cluster) + log p(token | cluster): (T, V) (Grave 2016)."""

    starts = (0, *config.cutoffs)

    def scores(cluster: int) -> Array:
        bias = weights[f"biases.{cluster}"]
        if config.tied and "weight" in table:  # a full table: the cluster's rows of it
            rows = table["weight"][starts[cluster] : starts[cluster] + len(bias)]
        else:
            rows = (table if config.tied else weights)[f"clusters.{cluster}.weight"]
        if cluster == 0:  # the frequent tokens, and one entry per further cluster
            rows, bias = np.vstack([rows, weights["cluster_weight"]]), np.append(bias, weights["cluster_bias"])
        projected = hidden
        if config.projected:
            source = table if config.ties_projection(cluster) else weights
            projected = hidden @ source[f"projections.{cluster}.weight"]
        return linear({"weight": rows, "bias": bias}, projected)

    frequent = config.cutoffs[0]
    first = log_softmax(scores(0))
    parts = [first[:, :frequent]]
    for cluster in range(1, len(config.cutoffs) + 1):
        entry = first[:, frequent + cluster - 1 : frequent + cluster]
        parts.append(entry + log_softmax(scores(cluster)))
    return np.concatenate(parts, axis=1), None


register(NoHead, no_head)
register(LanguageModel, language_model)
register(MaskedLanguageModel, masked_language_model)
register(Pooler, pooler)
register(NextSentence, next_sentence)
register(Classifier, classifier)
register(TokenClassifier, token_classifier)
register(Span, span)
register(AdaptiveSoftmax, adaptive_softmax)
