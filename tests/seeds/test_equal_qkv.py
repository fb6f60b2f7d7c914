"""Each sound listing equals the qkv model, and the oracle, configured like it and given its weights, in float64.

A part is compared through a whole model of one layer, whose token table holds the input vectors and whose other
tensors are zero: with `pre` residuals and no norm the hidden states are then x + part(x), or part(x) where the part
is a norm.
"""

import numpy as np
import pytest
import torch

import qkv
from qkv import config as c

from .listings import (
    s0_attention,
    s0_multi_head,
    s0_norm,
    s0_rope,
    s0_swiglu,
    s0_transformer,
    s1_feed_forward,
    s1_layer_norm,
    s1_mini_gpt,
    s1_multi_head,
    s1_sinusoidal,
)
from .measure import WithoutPositions, causal, deviation

T, D = 6, 8
LAYER = "decoder.layers.0."


@pytest.fixture(autouse=True)
def seeded():
    np.random.seed(0)
    torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def matrix() -> torch.Tensor:
    return normal(D, D) / D**0.5  # keeps the scores near 1, so that no softmax saturates


# --- a model made of one part ---------------------------------------------------------------------------------------


def block(**parts) -> c.Block:
    """A block that does nothing but what `parts` say, once its remaining weights are zero."""
    silent = {
        "attention": heads(1),
        "ffn": c.Dense(d_ff=1, activation="relu"),
        "norm": c.NoNorm(),
        "residual": c.PreNorm(),
    }
    return c.Block(**(silent | parts))


def heads(n_heads: int, d_model: int = D, pattern: c.Pattern | None = None, **options) -> c.MultiHead:
    pattern = pattern or c.Causal()
    return c.MultiHead(n_heads=n_heads, head_dim=d_model // n_heads, pattern=pattern, **options)


def one_layer(layer: c.Block, side: str = "decoder", norm: c.Norm | None = None, **options) -> c.ModelConfig:
    stack = c.Stack(n_layers=1, layers=(layer,), norm=norm or c.NoNorm())
    return c.ModelConfig(vocab_size=T, d_model=D, max_seq_len=T, **{side: stack}, **options)


def on_torch(cfg: c.ModelConfig, weights: dict, tokens: np.ndarray):
    model = qkv.build(cfg, seed=0, dtype=torch.float64)
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in weights.items()})
    with torch.no_grad():
        return model(torch.from_numpy(tokens))


@pytest.fixture(params=[on_torch, qkv.reference.run], ids=["torch", "oracle"])
def run(request):
    """Runs a config with these weights on int tokens; tensors that are not named are zero."""

    def with_zeros(cfg: c.ModelConfig, weights: dict, tokens: np.ndarray):
        shapes = {name: shape for name, (shape, _) in cfg.parameters().items()}
        assert set(weights) <= set(shapes), f"not tensors of the model: {set(weights) - set(shapes)}"
        zeros = {name: np.zeros(shape) for name, shape in shapes.items()}
        return request.param(cfg, zeros | {name: as_numpy(values) for name, values in weights.items()}, tokens)

    return with_zeros


@pytest.fixture
def hidden(run):
    """What a model makes of the vectors x (T, D)."""

    def of(cfg: c.ModelConfig, x: torch.Tensor, weights: dict):
        return run(cfg, {"embed.tokens.weight": x} | weights, np.arange(len(x))[None]).hidden[0]

    return of


def as_numpy(values) -> np.ndarray:
    return values.detach().numpy() if isinstance(values, torch.Tensor) else values


def projections(q, k, v, o, at: str = LAYER) -> dict:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {f"{at}attention.{name}.weight": values for name, values in zip(names, (q, k, v, o), strict=True)}


# --- seed 0 ---------------------------------------------------------------------------------------------------------


def test_attention_listing_is_one_causal_head(hidden):
    x, w_q, w_k, w_v = normal(T, D), matrix(), matrix(), matrix()
    q, k, v = s0_attention.project(x, w_q, w_k, w_v)
    listing = s0_attention.scaled_dot_product_attention(q, k, v, torch.tril(torch.ones(T, T)))
    weights = projections(w_q.T, w_k.T, w_v.T, torch.eye(D, dtype=torch.float64))
    assert deviation(hidden(one_layer(block()), x, weights), x + listing) < 1e-12


