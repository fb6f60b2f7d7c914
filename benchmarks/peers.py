"""The models of other libraries that `benchmarks/train.py` measures beside ours, each in its library's own way.

`PEERS[style][name]` makes a model; a library that is not installed raises ImportError. `loss` is what a training loop
would take for its loss. Sizes, vocabulary and, as far as the library can say it, the architecture are those of ours:
no dropout, tied heads, the same widths; what still differs shows in the number of parameters.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STYLES = ("gpt", "llama", "bert", "t5")


@dataclass(frozen=True)
class Size:
    """Layers (of each stack), width, heads, tokens, rows, and the vocabulary."""

    n_layers: int
    d_model: int
    n_heads: int
    length: int
    batch: int
    vocab_size: int = 65

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads

    @property
    def gated(self) -> int:
        """Width of a gated network: two thirds of four times the model's, in whole cache lines."""
        return 8 * self.d_model // 3 // 32 * 32


@dataclass(frozen=True)
class Data:
    """What every model is trained on; targets of -100 ask for nothing."""

    tokens: Tensor
    targets: Tensor
    source: Tensor | None


Loss = Callable[[nn.Module, Data], Tensor]
Peer = tuple[nn.Module, Loss]


def of_logits(logits: Tensor, data: Data) -> Tensor:
    """The mean over the real targets."""
    return F.cross_entropy(logits.flatten(0, 1), data.targets.flatten())


def plain(model: nn.Module, data: Data) -> Tensor:
    """Of a model that answers logits."""
    return of_logits(model(data.tokens), data)


# transformers


def _hf(model: nn.Module, data: Data) -> Tensor:
    cache = {} if data.source is not None or "Bert" in type(model).__name__ else {"use_cache": False}
    return of_logits(model(input_ids=data.tokens, **cache).logits, data)


def _hf_pair(model: nn.Module, data: Data) -> Tensor:
    return of_logits(model(input_ids=data.source, decoder_input_ids=data.tokens, use_cache=False).logits, data)


def hf_gpt(size: Size) -> Peer:
    """GPT-2 with the exact GELU, whose tanh form is written out there in eight operations."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocab_size, n_positions=size.length, n_embd=size.d_model, n_layer=size.n_layers,
        n_head=size.n_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu",
    )  # fmt: skip
    return GPT2LMHeadModel(config), _hf


def hf_llama(size: Size) -> Peer:
    """Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab_size, hidden_size=size.d_model, intermediate_size=size.gated,
        num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, max_position_embeddings=size.length,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config), _hf


def hf_bert(size: Size) -> Peer:
    """BERT with its masked-language-model head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocab_size, hidden_size=size.d_model, num_hidden_layers=size.n_layers,
        num_attention_heads=size.n_heads, intermediate_size=4 * size.d_model, max_position_embeddings=size.length,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config), _hf


def hf_t5(size: Size) -> Peer:
    """T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=size.vocab_size, d_model=size.d_model, d_kv=size.head_dim, d_ff=4 * size.d_model,
        num_layers=size.n_layers, num_heads=size.n_heads, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), _hf_pair


# litgpt and x-transformers


