"""MiniGPT: a decoder-only Transformer that trains by gradients derived by hand. NumPy only, float64, no autograd.

The model is GPT-2's plan (Radford et al. 2019) at teaching size: pre-norm blocks, learned positions, ReLU feed-forward
(Vaswani et al. 2017, arXiv 1706.03762), no bias in a linear layer, a head of its own (not tied to the embedding).

    h = E[tokens] + P[0 .. T-1]                                   (B, T, D)
    for each layer:   h = h + O(attention(Q(n), K(n), V(n)))      n = layernorm(h)
                      h = h + down(relu(up(n)))                   n = layernorm(h)
    logits = H layernorm(h)                                       (B, T, V)

Parameters: 2 V D + max_seq_len D + n_layers (4 D^2 + 2 D d_ff + 4 D) + 2 D. With the default sizes that is 112,768,
where the last 2 D = 128 belong to the final norm.

How to read this file. An operation is a pair: `op(inputs)` and `op_backward(d_out, inputs)`. The name `d_x` always
means the derivative of the loss with respect to x, and has the shape of x. The backward function gets d_out and returns
the derivative for each input; its docstring derives it. After the operations come the block and the model, which call
the same pairs in reverse order, then the optimizer and the loop. Dims: B batch, T tokens, D d_model, F width of a head,
V vocabulary.

>>> config = MiniGPTConfig()
>>> weights = init(config, seed=0)
>>> sum(weight.size for weight in weights.values())
112768
>>> counting = np.arange(17)[None]                                # one row: 0 1 2 ... 16
>>> losses = train(config, weights, [counting] * 60, AdamW(learning_rate=3e-3))
>>> generate(config, weights, counting[:, :3], max_new_tokens=5)
array([[0, 1, 2, 3, 4, 5, 6, 7]])
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qkv.errors import CheckpointError, ConfigError, DataError, GenerationError

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.integer]
Weights = dict[str, Array]  # name -> tensor; gradients use the same names

NORM_EPS = 1e-6
INIT_STD = 0.02  # GPT-2's constant


@dataclass(frozen=True)
class MiniGPTConfig:
    vocab_size: int = 100
    d_model: int = 64
    n_heads: int = 4
    n_layers: int = 2
    max_seq_len: int = 16
    d_ff: int = 256

    def __post_init__(self) -> None:
        for item in fields(self):
            size = getattr(self, item.name)
            if size < 1:
                raise ConfigError(f"MiniGPTConfig.{item.name}: must be at least 1, got {size}")
        if self.d_model % self.n_heads:
            raise ConfigError(
                f"MiniGPTConfig.n_heads: must divide d_model, but {self.d_model} / {self.n_heads} leaves "
                f"{self.d_model % self.n_heads}; choose a divisor of {self.d_model}"
            )


def shapes(config: MiniGPTConfig) -> dict[str, tuple[int, ...]]:
    """Every weight and its shape. A linear layer is stored as (outputs, inputs)."""
    d, ff = config.d_model, config.d_ff
    table: dict[str, tuple[int, ...]] = {
        "embed.tokens.weight": (config.vocab_size, d),
        "embed.positions.weight": (config.max_seq_len, d),
    }
    for layer in range(config.n_layers):
        prefix = layer_prefix(layer)
        table |= {prefix + "attention_norm.weight": (d,), prefix + "attention_norm.bias": (d,)}
        table |= {f"{prefix}attention.{name}_proj.weight": (d, d) for name in "qkvo"}
        table |= {prefix + "ffn_norm.weight": (d,), prefix + "ffn_norm.bias": (d,)}
        table |= {prefix + "ffn.up_proj.weight": (ff, d), prefix + "ffn.down_proj.weight": (d, ff)}
    return table | {"decoder.norm.weight": (d,), "decoder.norm.bias": (d,), "head.weight": (config.vocab_size, d)}


def init(config: MiniGPTConfig, seed: int) -> Weights:
    """Matrices are normal with deviation 0.02; a norm starts as the identity: scale 1, shift 0."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(config).items():
        if len(shape) == 2:
            weights[name] = rng.normal(0.0, INIT_STD, shape)
        else:
            weights[name] = np.zeros(shape) if name.endswith("bias") else np.ones(shape)
    return weights


