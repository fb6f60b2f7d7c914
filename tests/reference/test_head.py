"""Heads by hand, tying, and the adaptive softmax."""

import math

import numpy as np
import pytest

import qkv.config as c
from qkv import reference
from qkv.errors import ConfigError, DataError
from qkv.reference import head

from .small import deviation, encoder, encoder_decoder, model, tokens

RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((5, 4))
EXISTS = np.array([False, True, True, True, False])
TABLE = {"weight": RNG.standard_normal((7, 4))}


def weights_of(config: c.Head, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(p.shape) for name, p in config.parameters(7, 4).items()}


def test_language_model_scales_multiplies_and_caps():
    config = c.LanguageModel(tied=False, bias=True, scale="rsqrt_d_model", softcap=3.0)
    weights = weights_of(config)
    logits, pooled = head.language_model(config, weights, TABLE, HIDDEN, EXISTS)
    raw = [sum(HIDDEN[2, d] / 2 * weights["weight"][v, d] for d in range(4)) + weights["bias"][v] for v in range(7)]
    assert logits[2] == pytest.approx([3 * math.tanh(z / 3) for z in raw])
    assert pooled is None


def test_a_tied_head_multiplies_by_the_token_table():
    logits, _ = head.language_model(c.LanguageModel(tied=True), {}, TABLE, HIDDEN, EXISTS)
    assert np.array_equal(logits, HIDDEN @ TABLE["weight"].T)


def test_masked_language_model():
    config = c.MaskedLanguageModel()
    weights = weights_of(config)
    logits, _ = head.masked_language_model(config, weights, TABLE, HIDDEN, EXISTS)
    x = weights["transform.weight"] @ HIDDEN[0] + weights["transform.bias"]
    x = np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x])
    x = (x - x.mean()) / x.std() * weights["norm.weight"] + weights["norm.bias"]
    assert logits[0] == pytest.approx(TABLE["weight"] @ x + weights["bias"], rel=1e-9)


def test_pooler_and_next_sentence_read_the_first_real_token():
    weights = weights_of(c.NextSentence())
    vector = np.tanh(weights["pooler.weight"] @ HIDDEN[1] + weights["pooler.bias"])
    logits, pooled = head.next_sentence(c.NextSentence(), weights, TABLE, HIDDEN, EXISTS)
    assert pooled == pytest.approx(vector)
    assert logits == pytest.approx(weights["classifier.weight"] @ vector + weights["classifier.bias"])
    nothing, pooled = head.pooler(c.Pooler(), weights, TABLE, HIDDEN, EXISTS)
    assert nothing is None
    assert pooled == pytest.approx(vector)


@pytest.mark.parametrize(
    ("pooling", "vector"),
    [("first", HIDDEN[1]), ("last", HIDDEN[3]), ("mean", (HIDDEN[1] + HIDDEN[2] + HIDDEN[3]) / 3)],
)
@pytest.mark.parametrize("hidden", ["none", "tanh", "relu"])
def test_classifier(pooling: str, vector: np.ndarray, hidden: str):
    config = c.Classifier(n_classes=3, pooling=pooling, hidden=hidden, bias=False)
    weights = weights_of(config)
    if hidden != "none":
        vector = weights["pooler.weight"] @ vector + weights["pooler.bias"]
        vector = np.tanh(vector) if hidden == "tanh" else np.maximum(vector, 0)
    logits, pooled = head.classifier(config, weights, TABLE, HIDDEN, EXISTS)
    assert pooled == pytest.approx(vector)
    assert logits == pytest.approx(weights["classifier.weight"] @ vector)


def test_a_row_without_a_real_token_cannot_be_pooled():
    with pytest.raises(DataError, match="a row has no valid token"):
        head.pooler(c.Pooler(), weights_of(c.Pooler()), TABLE, HIDDEN, np.full(5, False))


@pytest.mark.parametrize("config", [c.TokenClassifier(n_classes=2), c.Span()])
def test_two_numbers_per_token(config: c.Head):
    weights = weights_of(config)
    function = head.span if isinstance(config, c.Span) else head.token_classifier
    logits, _ = function(config, weights, TABLE, HIDDEN, EXISTS)
    assert logits[4] == pytest.approx(weights["classifier.weight"] @ HIDDEN[4] + weights["classifier.bias"])


