"""Meta's folders against the same model in Hugging Face's form, run by the peer."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor

from checkpoint.harness import VOCAB, batch, deviation, our_logits, randomised
from qkv.checkpoint.huggingface import to_folder
from qkv.checkpoint.layout import to_halves
from qkv.checkpoint.meta import read_meta
from qkv.config import Llama3Scaling
from qkv.errors import CheckpointError
from qkv.nn import Transformer

HEADS, KV_HEADS, DIM, HEAD = 4, 2, 32, 8
NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
FRAME = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
PARAMS = {
    "dim": DIM, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "vocab_size": VOCAB, "multiple_of": 256,
    "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
ROWS, COLUMNS = 0, 1


def peer_model(**changes: Any) -> t.LlamaForCausalLM:
    settings = {
        "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }  # fmt: skip
    return randomised(t.LlamaForCausalLM(t.LlamaConfig(**settings | changes)))  # type: ignore[return-value]


def in_pairs(rows: Tensor) -> Tensor:
    """Halves to pairs, row by row."""
    out = torch.empty_like(rows)
    for head in range(len(rows) // HEAD):
        for pair in range(HEAD // 2):
            out[head * HEAD + 2 * pair] = rows[head * HEAD + pair]
            out[head * HEAD + 2 * pair + 1] = rows[head * HEAD + HEAD // 2 + pair]
    return out


def meta_tensors(peer: t.LlamaForCausalLM) -> dict[str, Tensor]:
    """The peer's tensors as Meta has them."""
    found = {"rope.freqs": torch.arange(4.0)}
    for name, tensor in peer.state_dict().items():
        if name in FRAME:
            found[FRAME[name]] = tensor
            continue
        _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
        value = in_pairs(tensor) if rest.endswith(("q_proj", "k_proj")) else tensor
        found[f"layers.{layer}.{NAMES[rest]}.weight"] = value
    return found


def axis_of(name: str, embedding: int) -> int | None:
    """Where the ranks of a model-parallel run cut a tensor."""
    if name.startswith("tok_embeddings"):
        return embedding
    if any(part in name for part in ("wq", "wk", "wv", "w1", "w3", "output")):
        return ROWS
    return COLUMNS if any(part in name for part in ("wo", "w2")) else None


def write_shards(folder: Path, tensors: dict[str, Tensor], count: int, embedding: int = COLUMNS) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(PARAMS))
    for rank in range(count):
        shard = {}
        for name, tensor in tensors.items():
            axis = axis_of(name, embedding) if count > 1 else None
            shard[name] = (tensor if axis is None else tensor.chunk(count, axis)[rank]).clone()
        torch.save(shard, folder / f"consolidated.{rank:02}.pth")


def compare(peer: t.LlamaForCausalLM, folder: Path) -> float:
    config, tensors = read_meta(folder, max_seq_len=64)
    model = Transformer(config).eval()
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    tokens, valid = batch("right")
    with torch.no_grad():
        expected = peer(input_ids=tokens, attention_mask=valid.long()).logits
        return deviation(expected, our_logits(model, tokens, valid), valid)


@pytest.mark.parametrize(("shards", "embedding"), [(1, ROWS), (2, COLUMNS), (2, ROWS)])
def test_equals_the_peer(shards: int, embedding: int, tmp_path: Path) -> None:
    peer = peer_model()
    write_shards(tmp_path / "meta", meta_tensors(peer), shards, embedding)
    assert compare(peer, tmp_path / "meta") < 1e-5


def test_becomes_the_hugging_face_folder_to_the_bit(tmp_path: Path) -> None:
    peer = peer_model()
    write_shards(tmp_path / "meta", meta_tensors(peer), 1)
    config, tensors = read_meta(tmp_path / "meta", max_seq_len=64)
    assert config.decoder is not None
    assert config.decoder.blocks[0].attention.positions.layout == "pairs"  # type: ignore[attr-defined]
    data, theirs = to_folder(*to_halves(config, tensors))
    assert (data["model_type"], data["num_key_value_heads"], data["rope_theta"]) == ("llama", KV_HEADS, 500000.0)
    assert set(theirs) == set(peer.state_dict())
    for name, value in peer.state_dict().items():
        assert np.array_equal(theirs[name], value.numpy()), name