# --- The operations, each with its backward ---------------------------------------------------------------------------


def embedding(table: Array, ids: Ids) -> Array:
    """y[b, t] = table[ids[b, t]]: row lookup, the same as a one-hot vector times the table."""
    return table[ids]


def embedding_backward(d_out: Array, table: Array, ids: Ids) -> Array:
    """A row used in several places is moved by all of them: d_table[r] = sum of d_out over the places where ids = r.

    `np.add.at` adds repeated ids one by one; `d_table[ids] += d_out` would keep only the last of them.
    """
    d_table = np.zeros_like(table)
    np.add.at(d_table, ids, d_out)
    return d_table


def linear(x: Array, weight: Array) -> Array:
    """y = x W^T: (..., I) and (O, I) give (..., O)."""
    return x @ weight.T


def linear_backward(d_out: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """y_o = sum_i W_oi x_i, so dy_o/dx_i = W_oi and dy_o/dW_oi = x_i. By the chain rule:

    d_x_i = sum_o d_y_o W_oi   and   d_W_oi = d_y_o x_i, summed over all places (batch, token) that used W.
    """
    outputs, inputs = weight.shape
    return d_out @ weight, d_out.reshape(-1, outputs).T @ x.reshape(-1, inputs)


def layernorm(x: Array, weight: Array, bias: Array) -> Array:
    """y = weight n + bias with n = (x - mean) / sqrt(variance + eps), over the last axis (Ba et al. 2016)."""
    return weight * _normalise(x)[0] + bias


def _normalise(x: Array) -> tuple[Array, Array]:
    """n, and r = 1 / sqrt(variance + eps)."""
    centred = x - x.mean(-1, keepdims=True)
    r = 1.0 / np.sqrt((centred**2).mean(-1, keepdims=True) + NORM_EPS)
    return centred * r, r


def layernorm_backward(d_out: Array, x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """d_x, d_weight, d_bias. Let c = x - mean, r = (mean(c^2) + eps)^(-1/2), n = c r and d_n = d_y weight, D features:

    1. n_i = c_i r, and dr/dc_j = -1/2 r^3 (2 c_j / D) = -r^2 n_j / D. Then
       d_c_j = r d_n_j - (r^2 n_j / D) sum_i d_n_i c_i = r (d_n_j - n_j mean(d_n n))     since r c_i = n_i.
    2. c_i = x_i - mean(x), so d_x_j = d_c_j - mean(d_c). As n has mean 0, this only takes away r mean(d_n):
       d_x = r (d_n - mean(d_n) - n mean(d_n n)).

    The gradient loses what the norm does not see: a shift of x, and (but for eps) a change of its length.
    """
    n, r = _normalise(x)
    d_n = d_out * weight
    d_x = r * (d_n - d_n.mean(-1, keepdims=True) - n * (d_n * n).mean(-1, keepdims=True))
    places = tuple(range(x.ndim - 1))
    return d_x, (d_out * n).sum(places), d_out.sum(places)


def relu(x: Array) -> Array:
    """y = max(x, 0)."""
    y: Array = np.maximum(x, 0.0)
    return y


def relu_backward(d_out: Array, x: Array) -> Array:
    """The slope is 1 where x > 0 and 0 where x < 0; at the kink any value between is valid, and we take 0."""
    d_x: Array = np.where(x > 0, d_out, 0.0)
    return d_x


def softmax(scores: Array) -> Array:
    """w_i = e^s_i / sum_j e^s_j over the last axis. Taking the maximum away changes nothing and prevents overflow."""
    exponentials: Array = np.exp(scores - scores.max(-1, keepdims=True))
    weights: Array = exponentials / exponentials.sum(-1, keepdims=True)
    return weights


def softmax_backward(d_out: Array, weights: Array) -> Array:
    """dw_i/ds_j = w_i ([i = j] - w_j), so d_s_j = w_j (d_w_j - sum_i d_w_i w_i). It needs only the result `weights`."""
    d_scores: Array = weights * (d_out - (d_out * weights).sum(-1, keepdims=True))
    return d_scores


def causal_weights(q: Array, k: Array) -> Array:
    """softmax(q k^T / sqrt(F)) where query t sees keys 0..t.

    The mask is chosen by where(). A mask made by a product, triangle * -inf, has 0 * -inf = NaN in each allowed place.
    """
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    allowed = np.tri(q.shape[-2], dtype=bool)
    return softmax(np.where(allowed, scores, -np.inf))


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """out = weights v, for any number of leading axes: q, k, v (..., T, F)."""
    return causal_weights(q, k) @ v


def causal_attention_backward(d_out: Array, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """out = W v, W = softmax(S), S = q k^T / sqrt(F): three products and a softmax, walked backwards.

    d_v = W^T d_out,  d_W = d_out v^T,  d_S = softmax_backward(d_W),  d_q = d_S k / sqrt(F),  d_k = d_S^T q / sqrt(F).
    A forbidden place needs no mask here: its weight is 0, and the softmax backward multiplies by the weight.
    """
    weights = causal_weights(q, k)
    d_scores = softmax_backward(d_out @ v.swapaxes(-1, -2), weights) / math.sqrt(q.shape[-1])
    return d_scores @ k, d_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ d_out


def cross_entropy(logits: Array, targets: Ids) -> float:
    """Mean over all targets of -log softmax(logits)[target] = log(sum_j e^l_j) - l_target."""
    shifted = logits - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, targets[..., None], -1)[..., 0]
    return float((np.log(np.exp(shifted).sum(-1)) - chosen).mean())


def cross_entropy_backward(logits: Array, targets: Ids) -> Array:
    """d/dl_j of log(sum e^l) is softmax(l)_j, and of -l_target is -[j = target]; the mean of N targets divides by N."""
    d_logits = softmax(logits)
    here = targets[..., None]
    np.put_along_axis(d_logits, here, np.take_along_axis(d_logits, here, -1) - 1.0, -1)
    return d_logits / targets.size


def split_heads(x: Array, n_heads: int) -> Array:
    """(B, T, D) -> (B, heads, T, F): head i owns features i F .. (i + 1) F - 1. Its backward is its inverse."""
    batch, length, d_model = x.shape
    return x.reshape(batch, length, n_heads, d_model // n_heads).swapaxes(1, 2)


def join_heads(x: Array) -> Array:
    """(B, heads, T, F) -> (B, T, D), the inverse of split_heads."""
    batch, n_heads, length, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, n_heads * head_dim)


# --- One block: two residual branches ---------------------------------------------------------------------------------


class BlockTrace(NamedTuple):
    """What the backward pass of a block needs from its forward pass: the input of each operation."""

    hidden: Array  # entered the block
    attention_input: Array  # its norm
    q: Array  # (B, heads, T, F)
    k: Array
    v: Array
    mixed: Array  # attention's result, before o_proj
    middle: Array  # hidden after the attention branch
    ffn_input: Array  # its norm
    up: Array  # (B, T, d_ff), before ReLU


def layer_prefix(layer: int) -> str:
    return f"decoder.layers.{layer}."


def layer_weights(weights: Weights, layer: int) -> Weights:
    """The weights of one layer, under their names inside the layer."""
    prefix = layer_prefix(layer)
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def block(w: Weights, hidden: Array, n_heads: int) -> tuple[Array, BlockTrace]:
    attention_input = layernorm(hidden, w["attention_norm.weight"], w["attention_norm.bias"])
    q, k, v = (split_heads(linear(attention_input, w[f"attention.{name}_proj.weight"]), n_heads) for name in "qkv")
    mixed = join_heads(causal_attention(q, k, v))
    middle = hidden + linear(mixed, w["attention.o_proj.weight"])
    ffn_input = layernorm(middle, w["ffn_norm.weight"], w["ffn_norm.bias"])
    up = linear(ffn_input, w["ffn.up_proj.weight"])
    out = middle + linear(relu(up), w["ffn.down_proj.weight"])
    return out, BlockTrace(hidden, attention_input, q, k, v, mixed, middle, ffn_input, up)


def block_backward(d_out: Array, w: Weights, trace: BlockTrace, n_heads: int) -> tuple[Array, Weights]:
    """The lines of `block` in reverse. A residual sum y = x + f(x) passes d_y on unchanged and adds f's share to it."""
    d: Weights = {}
    d_active, d["ffn.down_proj.weight"] = linear_backward(d_out, relu(trace.up), w["ffn.down_proj.weight"])
    d_up = relu_backward(d_active, trace.up)
    d_input, d["ffn.up_proj.weight"] = linear_backward(d_up, trace.ffn_input, w["ffn.up_proj.weight"])
    d_branch, d["ffn_norm.weight"], d["ffn_norm.bias"] = layernorm_backward(d_input, trace.middle, w["ffn_norm.weight"])
    d_middle = d_out + d_branch

    d_mixed, d["attention.o_proj.weight"] = linear_backward(d_middle, trace.mixed, w["attention.o_proj.weight"])
    d_heads = causal_attention_backward(split_heads(d_mixed, n_heads), trace.q, trace.k, trace.v)
    d_input = np.zeros_like(trace.attention_input)  # q, k and v read the same input: their shares add
    for name, d_head in zip("qkv", d_heads, strict=True):
        key = f"attention.{name}_proj.weight"
        d_share, d[key] = linear_backward(join_heads(d_head), trace.attention_input, w[key])
        d_input += d_share
    d_branch, d["attention_norm.weight"], d["attention_norm.bias"] = layernorm_backward(
        d_input, trace.hidden, w["attention_norm.weight"]
    )
    return d_middle + d_branch, d


# --- The model --------------------------------------------------------------------------------------------------------


def _check_tokens(config: MiniGPTConfig, tokens: Ids, longest: int) -> None:
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"tokens: need integers of shape (B, T), got {tokens.dtype} of shape {tokens.shape}")
    if tokens.shape[1] > longest:
        raise DataError(
            f"tokens: sequence of {tokens.shape[1]} is longer than {longest} (max_seq_len is {config.max_seq_len}); "
            "shorten it or build the model with a larger max_seq_len"
        )
    wrong = np.argwhere((tokens < 0) | (tokens >= config.vocab_size))
    if len(wrong):
        row, column = (int(index) for index in wrong[0])
        raise DataError(
            f"tokens: id {tokens[row, column]} at [{row}, {column}] is outside 0..{config.vocab_size - 1} "
            f"(vocab_size is {config.vocab_size}); use the tokenizer that this model was made for"
        )


def _check_weights(config: MiniGPTConfig, weights: Weights) -> None:
    needed = shapes(config)
    wrong = [f"{name} is missing" for name in needed.keys() - weights.keys()]
    wrong += [f"{name} is not part of the model" for name in weights.keys() - needed.keys()]
    for name in needed.keys() & weights.keys():
        if weights[name].shape != needed[name] or weights[name].dtype != np.float64:
            wrong += [f"{name} is {weights[name].dtype} {weights[name].shape}, must be float64 {needed[name]}"]
    if wrong:
        raise CheckpointError(
            "weights do not fit the config; compare both with shapes(config): " + "; ".join(sorted(wrong))
        )


def _forward(config: MiniGPTConfig, weights: Weights, tokens: Ids) -> tuple[Array, Array, list[BlockTrace]]:
    """logits (B, T, V), the hidden state that enters the final norm, and a trace of each block."""
    _check_weights(config, weights)
    positions = np.arange(tokens.shape[1])
    hidden = embedding(weights["embed.tokens.weight"], tokens) + embedding(weights["embed.positions.weight"], positions)
    traces = []
    for layer in range(config.n_layers):
        hidden, trace = block(layer_weights(weights, layer), hidden, config.n_heads)
        traces.append(trace)
    final = layernorm(hidden, weights["decoder.norm.weight"], weights["decoder.norm.bias"])
    return linear(final, weights["head.weight"]), hidden, traces


def forward(config: MiniGPTConfig, weights: Weights, tokens: Ids) -> Array:
    """tokens (B, T) -> logits (B, T, V). The logits at t predict token t + 1 and depend on tokens 0..t only."""
    _check_tokens(config, tokens, config.max_seq_len)
    return _forward(config, weights, tokens)[0]


def loss_and_gradients(config: MiniGPTConfig, weights: Weights, tokens: Ids) -> tuple[float, Weights]:
    """tokens (B, T + 1) -> the mean loss of B T predictions, and its derivative for each weight.

    Here, and nowhere else, labels are shifted: the model reads tokens 0..T-1 and must say 1..T. So a row may have
    max_seq_len + 1 tokens.
    """
    _check_tokens(config, tokens, config.max_seq_len + 1)
    if tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise DataError(f"tokens: need at least one row of 2 tokens to have a target, got shape {tokens.shape}")
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits, hidden, traces = _forward(config, weights, inputs)

    d: Weights = {}
    final = layernorm(hidden, weights["decoder.norm.weight"], weights["decoder.norm.bias"])
    d_logits = cross_entropy_backward(logits, targets)
    d_final, d["head.weight"] = linear_backward(d_logits, final, weights["head.weight"])
    d_hidden, d["decoder.norm.weight"], d["decoder.norm.bias"] = layernorm_backward(
        d_final, hidden, weights["decoder.norm.weight"]
    )
    for layer in reversed(range(config.n_layers)):
        d_hidden, d_layer = block_backward(d_hidden, layer_weights(weights, layer), traces[layer], config.n_heads)
        d |= {layer_prefix(layer) + name: gradient for name, gradient in d_layer.items()}
    positions = np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape)  # each row of the batch used each position
    d["embed.tokens.weight"] = embedding_backward(d_hidden, weights["embed.tokens.weight"], inputs)
    d["embed.positions.weight"] = embedding_backward(d_hidden, weights["embed.positions.weight"], positions)
    return cross_entropy(logits, targets), d