def test_multi_head_listing_with_its_mask_is_multi_head(hidden, monkeypatch):
    monkeypatch.setattr(s0_multi_head, "causal_mask", torch.tril(torch.ones(T, T)), raising=False)
    listing, x = s0_multi_head.MultiHeadAttention(D, 2).double(), normal(T, D)
    weights = projections(*listing.qkv_proj.weight.chunk(3), listing.out_proj.weight)
    got = hidden(one_layer(block(attention=heads(2))), x, weights)
    assert deviation(got, x + listing(x[None])[0]) < 1e-12


@pytest.mark.parametrize(("n_heads", "bound"), [(4, 1e-12), (1, 1e-6)])
def test_apply_rope_listing_is_rotary_with_adjacent_pairs(hidden, n_heads: int, bound: float):
    """Of a head of two the one frequency is exactly 1; of a wider one the listing's are float32, ours float64."""
    x, w_q, w_k, w_v, w_o = normal(T, D), matrix(), matrix(), matrix(), matrix()
    q, k, v = ((x @ w).view(T, n_heads, D // n_heads).transpose(0, 1)[None] for w in (w_q, w_k, w_v))
    positions = torch.arange(T, dtype=torch.float64)
    q, k = s0_rope.apply_rope(q, positions), s0_rope.apply_rope(k, positions)
    heads_out = s0_attention.scaled_dot_product_attention(q, k, v, torch.tril(torch.ones(T, T)))
    listing = heads_out[0].transpose(0, 1).reshape(T, D) @ w_o
    attention = heads(n_heads, positions=c.Rotary(theta=10_000.0, layout="pairs"))
    got = hidden(one_layer(block(attention=attention)), x, projections(w_q.T, w_k.T, w_v.T, w_o.T))
    assert deviation(got, x + listing) < bound
    halves = heads(n_heads, positions=c.Rotary(theta=10_000.0, layout="halves"))
    other = hidden(one_layer(block(attention=halves)), x, projections(w_q.T, w_k.T, w_v.T, w_o.T))
    assert (deviation(other, x + listing) > 1e-3) is (n_heads == 1), "with one pair both layouts are one"


def test_swiglu_listing_is_gated(hidden):
    listing, x = s0_swiglu.SwiGLUFFN(D, 12).double(), normal(T, D)
    cfg = one_layer(block(ffn=c.Gated(d_ff=12, activation="silu")))
    assert deviation(hidden(cfg, x, swiglu(listing, LAYER)), x + listing(x)) < 1e-12


def swiglu(listing: s0_swiglu.SwiGLUFFN, at: str) -> dict:
    names = {"gate_proj": listing.w_gate, "up_proj": listing.w1, "down_proj": listing.w2}
    return {f"{at}ffn.{name}.weight": linear.weight for name, linear in names.items()}


def test_rmsnorm_listing_is_rmsnorm(hidden):
    listing, x = s0_norm.RMSNorm(D).double(), normal(T, D)
    torch.nn.init.normal_(listing.weight)
    cfg = one_layer(block(), norm=c.RMSNorm(eps=1e-6))
    assert deviation(hidden(cfg, x, {"decoder.norm.weight": listing.weight}), listing(x)) < 1e-12


@pytest.mark.parametrize(("residual", "placement"), [(c.PreNorm(), "pre_norm"), (c.PostNorm(), "post_norm")])
def test_placement_lines_are_pre_and_post(hidden, residual: c.Residual, placement: str, monkeypatch):
    monkeypatch.setattr(s0_multi_head, "causal_mask", torch.tril(torch.ones(T, T)), raising=False)
    attention, ffn = s0_multi_head.MultiHeadAttention(D, 2).double(), s0_swiglu.SwiGLUFFN(D, 12).double()
    norm, x = s0_norm.RMSNorm(D).double(), 3 * normal(T, D)
    listing = getattr(s0_norm, placement)(x[None], norm, attention, ffn)[0]
    cfg = one_layer(block(attention=heads(2), ffn=c.Gated(d_ff=12), norm=c.RMSNorm(eps=1e-6), residual=residual))
    weights = projections(*attention.qkv_proj.weight.chunk(3), attention.out_proj.weight) | swiglu(ffn, LAYER)
    weights |= {f"{LAYER}{name}.weight": torch.ones(D) for name in ("attention_norm", "ffn_norm")}
    assert deviation(hidden(cfg, x, weights), listing) < 1e-12


@pytest.mark.parametrize("rotated", [False, True])
def test_whole_model_with_the_faults_of_e32_mended_is_a_llama(run, rotated: bool, monkeypatch):
    """`rotated`: with `apply_rope` where the text wants it, and two elements per head, for exact angles."""
    monkeypatch.setattr(s0_multi_head, "causal_mask", torch.tril(torch.ones(T, T)), raising=False)
    if rotated:
        monkeypatch.setattr(s0_multi_head, "scaled_dot_product_attention", rotated_attention)
    listing = s0_transformer.Transformer(vocab_size=11, d_model=D, n_heads=4, n_layers=3, d_ff=12).double()
    for layer in listing.layers:
        layer.attention = WithoutPositions(layer.attention)
    for parameter in listing.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    positions = c.Rotary(theta=10_000.0, layout="pairs") if rotated else c.NoPositions()
    layer = block(attention=heads(4, positions=positions), ffn=c.Gated(d_ff=12), norm=c.RMSNorm(eps=1e-6))
    cfg = c.ModelConfig(
        vocab_size=11,
        d_model=D,
        max_seq_len=T,
        decoder=c.Stack(n_layers=3, layers=(layer,), norm=c.RMSNorm(eps=1e-6)),
        head=c.LanguageModel(tied=False),
    )
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 10, 0, 2, 1]])
    weights = llama_weights(listing)
    assert set(weights) == set(cfg.parameters())
    assert deviation(run(cfg, weights, tokens.numpy()).logits, listing(tokens)) < 1e-12