def test_bfloat16_and_a_tied_head_of_llama_3_2(tmp_path: Path) -> None:
    peer = peer_model(
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    halved = {name: tensor.bfloat16() for name, tensor in meta_tensors(peer).items() if name != "rope.freqs"}
    write_shards(tmp_path / "meta", halved, 1)
    scaled = {"use_scaled_rope": True, "rope_scaling_factor": 32.0, "high_freq_factor": 4.0, "vocab_size": -1}
    (tmp_path / "meta" / "params.json").write_text(json.dumps(PARAMS | scaled))
    config, tensors = read_meta(tmp_path / "meta")
    assert config.vocab_size == VOCAB
    assert config.head.tied  # type: ignore[attr-defined]
    assert config.decoder is not None
    assert config.decoder.blocks[0].attention.positions.scaling == Llama3Scaling(  # type: ignore[attr-defined]
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
    )
    for name, array in tensors.items():
        assert array.dtype == np.uint16, name
    stored = halved["layers.1.attention.wv.weight"]
    assert np.array_equal(tensors["decoder.layers.1.attention.v_proj.weight"], stored.view(torch.uint16).numpy())


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    folder, tensors = tmp_path / "meta", meta_tensors(peer_model())
    key, query = "layers.1.attention.wk.weight", "layers.0.attention.wq.weight"
    cases: dict[str, dict[str, Tensor]] = {
        r"layers\.1\.attention\.wk\.weight is missing": {k: v for k, v in tensors.items() if k != key},
        r"adapter\.weight is not understood": tensors | {"adapter.weight": torch.zeros(2)},
        r"layers\.0\.attention\.wq\.weight gives shape": tensors | {query: torch.zeros(24, 32)},
        r"tok_embeddings\.weight is missing, or no matrix": tensors | {"tok_embeddings.weight": torch.zeros(3)},
    }
    for message, changed in cases.items():
        write_shards(folder, changed, 1)
        with pytest.raises(CheckpointError, match=message) as caught:
            read_meta(folder)
        assert str(folder) in str(caught.value)


def test_shards_must_be_all_there_and_fit(tmp_path: Path) -> None:
    folder, tensors = tmp_path / "meta", meta_tensors(peer_model())
    write_shards(folder, tensors, 4)
    (folder / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth is missing"):
        read_meta(folder)
    write_shards(folder, tensors, 2)
    (folder / "consolidated.03.pth").unlink()
    (folder / "consolidated.02.pth").unlink()
    last = torch.load(folder / "consolidated.01.pth", weights_only=True)
    torch.save(last | {"norm.weight": torch.zeros(DIM)}, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"norm\.weight: differs between the consolidated"):
        read_meta(folder)
    torch.save(last | {"more.weight": torch.zeros(DIM)}, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"more\.weight is not in every consolidated"):
        read_meta(folder)
    (folder / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointError, match="the tensors do not fit the config"):
        read_meta(folder)
    (folder / "consolidated.00.pth").unlink()
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth is missing"):
        read_meta(folder)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("{", "params.json: not JSON"),
        ("[1]", "params.json: not a table"),
        (json.dumps(PARAMS | {"vision_chunk_size": 448}), r"vision_chunk_size \(448\) is not understood"),
        (json.dumps({k: v for k, v in PARAMS.items() if k != "norm_eps"}), "key 'norm_eps' is missing"),
        (json.dumps(PARAMS | {"n_heads": 5}), r"n_heads \(5\) must divide dim \(32\)"),
        (json.dumps(PARAMS | {"n_kv_heads": 3}), r"n_kv_heads: must divide n_heads"),
    ],
)
def test_parameters_are_checked(params: str, message: str, tmp_path: Path) -> None:
    write_shards(tmp_path / "meta", meta_tensors(peer_model()), 1)
    (tmp_path / "meta" / "params.json").write_text(params)
    with pytest.raises(CheckpointError, match=message):
        read_meta(tmp_path / "meta")


class Code:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_code_in_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "meta", meta_tensors(peer_model()), 1)
    torch.save({"tok_embeddings.weight": Code()}, tmp_path / "meta" / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        read_meta(tmp_path / "meta")
    (tmp_path / "meta" / "consolidated.00.pth").write_bytes(pickle.dumps(Code(), 2))
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth"):
        read_meta(tmp_path / "meta")
    assert not (tmp_path / "ran").exists()
