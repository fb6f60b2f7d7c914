"""The oracle on a trained Llama of 260,000 parameters, against the recorded outputs of another engine."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import qkv.config as c
from qkv import reference

pytestmark = pytest.mark.data


def stories(path: Path) -> tuple[c.ModelConfig, dict[str, np.ndarray]]:
    """The model in the llama2.c format: seven integers, then its float32 tensors, each for all layers at once."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, groups, vocab, seq_len = struct.unpack("<7i", raw[:28])
    numbers, width = np.frombuffer(raw, dtype="<f4", offset=28), dim // heads
    shapes = {
        "embed.tokens": (vocab, dim), "attention_norm": (layers, dim), "attention.q_proj": (layers, heads * width, dim),
        "attention.k_proj": (layers, groups * width, dim), "attention.v_proj": (layers, groups * width, dim),
        "attention.o_proj": (layers, dim, heads * width), "ffn_norm": (layers, dim),
        "ffn.gate_proj": (layers, hidden, dim), "ffn.down_proj": (layers, dim, hidden),
        "ffn.up_proj": (layers, hidden, dim), "decoder.norm": (dim,),
    }  # fmt: skip
    weights, start = {}, 0
    for name, shape in shapes.items():
        tensor = numbers[start : start + int(np.prod(shape))].reshape(shape)
        start += tensor.size
        if "embed" in name or "decoder" in name:
            weights[f"{name}.weight"] = tensor
        else:
            weights |= {f"decoder.layers.{i}.{name}.weight": tensor[i] for i in range(layers)}
    attention = c.MultiHead(
        n_heads=heads, n_kv_heads=groups, head_dim=width, pattern=c.Causal(), positions=c.Rotary(layout="pairs")
    )
    block = c.Block(attention=attention, ffn=c.Gated(d_ff=hidden), norm=c.RMSNorm(), residual=c.PreNorm())
    decoder = c.Stack(n_layers=layers, layers=(block,), norm=c.RMSNorm())
    head = c.LanguageModel(tied=True)
    cfg = c.ModelConfig(vocab_size=vocab, d_model=dim, max_seq_len=seq_len, decoder=decoder, head=head)
    return cfg, weights


def test_logits_and_greedy_continuations(data: Path):
    cfg, weights = stories(data / "checkpoints" / "stories260K.bin")
    recorded = json.loads((data / "checkpoints" / "reference.json").read_text())["stories260K"]["cases"]
    for case in recorded:
        logits = reference.forward(cfg, weights, [case["prompt_ids"]])[0, -1]
        assert np.argsort(-logits)[:5].tolist() == case["top5_ids"]
        assert logits[case["top5_ids"]] == pytest.approx(case["top5_logits"], abs=1e-5)
        known = [*case["prompt_ids"], *case["greedy_new_ids"]]
        choices = reference.forward(cfg, weights, [known[:-1]])[0].argmax(axis=-1)
        assert choices[len(case["prompt_ids"]) - 1 :].tolist() == case["greedy_new_ids"]