def lit(size: Size, **more: Any) -> Peer:
    """litgpt's model."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=size.length, vocab_size=size.vocab_size, padded_vocab_size=size.vocab_size, n_layer=size.n_layers,
        n_head=size.n_heads, n_embd=size.d_model, parallel_residual=False, **more,
    )  # fmt: skip
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    return model, plain


def lit_gpt(size: Size) -> Peer:
    """It has no learned positions: this one has none at all, which is less to do."""
    return lit(size, rotary_percentage=0.0, norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP", bias=True)


def lit_llama(size: Size) -> Peer:
    """Llama."""
    llama = {"rotary_percentage": 1.0, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False}
    return lit(size, intermediate_size=size.gated, **llama)


def x_gpt(size: Size) -> Peer:
    """Pre-norm, learned positions."""
    from x_transformers import Decoder

    return _x(size, Decoder, use_abs_pos_emb=True)


def x_llama(size: Size) -> Peer:
    """Rotary, RMS norms, SwiGLU."""
    from x_transformers import Decoder

    gate = {"ff_swish": True, "ff_glu": True, "ff_no_bias": True, "ff_mult": size.gated / size.d_model}
    return _x(size, Decoder, use_abs_pos_emb=False, rotary_pos_emb=True, use_rmsnorm=True, **gate)


def x_bert(size: Size) -> Peer:
    """An encoder of post-norm layers."""
    from x_transformers import Encoder

    return _x(size, Encoder, use_abs_pos_emb=True, pre_norm=False)


def _x(size: Size, layers: Any, use_abs_pos_emb: bool, **more: Any) -> Peer:
    from x_transformers import TransformerWrapper

    stack = layers(
        dim=size.d_model, depth=size.n_layers, heads=size.n_heads, attn_dim_head=size.head_dim, attn_flash=True, **more
    )
    wrapped = TransformerWrapper(
        num_tokens=size.vocab_size, max_seq_len=size.length, attn_layers=stack, tie_embedding=True,
        use_abs_pos_emb=use_abs_pos_emb,
    )  # fmt: skip
    return wrapped, plain


# torch.nn


class TorchStack(nn.Module):
    """`nn.TransformerEncoder` between an embedding and a head: GPT with a causal mask, or BERT."""

    def __init__(self, size: Size, causal: bool) -> None:
        super().__init__()
        d = size.d_model
        self.tokens, self.positions = nn.Embedding(size.vocab_size, d), nn.Embedding(size.length, d)
        layer = nn.TransformerEncoderLayer(
            d, size.n_heads, 4 * d, 0.0, activation="gelu", batch_first=True, norm_first=causal
        )
        last = nn.LayerNorm(d) if causal else None
        self.stack = nn.TransformerEncoder(layer, size.n_layers, last, enable_nested_tensor=False)
        self.causal, self.first = causal, nn.Identity() if causal else nn.LayerNorm(d)
        self.transform = nn.Identity() if causal else nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.first(self.tokens(tokens) + self.positions(torch.arange(length)))
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.causal else None
        return F.linear(self.transform(self.stack(x, mask, is_causal=self.causal)), self.tokens.weight)


class TorchPair(nn.Module):
    """`nn.Transformer` between embeddings and a head; learned positions in place of T5's biases."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d, n = size.d_model, size.n_layers
        self.tokens, self.positions = nn.Embedding(size.vocab_size, d), nn.Embedding(size.length, d)
        self.stacks = nn.Transformer(
            d, size.n_heads, n, n, 4 * d, 0.0, batch_first=True, norm_first=True, activation="relu"
        )

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        at = self.positions(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        out = self.stacks(self.tokens(source) + at, self.tokens(tokens) + at, tgt_mask=mask, tgt_is_causal=True)
        return F.linear(out, self.tokens.weight)


def nn_pair(size: Size) -> Peer:
    """An encoder and a decoder."""
    return TorchPair(size), lambda model, data: of_logits(model(data.source, data.tokens), data)


def nano(path: Path | None) -> Callable[[Size], Peer]:
    """nanoGPT, which is no package: `path` holds its model.py."""

    def make(size: Size) -> Peer:
        if path is None:
            raise ImportError("give --nanogpt PATH, a folder with nanoGPT's model.py")
        spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        config = module.GPTConfig(
            block_size=size.length, vocab_size=size.vocab_size, n_layer=size.n_layers, n_head=size.n_heads,
            n_embd=size.d_model, dropout=0.0, bias=True,
        )  # fmt: skip
        return module.GPT(config), lambda model, data: model(data.tokens, data.targets)[1]

    return make


def peers(style: str, nanogpt: Path | None) -> dict[str, Callable[[Size], Peer]]:
    """What is measured beside ours."""
    found: dict[str, dict[str, Callable[[Size], Peer]]] = {
        "gpt": {
            "nanoGPT": nano(nanogpt), "transformers": hf_gpt, "litgpt": lit_gpt, "x-transformers": x_gpt,
            "torch.nn": lambda size: (TorchStack(size, causal=True), plain),
        },
        "llama": {"transformers": hf_llama, "litgpt": lit_llama, "x-transformers": x_llama},
        "bert": {
            "transformers": hf_bert, "x-transformers": x_bert,
            "torch.nn": lambda size: (TorchStack(size, causal=False), plain),
        },
        "t5": {"transformers": hf_t5, "torch.nn": nn_pair},
    }  # fmt: skip
    return found[style]