# --- Training and generation ------------------------------------------------------------------------------------------


@dataclass
class AdamW:
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101).

    m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2 are running means that start at 0. After t steps
    their weights sum to 1 - beta^t instead of 1; dividing by that removes the pull towards 0. Decay shrinks the weight
    directly, not through g, so that v does not scale it. Only matrices decay: a norm's scale rests at 1, not at 0.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    steps: int = 0
    m: Weights = field(default_factory=dict)
    v: Weights = field(default_factory=dict)

    def step(self, weights: Weights, gradients: Weights) -> None:
        """Updates the arrays of `weights` in place."""
        self.steps += 1
        for name, weight in weights.items():
            gradient = gradients[name]
            m = self.beta1 * self.m.get(name, 0.0) + (1 - self.beta1) * gradient
            v = self.beta2 * self.v.get(name, 0.0) + (1 - self.beta2) * gradient**2
            self.m[name], self.v[name] = m, v
            if weight.ndim == 2:
                weight *= 1 - self.learning_rate * self.weight_decay
            mean = m / (1 - self.beta1**self.steps)
            deviation = np.sqrt(v / (1 - self.beta2**self.steps))
            weight -= self.learning_rate * mean / (deviation + self.eps)


def train(config: MiniGPTConfig, weights: Weights, batches: Iterable[Ids], optimizer: AdamW) -> list[float]:
    """One update of `weights`, in place, for each batch (B, T + 1); returns the loss before each update."""
    losses = []
    for tokens in batches:
        loss, gradients = loss_and_gradients(config, weights, tokens)
        optimizer.step(weights, gradients)
        losses.append(loss)
    return losses


def generate(config: MiniGPTConfig, weights: Weights, tokens: Ids, max_new_tokens: int) -> Ids:
    """Greedy: append the most likely token, `max_new_tokens` times. (B, T) -> (B, T + max_new_tokens).

    Each step reads the whole text again; a key/value cache would save that, and is left out to keep the idea bare.
    """
    _check_tokens(config, tokens, config.max_seq_len)
    length = tokens.shape[1]
    if length < 1:
        raise GenerationError("generate: the prompt is empty; give it at least one token")
    if length + max_new_tokens - 1 > config.max_seq_len:  # the last new token is never read: it needs no position
        raise GenerationError(
            f"generate: a prompt of {length} with max_new_tokens {max_new_tokens} does not fit in max_seq_len "
            f"{config.max_seq_len}; ask for at most {config.max_seq_len - length + 1} new tokens"
        )
    for _ in range(max_new_tokens):
        logits = forward(config, weights, tokens)
        tokens = np.concatenate([tokens, logits[:, -1].argmax(-1)[:, None]], axis=1)
    return tokens
