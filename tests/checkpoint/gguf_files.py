"""GGUF files made by the `gguf` package from a peer's model, as llama.cpp's converter makes them: names from the
package's own table, metadata through its writer, and the three changes of values that the converter is known for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers as t
from torch import nn

from checkpoint.harness import VOCAB, randomised

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
Change = Callable[[str, np.ndarray], np.ndarray]


@dataclass
class Maker:
    """A peer's tiny model, and what a converter does with it."""

    make: Callable[[], nn.Module]
    arch: gguf.MODEL_ARCH
    change: Change = lambda name, array: array
    keys: dict[str, Any] = field(default_factory=dict)
    """Metadata beyond the common."""
    peer_reads: bool = True
    """Whether `transformers` reads this architecture's GGUF files."""


def permuted(n_heads: int, n_kv_heads: int) -> Change:
    """Queries and keys with their rows in pairs; each with its own number of heads."""

    def change(name: str, array: np.ndarray) -> np.ndarray:
        found = re.search(r"([qk])_proj", name)
        if found is None:
            return array
        heads, out = n_heads if found[1] == "q" else n_kv_heads, np.empty_like(array)
        width = len(array) // heads
        for head in range(heads):
            for pair in range(width // 2):
                out[head * width + 2 * pair] = array[head * width + pair]
                out[head * width + 2 * pair + 1] = array[head * width + width // 2 + pair]
        return out

    return change


def one_added(name: str, array: np.ndarray) -> np.ndarray:
    return array + np.float32(1) if name.endswith("norm.weight") else array


def transposed(name: str, array: np.ndarray) -> np.ndarray:
    return array.T if re.search(r"(c_attn|c_proj|c_fc)\.weight", name) else array


def build(name: str) -> nn.Module:
    """The peer's model with every parameter drawn."""
    return randomised(MAKERS[name].make())


def llama(**changes: Any) -> Callable[[], nn.Module]:
    settings = {**SMALL, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, **changes}
    return lambda: t.LlamaForCausalLM(t.LlamaConfig(**settings))


def gemma(model: Any, config: Any, **changes: Any) -> Callable[[], nn.Module]:
    settings = {**SMALL, "num_key_value_heads": 2, "head_dim": 12, **changes}
    return lambda: model(config(**settings))


GROUPED = {"attention.head_count_kv": 2, "rope.freq_base": 10000.0}
GEMMA_HEADS = {"attention.head_count_kv": 1, "attention.key_length": 12, "attention.value_length": 12}
MAKERS = {
    "llama": Maker(llama(), gguf.MODEL_ARCH.LLAMA, permuted(4, 2), GROUPED | {"rope.dimension_count": 8}),
    "llama-8-over-2": Maker(
        llama(num_attention_heads=8, hidden_size=64), gguf.MODEL_ARCH.LLAMA, permuted(8, 2),
        GROUPED | {"rope.dimension_count": 8},
    ),
    "llama-biases-tied": Maker(
        llama(attention_bias=True, tie_word_embeddings=True), gguf.MODEL_ARCH.LLAMA, permuted(4, 2),
        GROUPED | {"rope.dimension_count": 8}, peer_reads=False,  # its GGUF path does not know of biases
    ),
    "qwen2": Maker(
        lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**SMALL, num_key_value_heads=2)), gguf.MODEL_ARCH.QWEN2, keys=GROUPED
    ),
    "qwen3": Maker(
        lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)),
        gguf.MODEL_ARCH.QWEN3, keys=GROUPED,
    ),
    "gemma": Maker(
        gemma(t.GemmaForCausalLM, t.GemmaConfig, num_key_value_heads=1), gguf.MODEL_ARCH.GEMMA, one_added, GEMMA_HEADS,
        peer_reads=False,
    ),
    "gemma2": Maker(
        gemma(
            t.Gemma2ForCausalLM, t.Gemma2Config, num_key_value_heads=1, sliding_window=4, query_pre_attn_scalar=12,
            num_hidden_layers=3,
        ),
        gguf.MODEL_ARCH.GEMMA2, one_added,
        GEMMA_HEADS | {
            "attention.sliding_window": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Maker(
        gemma(
            t.Gemma3ForCausalLM, t.Gemma3TextConfig, num_key_value_heads=1, sliding_window=4, query_pre_attn_scalar=12,
            num_hidden_layers=8,
        ),
        gguf.MODEL_ARCH.GEMMA3, one_added,
        GEMMA_HEADS | {"attention.sliding_window": 4, "rope.freq_base": 1e6},
    ),
    "phi3": Maker(
        lambda: t.Phi3ForCausalLM(
            t.Phi3Config(**SMALL, num_key_value_heads=2, sliding_window=5, rms_norm_eps=1e-5, pad_token_id=0)
        ),
        gguf.MODEL_ARCH.PHI3, keys=GROUPED | {"attention.sliding_window": 5, "rope.dimension_count": 8},
    ),
    "gpt2": Maker(
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=64)
        ),
        gguf.MODEL_ARCH.GPT2, transposed,
    ),
    "bert": Maker(
        lambda: t.BertModel(t.BertConfig(**SMALL), add_pooling_layer=False), gguf.MODEL_ARCH.BERT,
        keys={"attention.causal": False, "pooling_type": 1}, peer_reads=False,
    ),
}  # fmt: skip
LAYERNORM = ("gpt2", "bert")


def convert(
    name: str, model: nn.Module, path: Path, *, omitted: tuple[str, ...] = (), keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None, per_file: int = 0,
) -> None:  # fmt: skip
    """Write the peer's model with the library, perhaps without some tensors or with more, or with other keys than its
    maker's; `per_file` tensors go into each of several files."""
    maker, config = MAKERS[name], model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[maker.arch], split_max_tensors=per_file)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.n_inner if name == "gpt2" else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if name in LAYERNORM:
        writer.add_layer_norm_eps(config.layer_norm_epsilon if name == "gpt2" else config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key, value in (maker.keys if keys is None else keys).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add: Any = kinds[type(value)]
        add(f"{gguf.MODEL_ARCH_NAMES[maker.arch]}.{key}", value)
    names = gguf.get_tensor_name_map(maker.arch, config.num_hidden_layers)
    for theirs, tensor in model.state_dict().items():
        renamed = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        tied = theirs == "lm_head.weight" and config.tie_word_embeddings
        if tied or renamed is None or renamed in omitted:
            assert tied or "position_ids" in theirs or "token_type_ids" in theirs or renamed in omitted, theirs
            continue
        writer.add_tensor(renamed, np.ascontiguousarray(maker.change(theirs, tensor.numpy())))
    for renamed, array in (extra or {}).items():
        writer.add_tensor(renamed, array)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    """Everything that was added, to disk."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
