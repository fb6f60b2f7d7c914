"""Hand-written models as they stand in a file: plain dicts, one per published architecture that uses a part of the tree
in its own way. Small numbers, but the fields of the real ones."""

from typing import Any

from qkv.config import ModelConfig

Plain = dict[str, Any]


def multi_head(pattern: str | Plain = "causal", **fields: Any) -> Plain:
    """A multi-head attention of four heads, 8 wide."""
    written = {"kind": pattern} if isinstance(pattern, str) else pattern
    return {"kind": "multi-head", "n_heads": 4, "head_dim": 8, "pattern": written, **fields}


def block(attention: Plain, **fields: Any) -> Plain:
    """A pre-norm block with a small dense network."""
    return {
        "attention": attention,
        "ffn": {"kind": "dense", "d_ff": 48, "activation": "gelu"},
        "norm": {"kind": "layernorm"},
        "residual": {"kind": "pre"},
    } | fields


def decoder_only(*blocks: Plain, **fields: Any) -> Plain:
    """A language model of one decoder."""
    stack = {"n_layers": max(2, len(blocks)), "layers": list(blocks), "norm": {"kind": "layernorm"}}
    head = {"kind": "lm", "tied": True}
    return {"vocab_size": 96, "d_model": 32, "max_seq_len": 64, "decoder": stack, "head": head} | fields


def encoder_only(*blocks: Plain, **fields: Any) -> Plain:
    """An encoder with BERT's masked language model head."""
    model = decoder_only(*blocks, head={"kind": "masked-lm"}) | fields
    model["encoder"] = model.pop("decoder")
    return model


def encoder_decoder(**fields: Any) -> Plain:
    """The model of 2017: post-norm, sinusoids, shared embedding."""
    source, target = multi_head("bidirectional"), multi_head()
    post = {"residual": {"kind": "post"}}
    return {
        "vocab_size": 96,
        "d_model": 32,
        "max_seq_len": 64,
        "embedding": {"scale": "sqrt_d_model", "positions": {"kind": "sinusoidal"}},
        "encoder": {"n_layers": 2, "layers": [block(source, **post)]},
        "decoder": {"n_layers": 2, "layers": [block(target, cross_attention=source, **post)]},
        "head": {"kind": "lm", "tied": True},
        "init": {"kind": "xavier"},
    } | fields


def _llama() -> Plain:
    rotary = {"kind": "rotary", "theta": 5e5, "scaling": {"kind": "llama3", "factor": 8, "original_max_seq_len": 16}}
    return decoder_only(
        block(
            multi_head(n_kv_heads=2, positions=rotary),
            ffn={"kind": "gated", "d_ff": 48},
            norm={"kind": "rmsnorm"},
        )
    )


def _gemma() -> Plain:
    norm = {"kind": "rmsnorm", "eps": 1e-6, "unit_offset": True, "cast": "after"}
    parts = {"ffn": {"kind": "gated", "d_ff": 48, "activation": "gelu-tanh"}, "residual": {"kind": "sandwich"}}
    window, rotary = {"kind": "sliding-window", "window": 8}, {"kind": "rotary"}
    local = block(multi_head(window, n_kv_heads=1, positions=rotary, softcap=50, qk_norm=norm), norm=norm, **parts)
    whole = block(multi_head(n_kv_heads=1, positions=rotary | {"theta": 1e6}, scale=0.1), norm=norm, **parts)
    head = {"kind": "lm", "tied": True, "softcap": 30}
    return decoder_only(local, local, whole, embedding={"scale": "sqrt_d_model"}, head=head)


def _deepseek() -> Plain:
    latent = {
        "kind": "latent", "n_heads": 4, "q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_head_dim": 6,
        "pattern": {"kind": "causal"}, "positions": {"kind": "rotary", "layout": "pairs"},
    }  # fmt: skip
    experts = {
        "kind": "mixture-of-experts", "n_experts": 8, "top_k": 2, "d_ff": 16, "shared_d_ff": 16, "score": "sigmoid",
        "correction": True, "n_groups": 4, "top_groups": 2, "group_score": "top2", "scale": 2.5,
    }  # fmt: skip
    model = decoder_only(block(latent, ffn=experts))
    model["decoder"] |= {"n_layers": 3, "first": [block(latent)]}
    return model


def _longformer() -> Plain:
    pattern = {"kind": "longformer", "window": 8}
    learned = {"positions": {"kind": "learned", "offset": 2}, "n_segments": 1, "norm": {"kind": "layernorm"}}
    attention = multi_head(pattern, global_projections=True, qkv_bias=True, o_bias=True)
    return encoder_only(block(attention, residual={"kind": "post"}), embedding=learned, init={"kind": "bert"})


def _transformer_xl() -> Plain:
    attention = multi_head(positions={"kind": "transformer-xl", "clamp": 12})
    clusters = {"kind": "adaptive", "cutoffs": [24, 48], "divisor": 2}
    head = clusters | {"tied_projections": [False, True, True]}
    return decoder_only(block(attention, residual={"kind": "post"}), embedding={"tokens": clusters}, head=head)


def _t5() -> Plain:
    def attention(pattern: str, *, both_sides: bool) -> Plain:
        buckets = {"kind": "t5-buckets", "n_buckets": 16, "max_distance": 32, "bidirectional": both_sides}
        return multi_head(pattern, positions=buckets, scale=1)

    cross = multi_head("bidirectional", scale=1)
    norm = {"kind": "rmsnorm", "eps": 1e-6}
    encoder = block(attention("bidirectional", both_sides=True), norm=norm)
    decoder = block(attention("causal", both_sides=False), cross_attention=cross, norm=norm)
    return encoder_decoder(
        embedding={},
        encoder={"n_layers": 2, "layers": [encoder], "norm": norm},
        decoder={"n_layers": 2, "layers": [decoder], "norm": norm},
        head={"kind": "lm", "tied": True, "scale": "rsqrt_d_model"},
        init={"kind": "t5"},
    )


def _bloom() -> Plain:
    patterns = [{"kind": "sliding-window", "window": 8, "sinks": 2}, {"kind": "dilated", "window": 4, "dilation": 3}]
    attention = multi_head({"kind": "any-of", "patterns": patterns}, n_heads=3, positions={"kind": "alibi"})
    return decoder_only(block(attention, residual={"kind": "parallel"}), embedding={"norm": {"kind": "layernorm"}})


EXAMPLES: dict[str, Plain] = {
    "gpt2": decoder_only(
        block(multi_head(qkv_bias=True, o_bias=True)),
        embedding={"positions": {"kind": "learned"}, "dropout": 0.1},
        init={"kind": "gpt2"},
    ),
    "llama": _llama(),
    "gemma": _gemma(),
    "deepseek": _deepseek(),
    "longformer": _longformer(),
    "transformer-xl": _transformer_xl(),
    "bloom": _bloom(),
    "vaswani": encoder_decoder(),
    "t5": _t5(),
    "bert-classifier": encoder_only(
        block(multi_head("bidirectional"), residual={"kind": "post"}),
        embedding={"positions": {"kind": "learned"}, "n_segments": 2},
        head={"kind": "classifier", "n_classes": 3},
    ),
}


def example(name: str) -> ModelConfig:
    """The model of that name."""
    return ModelConfig.from_dict(EXAMPLES[name])
