"""T5 (v1.0), T5 v1.1, Flan-T5 and mT5: relative buckets in the first layer's table, no biases, scores unscaled.

v1.0 ties its head to the token table and divides hidden states by sqrt(d_model) before it; v1.1, Flan-T5 and mT5 have a
head of their own and no factor. `tie_word_embeddings` says which, until release 5 of `transformers`, which writes true
for both and adds `scale_decoder_outputs`; a v1.1 head that a file leaves out is then the token table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.rules import Fallback, Ignored, Rule, Tied
from qkv.checkpoint.template import Case, Family, Json, Key, Keys, Leaf
from qkv.errors import CheckpointError

NORM = {"kind": "rmsnorm", "eps": Key("layer_norm_epsilon", 1e-6), "unit_offset": False, "cast": "before"}
DROPOUT = Key("dropout_rate", 0.1)
_WIDTH = {"d_ff": Key("d_ff"), "bias": False, "dropout": DROPOUT}
# Their word for the network: our kind and activation, and their name of the activation.
_NETWORKS = {
    "relu": ("dense", "relu", "relu"),
    "gated-gelu": ("gated", "gelu-tanh", "gelu_new"),
    "gated-silu": ("gated", "silu", "silu"),
    "gated-relu": ("gated", "relu", "relu"),
    "silu": ("dense", "silu", "silu"),
    "gelu": ("dense", "gelu", "gelu"),
    "gelu_new": ("dense", "gelu-tanh", "gelu_new"),
}


@dataclass(frozen=True)
class _Network(Case):
    """`feed_forward_proj`; the two keys that newer releases derive from it must agree."""

    def read(self, keys: Keys) -> Any:
        word = keys.get(self.name, self.default)
        network = super().read(keys)
        kind, _, activation = _NETWORKS[word]
        for key, derived in (("is_gated_act", kind == "gated"), ("dense_act_fn", activation)):
            found = keys.get(key, derived)
            if found != derived:
                raise CheckpointError(f"{keys.name}: {key} is {found!r}, but {self.name} {word!r} means {derived!r}")
        return network


FFN = _Network(
    "feed_forward_proj",
    {
        word: {"kind": kind, "activation": activation, **_WIDTH}
        for word, (kind, activation, _) in _NETWORKS.items()
    },
    default="relu",
)  # fmt: skip


@dataclass(frozen=True)
class _Head(Leaf):
    """Tied with a factor, or own without."""

    always_own: bool = False
    """mT5's releases have their own head, whatever newer files say."""

    def read(self, keys: Keys) -> Json:
        tied, scaled = keys.get("tie_word_embeddings", True), keys.get("scale_decoder_outputs", None)
        if self.always_own or not (tied if scaled is None else scaled):
            return {"kind": "lm", "tied": False, "scale": 1.0}
        return {"kind": "lm", "tied": True, "scale": "rsqrt_d_model"}

    def write(self, value: Any, out: Json) -> None:
        out["tie_word_embeddings"] = bool(value.get("tied")) if isinstance(value, Mapping) else True


def heads(pattern: str, positions: Json) -> Json:
    """Attention with unscaled scores."""
    return {
        "kind": "multi-head",
        "n_heads": Key("num_heads"),
        "head_dim": Key("d_kv"),
        "scale": 1.0,
        "qkv_bias": False,
        "o_bias": False,
        "dropout": DROPOUT,
        "pattern": {"kind": pattern},
        "positions": positions,
    }


def _buckets(bidirectional: bool) -> Json:
    return {
        "kind": "t5-buckets",
        "shared": True,
        "n_buckets": Key("relative_attention_num_buckets", 32),
        "max_distance": Key("relative_attention_max_distance", 128),
        "bidirectional": bidirectional,
    }


def _stack(n_layers: Leaf, **attention: Json) -> Json:
    layer = {**attention, "ffn": FFN, "norm": NORM, "residual": {"kind": "pre"}, "dropout": DROPOUT}
    return {"n_layers": n_layers, "layers": [layer], "norm": NORM}