def adaptive(**fields: object) -> c.ModelConfig:
    """20 tokens: 0-7 frequent, 8-13 of width 8, 14-19 of width 4."""
    table = c.AdaptiveTable(cutoffs=(8, 14), divisor=2)
    softmax = c.AdaptiveSoftmax(cutoffs=(8, 14), divisor=2, **fields)
    return model(embedding=c.Embedding(tokens=table), head=softmax)


@pytest.mark.parametrize(
    "fields",
    [{}, {"tied": False}, {"tied_projections": (False, True, True)}, {"tied": False, "tied_projections": (True,)}],
    ids=str,
)
def test_adaptive_softmax_is_a_distribution_and_a_product_of_two(fields: dict[str, object]):
    cfg = adaptive(**fields)
    weights = reference.random_weights(cfg, seed=2)
    out = reference.run(cfg, weights, tokens(2, 4))
    assert np.exp(out.logits).sum(axis=-1) == pytest.approx(np.ones((2, 4)), rel=1e-12)
    tied_matrices, tied_projections = fields.get("tied", True), fields.get("tied_projections", ())

    def tensor(name: str, tied: bool) -> np.ndarray:
        return weights[f"embed.tokens.{name}.weight" if tied else f"head.{name}.weight"]

    def scores(c: int) -> np.ndarray:
        projection = tensor(f"projections.{c}", c < len(tied_projections) and tied_projections[c])
        narrow = projection.T @ out.hidden[1, 2]
        return tensor(f"clusters.{c}", tied_matrices) @ narrow + weights[f"head.biases.{c}"]

    entries = tensor("projections.0", bool(tied_projections) and tied_projections[0]).T @ out.hidden[1, 2]
    entries = weights["head.cluster_weight"] @ entries + weights["head.cluster_bias"]
    first = np.exp(np.concatenate([scores(0), entries]))
    first /= first.sum()
    second, third = np.exp(scores(1)), np.exp(scores(2))
    expected = [*first[:8], *(first[8] * second / second.sum()), *(first[9] * third / third.sum())]
    assert np.exp(out.logits[1, 2]) == pytest.approx(expected, rel=1e-12)


def test_adaptive_table_reads_the_row_of_the_token_s_cluster():
    cfg = adaptive().override({"embedding.scale": 3.0})
    weights = reference.random_weights(cfg, seed=3)
    from qkv.reference.inputs import Inputs, rows
    from qkv.reference.model import embed
    from qkv.reference.ops import below

    row = rows(cfg, cfg.decoder, Inputs(np.array([[7, 8, 13, 14, 19]])))[0]
    x = embed(cfg, below(weights, "embed"), below(weights, "embed.tokens"), row)
    for t, (cluster, index) in enumerate([(0, 7), (1, 0), (1, 5), (2, 0), (2, 5)]):
        matrix = weights[f"embed.tokens.projections.{cluster}.weight"]
        assert x[t] == pytest.approx(3 * matrix @ weights[f"embed.tokens.clusters.{cluster}.weight"][index])


@pytest.mark.parametrize("kind", [c.NoHead(), c.Pooler()])
def test_forward_refuses_a_head_without_logits(kind: c.Head):
    cfg = encoder(head=kind)
    weights = reference.random_weights(cfg, seed=0)
    with pytest.raises(ConfigError, match=r"gives no logits: use reference\.run"):
        reference.forward(cfg, weights, tokens(1, 3))
    out = reference.run(cfg, weights, tokens(1, 3))
    assert out.logits is None
    assert out.hidden.shape == (1, 3, 16)
    assert (out.pooled is None) == isinstance(kind, c.NoHead)


@pytest.mark.parametrize("sharing", ["all", "tokens", "none"])
def test_a_tied_head_of_an_encoder_decoder_is_the_decoder_s_table(sharing: str):
    cfg = encoder_decoder(sharing=sharing, head=c.LanguageModel(tied=True))
    weights = reference.random_weights(cfg, seed=4)
    out = reference.run(cfg, weights, tokens(1, 3), source=tokens(1, 2, seed=5))
    name = "target_embed" if sharing == "none" else "embed"
    assert deviation(out.logits[0], out.hidden[0] @ weights[f"{name}.tokens.weight"].T) < 1e-15