def rotated_attention(q, k, v, mask):
    positions = torch.arange(q.shape[-2], dtype=torch.float64)
    q, k = s0_rope.apply_rope(q, positions), s0_rope.apply_rope(k, positions)
    return s0_attention.scaled_dot_product_attention(q, k, v, mask)


def llama_weights(listing: s0_transformer.Transformer) -> dict:
    weights = {
        "embed.tokens.weight": listing.embedding.weight,
        "decoder.norm.weight": listing.norm.weight,
        "head.weight": listing.output.weight,
    }
    for index, layer in enumerate(listing.layers):
        at, attention = f"decoder.layers.{index}.", layer.attention.attention
        weights |= projections(*attention.qkv_proj.weight.chunk(3), attention.out_proj.weight, at) | swiglu(
            layer.ffn, at
        )
        weights |= {f"{at}attention_norm.weight": layer.attn_norm.weight, f"{at}ffn_norm.weight": layer.ffn_norm.weight}
    return weights


# --- seed 1 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "pattern", "mask"),
    [("encoder", c.Bidirectional(), None), ("decoder", c.Causal(), causal(T))],
)
def test_numpy_multi_head_listing_is_multi_head(hidden, side: str, pattern: c.Pattern, mask):
    listing, x = s1_multi_head.MultiHeadAttention(D, 2), normal(T, D)
    output, _ = listing.forward(x.numpy()[None], mask=mask)
    cfg = one_layer(block(attention=heads(2, pattern=pattern)), side=side)
    matrices = (listing.W_Q.T, listing.W_K.T, listing.W_V.T, listing.W_O.T)
    got = hidden(cfg, x, projections(*matrices, at=f"{side}.layers.0."))
    assert deviation(got, x.numpy() + output[0]) < 1e-12


def test_sinusoidal_listing_is_sinusoidal(hidden):
    cfg = one_layer(block(), embedding=c.Embedding(positions=c.Sinusoidal()))
    got = hidden(cfg, torch.zeros(T, D, dtype=torch.float64), {})
    listing = s1_sinusoidal.get_sinusoidal_positional_encoding(T, D)
    assert deviation(got, listing) < 1e-6  # the listing's angles are float32


def test_feed_forward_listing_is_dense_relu(hidden):
    listing, x = s1_feed_forward.FeedForward(D, 32), normal(T, D)
    listing.b1, listing.b2 = np.random.randn(32), np.random.randn(D)
    cfg = one_layer(block(ffn=c.Dense(d_ff=32, activation="relu", bias=True)))
    weights = {
        f"{LAYER}ffn.up_proj.weight": listing.W1.T,
        f"{LAYER}ffn.up_proj.bias": listing.b1,
        f"{LAYER}ffn.down_proj.weight": listing.W2.T,
        f"{LAYER}ffn.down_proj.bias": listing.b2,
    }
    assert deviation(hidden(cfg, x, weights), x.numpy() + listing.forward(x.numpy())) < 1e-12


def test_layer_norm_listing_is_layernorm(hidden):
    listing, x = s1_layer_norm.LayerNorm(D), normal(T, D)
    listing.gamma, listing.beta = np.random.randn(D), np.random.randn(D)
    cfg = one_layer(block(), norm=c.LayerNorm(eps=1e-6))
    got = hidden(cfg, x, {"decoder.norm.weight": listing.gamma, "decoder.norm.bias": listing.beta})
    assert deviation(got, listing.forward(x.numpy())) < 1e-12