def _template(head: Any, *, decoder: bool = True) -> Json:
    n_layers = Key("num_layers")
    template: Json = {
        "vocab_size": Key("vocab_size"),
        "d_model": Key("d_model"),
        "max_seq_len": Key("n_positions", 512),
        "embedding": {"dropout": DROPOUT},
        "encoder": _stack(n_layers, attention=heads("bidirectional", _buckets(True))),
        "head": head,
        "init": {"kind": "t5"},
    }
    if decoder:
        source = heads("bidirectional", {"kind": "none"})
        past = heads("causal", _buckets(False))
        template["decoder"] = _stack(Key("num_decoder_layers", n_layers), attention=past, cross_attention=source)
    return template


_PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
_SUBLAYERS = {"attention": "SelfAttention", "cross_attention": "EncDecAttention"}


def _layers(stack: str, *attentions: str) -> tuple[Rule, ...]:
    """A stack whose layers have these attentions, in order, and the network."""
    theirs, ours = f"{stack}.block.{{i}}.layer", f"{stack}.layers.{{i}}"
    network = f"{theirs}.{len(attentions)}.DenseReluDense"
    return (
        Rule(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{stack}.positions.0.weight"),
        *(
            Rule(f"{theirs}.{index}.{_SUBLAYERS[name]}.{t}.weight", f"{ours}.{name}.{o}.weight")
            for index, name in enumerate(attentions)
            for t, o in _PROJECTIONS.items()
        ),
        *(
            Rule(f"{theirs}.{index}.layer_norm.weight", f"{ours}.{name}_norm.weight")
            for index, name in enumerate((*attentions, "ffn"))
        ),
        Rule(f"{network}.wi.weight", f"{ours}.ffn.up_proj.weight", unless=f"{ours}.ffn.gate_proj.weight"),
        Rule(
            (f"{network}.wi_0.weight", f"{network}.wi_1.weight"),
            (f"{ours}.ffn.gate_proj.weight", f"{ours}.ffn.up_proj.weight"),
        ),
        Rule(f"{network}.wo.weight", f"{ours}.ffn.down_proj.weight"),
        Rule(f"{stack}.final_layer_norm.weight", f"{stack}.norm.weight"),
    )


_SHARED = Rule("shared.weight", "embed.tokens.weight")
_ENCODER, _DECODER = _layers("encoder", "attention"), _layers("decoder", "attention", "cross_attention")
_COPIES = tuple(Tied(f"{stack}.embed_tokens.weight", "shared.weight") for stack in ("encoder", "decoder"))
_UNUSED = Ignored(
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    "v1.0's files hold a table for cross-attention, which the model never reads",
)
_FREE = (
    "_num_labels", "classifier_dropout", "dense_act_fn", "initializer_factor", "initializer_range", "is_gated_act",
    "num_labels", "scale_decoder_outputs", "tie_word_embeddings",
)  # fmt: skip
_FREE_ENCODER = (*_FREE, "num_decoder_layers")


def _families(model_type: str, classes: str, head: _Head) -> tuple[Family, ...]:
    """The model with its head, without, and its encoder alone."""
    return (
        Family(
            name=model_type,
            model_types=(model_type,),
            architecture=f"{classes}ForConditionalGeneration",
            also=(f"{classes}WithLMHeadModel",),
            template=_template(head),
            rules=(_SHARED, *_ENCODER, *_DECODER, Rule("lm_head.weight", "head.weight")),
            must={"is_decoder": False},
            free=_FREE,
            ignored=(_UNUSED,),
            tied=(*_COPIES, Tied("lm_head.weight", "shared.weight")),
            spellings=(Fallback("lm_head.weight", "shared.weight"),),
        ),
        Family(
            name=f"{model_type}-model",
            model_types=(model_type,),
            architecture=f"{classes}Model",
            template=_template({"kind": "none"}),
            rules=(_SHARED, *_ENCODER, *_DECODER),
            must={"is_decoder": False},
            free=_FREE,
            ignored=(_UNUSED,),
            tied=_COPIES,
        ),
        Family(
            name=f"{model_type}-encoder",
            model_types=(model_type,),
            architecture=f"{classes}EncoderModel",
            template=_template({"kind": "none"}, decoder=False),
            rules=(_SHARED, *_ENCODER),
            must={"is_decoder": False},
            free=_FREE_ENCODER,
            ignored=(Ignored(r"decoder\..*|lm_head\.weight", "this model is the encoder alone"),),
            tied=_COPIES,
        ),
    )


FAMILIES = (*_families("t5", "T5", _Head()), *_families("mt5", "MT5", _Head(always_own=True)))