def test_add_and_norm_listing_is_a_post_norm_sublayer(hidden):
    attention, x = s1_multi_head.MultiHeadAttention(D, 2), normal(T, D)
    first, second = s1_layer_norm.LayerNorm(D), s1_layer_norm.LayerNorm(D)
    first.gamma, second.beta = np.random.randn(D), np.random.randn(D)
    after_attention = s1_layer_norm.add_and_norm(
        x.numpy()[None], attention.forward(x.numpy()[None], causal(T))[0], first
    )
    listing = s1_layer_norm.add_and_norm(after_attention, 0, second)[0]  # a feed-forward network of zeros
    cfg = one_layer(block(attention=heads(2), norm=c.LayerNorm(eps=1e-6), residual=c.PostNorm()))
    weights = projections(attention.W_Q.T, attention.W_K.T, attention.W_V.T, attention.W_O.T)
    weights |= layer_norm(first, f"{LAYER}attention_norm") | layer_norm(second, f"{LAYER}ffn_norm")
    assert deviation(hidden(cfg, x, weights), listing) < 1e-12


def layer_norm(listing, at: str) -> dict:
    return {f"{at}.weight": listing.gamma, f"{at}.bias": listing.beta}


# --- the whole MiniGPT ----------------------------------------------------------------------------------------------


def mini_gpt_config() -> c.ModelConfig:
    m = s1_mini_gpt
    layer = block(
        attention=heads(m.NUM_HEADS, m.D_MODEL),
        ffn=c.Dense(d_ff=m.D_FF, activation="relu"),
        norm=c.LayerNorm(eps=1e-6),
    )
    return c.ModelConfig(
        vocab_size=m.VOCAB_SIZE,
        d_model=m.D_MODEL,
        max_seq_len=m.SEQ_LEN,
        embedding=c.Embedding(positions=c.Learned()),
        decoder=c.Stack(n_layers=m.NUM_LAYERS, layers=(layer,), norm=c.LayerNorm(eps=1e-6)),
        head=c.LanguageModel(tied=False),
    )


def mini_gpt_weights(listing: s1_mini_gpt.MiniGPT) -> dict:
    weights = {
        "embed.tokens.weight": listing.token_embed,
        "embed.positions.weight": listing.pos_embed,
        "head.weight": listing.lm_head.T,
    }
    weights |= layer_norm(listing.final_ln, "decoder.norm")
    for index, part in enumerate(listing.blocks):
        at = f"decoder.layers.{index}."
        weights |= layer_norm(part.ln1, f"{at}attention_norm") | layer_norm(part.ln2, f"{at}ffn_norm")
        weights |= projections(part.attn.W_Q.T, part.attn.W_K.T, part.attn.W_V.T, part.attn.W_O.T, at)
        weights |= {f"{at}ffn.up_proj.weight": part.ffn.W1.T, f"{at}ffn.down_proj.weight": part.ffn.W2.T}
    return weights


def test_mini_gpt_config_has_the_right_count_and_every_tensor_of_the_listing():
    cfg, listing = mini_gpt_config(), s1_mini_gpt.demo()[0]
    assert cfg.n_parameters == 112_768
    shapes = {name: values.shape for name, values in mini_gpt_weights(listing).items()}
    assert shapes == {name: shape for name, (shape, _) in cfg.parameters().items()}


def test_mini_gpt_listing_is_a_qkv_model(run):
    listing, input_ids, logits, next_token = s1_mini_gpt.demo()
    got = run(mini_gpt_config(), mini_gpt_weights(listing), input_ids).logits
    assert got.shape == (2, 8, 100)
    assert deviation(got, logits) < 1e-10
    assert got[:, -1].argmax(-1).tolist() == next_token.tolist() == [20, 50]


def test_mini_gpt_listing_and_qkv_choose_the_same_tokens_to_the_end_of_the_context(run):
    listing, tokens, _, _ = s1_mini_gpt.demo()
    cfg, weights = mini_gpt_config(), mini_gpt_weights(listing)
    for length in range(8, s1_mini_gpt.SEQ_LEN + 1):
        assert tokens.shape == (2, length)
        logits, got = listing.forward(tokens), run(cfg, weights, tokens).logits
        assert deviation(got, logits) < 1e-10
        chosen = logits[:, -1].argmax(-1)
        assert got[:, -1].argmax(-1).tolist() == chosen.tolist()
        tokens = np.concatenate([tokens, chosen[:, None]], axis=1)
