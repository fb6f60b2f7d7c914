"""RoBERTa and its two namesakes, Longformer, DistilBERT, RoFormer and BigBird against the peer library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor, nn
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

import qkv
from checkpoint.as_family import drawn
from checkpoint.harness import VOCAB, Peer, batch, deviation, load_ours
from qkv.checkpoint.huggingface import family_for, read_config, read_model, write_config
from qkv.checkpoint.safetensors import File, write
from qkv.config import BigBird, Coordinates, Learned, Longformer, ModelConfig
from qkv.errors import CheckpointError
from qkv.nn import Transformer

from .test_bert import LEGACY as BERT_LEGACY
from .test_bert import (
    SMALL,
    check_own,
    our_logits,
    our_vectors,
    outputs,
    peer_call,
    peer_logits,
    peer_span,
    peer_vectors,
)

Run = Callable[[nn.Module, Tensor, Tensor], Tensor]
OurRun = Callable[[Transformer, Tensor, Tensor], Tensor]

LEGACY = {
    **{k: v for k, v in BERT_LEGACY.items() if k not in ("model_type", "position_embedding_type")},
    "bos_token_id": 0, "eos_token_id": 2, "layer_norm_eps": 1e-5, "pad_token_id": 1, "type_vocab_size": 1,
}  # fmt: skip


def plain_call(model: nn.Module, tokens: Tensor, valid: Tensor) -> Any:
    """For models without segments, or with one."""
    return model(input_ids=tokens, attention_mask=valid.long())


def plain_logits(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return plain_call(model, tokens, valid).logits


def plain_vectors(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = plain_call(model, tokens, valid)
    return outputs(tokens, valid, out.last_hidden_state, out.get("pooler_output"))


def plain_span(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = plain_call(model, tokens, valid)
    return torch.stack((out.start_logits, out.end_logits), -1)


def our_plain_logits(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    found = model(tokens, valid=valid).logits
    assert found is not None
    return found


def our_plain_vectors(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    out = model(tokens, valid=valid)
    return outputs(tokens, valid, out.hidden, out.pooled)


def global_tokens(tokens: Tensor) -> Tensor:
    """Longformer: the first token and the fifth of the second row see, and are seen by, everybody."""
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    marked[:, 0] = marked[1, 4] = True
    return marked


def long_call(model: nn.Module, tokens: Tensor, valid: Tensor) -> Any:
    return model(input_ids=tokens, attention_mask=valid.long(), global_attention_mask=global_tokens(tokens).long())


def long_logits(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return long_call(model, tokens, valid).logits


def long_span(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = long_call(model, tokens, valid)
    return torch.stack((out.start_logits, out.end_logits), -1)


def long_vectors(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = long_call(model, tokens, valid)
    return outputs(tokens, valid, out.last_hidden_state, out.pooler_output)


def our_long_logits(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    found = model(tokens, valid=valid, global_tokens=global_tokens(tokens)).logits
    assert found is not None
    return found


def our_long_vectors(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    out = model(tokens, valid=valid, global_tokens=global_tokens(tokens))
    return outputs(tokens, valid, out.hidden, out.pooled)


def labels(count: int) -> dict[str, Any]:
    return {"id2label": {str(n): f"L{n}" for n in range(count)}, "label2id": {f"L{n}": n for n in range(count)}}


def roberta(
    name: str, run: Run = plain_logits, old: dict[str, Any] | None = None, model_type: str = "roberta", **changes: Any
) -> Peer:
    """One of the three names; 42 rows of positions serve 40 tokens."""
    settings = {**SMALL, "max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5, **changes}
    legacy = {} if old is None else {
        **LEGACY, "model_type": model_type, "architectures": [name], "max_position_embeddings": 42, **old,
    }  # fmt: skip
    config = {"roberta": t.RobertaConfig, "xlm-roberta": t.XLMRobertaConfig, "camembert": t.CamembertConfig}[model_type]
    ours = our_plain_vectors if run is plain_vectors else our_plain_logits
    return Peer(lambda: getattr(t, name)(config(**settings)), run, ours, legacy)


def longformer(name: str, run: Run = long_logits, old: dict[str, Any] | None = None, **changes: Any) -> Peer:
    """Windows of 4: two tokens on each side."""
    small = {**SMALL, "max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    settings = {**small, "attention_window": 4, **changes}
    legacy = {} if old is None else {
        **LEGACY, "model_type": "longformer", "architectures": [name], "max_position_embeddings": 42,
        "attention_window": [4, 4, 4], "attention_mode": "longformer", "ignore_attention_mask": False,
        "sep_token_id": 2, **old,
    }  # fmt: skip
    ours: OurRun = our_long_vectors if run is long_vectors else our_long_logits
    if run in (plain_logits, plain_vectors):
        ours = our_plain_logits if run is plain_logits else our_plain_vectors
    return Peer(lambda: getattr(t, name)(t.LongformerConfig(**settings)), run, ours, legacy)


DISTIL = {
    "vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 40,
}  # fmt: skip
DISTIL_LEGACY = {
    **DISTIL, "model_type": "distilbert", "activation": "gelu", "attention_dropout": 0.1, "dropout": 0.1,
    "initializer_range": 0.02, "pad_token_id": 0, "qa_dropout": 0.1, "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False, "tie_weights_": True, "transformers_version": "4.10.0.dev0",
}  # fmt: skip


def distilbert(name: str, run: Run = plain_logits, old: dict[str, Any] | None = None, **changes: Any) -> Peer:
    legacy = {} if old is None else {**DISTIL_LEGACY, "architectures": [name], **old}
    ours = our_plain_vectors if run is plain_vectors else our_plain_logits
    return Peer(lambda: getattr(t, name)(t.DistilBertConfig(**{**DISTIL, **changes})), run, ours, legacy)


ROFORMER_LEGACY = {
    **{key: value for key, value in BERT_LEGACY.items() if key != "position_embedding_type"},
    "model_type": "roformer", "embedding_size": 32, "rotary_value": False, "max_position_embeddings": 64,
}  # fmt: skip


def without_table(model: nn.Module) -> nn.Module:
    """RoFormer's table of sines is stored though computed; here as a buffer that is neither drawn nor saved."""
    table = model.base_model.encoder.embed_positions  # type: ignore[union-attr]
    weight = table.weight.data  # type: ignore[union-attr]
    del table.weight  # type: ignore[union-attr]
    table.register_buffer("weight", weight, persistent=False)  # type: ignore[union-attr]
    return model


def roformer(name: str, run: Run = peer_logits, old: dict[str, Any] | None = None, **changes: Any) -> Peer:
    settings = {**SMALL, "max_position_embeddings": 64, **changes}
    legacy = {} if old is None else {**ROFORMER_LEGACY, "architectures": [name], **old}
    ours = our_vectors if run is roformer_hidden else our_logits
    return Peer(lambda: without_table(getattr(t, name)(t.RoFormerConfig(**settings))), run, ours, legacy)


def roformer_hidden(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return outputs(tokens, valid, peer_call(model, tokens, valid).last_hidden_state)


BIGBIRD_LEGACY = {
    **BERT_LEGACY, "model_type": "big_bird", "attention_type": "original_full", "block_size": 64, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "gelu_new", "num_random_blocks": 3, "rescale_embeddings": False,
    "sep_token_id": 66, "use_bias": True,
}  # fmt: skip


def without_pooler(model: nn.Module) -> nn.Module:
    """The peer's masked LM carries a pooler that nothing reads, and stores it."""
    if not isinstance(model, t.BigBirdModel):
        model.bert.pooler = model.bert.activation = None
    return model


def bigbird(name: str, run: Run = peer_logits, old: dict[str, Any] | None = None, **changes: Any) -> Peer:
    settings = {**SMALL, "attention_type": "original_full", **changes}
    legacy = {} if old is None else {**BIGBIRD_LEGACY, "architectures": [name], **old}
    ours = our_vectors if run is peer_vectors else our_logits
    return Peer(lambda: without_pooler(getattr(t, name)(t.BigBirdConfig(**settings))), run, ours, legacy)


PEERS = {
    "roberta": roberta("RobertaForMaskedLM", old={}),
    "roberta-relu": roberta("RobertaForMaskedLM", hidden_act="relu", layer_norm_eps=1e-12),
    "roberta-model": roberta("RobertaModel", plain_vectors, old={}),
    "roberta-classifier": roberta("RobertaForSequenceClassification", num_labels=3, old=labels(3)),
    "roberta-tokens": roberta("RobertaForTokenClassification", num_labels=7, old=labels(7)),
    "roberta-span": roberta("RobertaForQuestionAnswering", plain_span, old={}),
    "roberta-padding-0": roberta("RobertaModel", plain_vectors, pad_token_id=0, old={"pad_token_id": 0}),
    "xlm-roberta": roberta("XLMRobertaForMaskedLM", model_type="xlm-roberta", old={"output_past": True}),
    "xlm-roberta-model": roberta("XLMRobertaModel", plain_vectors, {}, "xlm-roberta"),
    "camembert": roberta("CamembertForMaskedLM", model_type="camembert", old={"output_past": True}),
    "longformer": longformer("LongformerForMaskedLM", old={}),
    "longformer-no-globals": longformer("LongformerForMaskedLM", plain_logits),
    "longformer-model": longformer("LongformerModel", long_vectors, old={}),
    "longformer-windows": longformer("LongformerModel", long_vectors, attention_window=[4, 8, 12]),
    "longformer-window-cycle": longformer("LongformerModel", long_vectors, attention_window=[8, 4, 8]),
    "longformer-tokens": longformer("LongformerForTokenClassification", num_labels=4),
    "distilbert": distilbert("DistilBertForMaskedLM", old={}),
    "distilbert-untied": distilbert("DistilBertForMaskedLM", tie_word_embeddings=False),
    "distilbert-sinusoids": distilbert("DistilBertForMaskedLM", sinusoidal_pos_embds=True),
    "distilbert-model": distilbert("DistilBertModel", plain_vectors, old={}),
    "distilbert-classifier": distilbert(
        "DistilBertForSequenceClassification", num_labels=2, old={"finetuning_task": "sst-2", **labels(2)}
    ),
    "distilbert-tokens": distilbert("DistilBertForTokenClassification", num_labels=3, old=labels(3)),
    "distilbert-span": distilbert("DistilBertForQuestionAnswering", plain_span, old={}),
    "roformer": roformer("RoFormerForMaskedLM", old={}),
    "roformer-model": roformer("RoFormerModel", roformer_hidden, old={}),
    "roformer-classifier": roformer("RoFormerForSequenceClassification", num_labels=3, old=labels(3)),
    "roformer-classifier-relu": roformer("RoFormerForSequenceClassification", hidden_act="relu"),
    "roformer-tokens": roformer("RoFormerForTokenClassification", num_labels=3, old=labels(3)),
    "roformer-span": roformer("RoFormerForQuestionAnswering", peer_span, old={}),
    "bigbird": bigbird("BigBirdForMaskedLM", old={}),
    "bigbird-pretraining": bigbird("BigBirdForMaskedLM", old={"architectures": ["BigBirdForPreTraining"]}),
    "bigbird-model": bigbird("BigBirdModel", peer_vectors, old={}),
    "bigbird-scaled": bigbird("BigBirdModel", peer_vectors, rescale_embeddings=True, use_bias=False),
    "bigbird-classifier": bigbird("BigBirdForSequenceClassification", num_labels=4, old=labels(4)),
    "bigbird-tokens": bigbird("BigBirdForTokenClassification", num_labels=4, old=labels(4)),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check_own(PEERS[name], tmp_path)


def test_longformer_span_and_classifier_equal_the_peer(tmp_path: Path) -> None:
    """The peer's heads choose the global tokens themselves, unless they are told, as here."""
    tokens, valid = batch("right")
    for name, run in (
        ("LongformerForQuestionAnswering", long_span),
        ("LongformerForSequenceClassification", long_logits),
    ):
        settings = {**SMALL, "max_position_embeddings": 42, "attention_window": 4, "num_labels": 2}
        theirs = drawn(getattr(t, name)(t.LongformerConfig(**settings)))
        theirs.save_pretrained(tmp_path / name)  # type: ignore[operator]
        _, _, ours = load_ours(tmp_path / name)
        with torch.no_grad():
            expected = run(theirs, tokens, valid)
            assert deviation(expected, our_long_logits(ours, tokens, valid), valid) < 1e-4, name


def test_windows_alike_are_one_block_and_cycles_stay_cycles() -> None:
    base = {**PEERS["longformer-model"].legacy, "num_hidden_layers": 4}
    for windows, kept in ((4, 1), ([4, 4, 4, 4], 1), ([2, 4, 2, 4], 2), ([2, 4, 2, 6], 4), ([2, 4, 4, 2], 3)):
        config = read_config({**base, "attention_window": windows})
        assert config.encoder is not None
        assert len(config.encoder.layers) == kept, windows
        found = [block.attention.pattern for block in config.encoder.blocks]
        listed = windows if isinstance(windows, list) else [windows] * 4
        assert found == [Longformer(window=window) for window in listed]
    with pytest.raises(CheckpointError, match="attention_window has 3 windows for 4 layers"):
        read_config({**base, "attention_window": [2, 2, 2]})


@pytest.mark.parametrize("name", ["roberta-model", "xlm-roberta-model", "longformer-model", "bigbird-model"])
def test_a_bare_model_without_its_pooler_is_its_hidden_states(name: str, tmp_path: Path) -> None:
    theirs = drawn(PEERS[name].make())
    theirs.save_pretrained(tmp_path / "theirs")  # type: ignore[operator]
    file = tmp_path / "theirs" / "model.safetensors"
    held = {key: np.array(value) for key, value in File(file).items()}
    write(file, {key: value for key, value in held.items() if not key.startswith("pooler.")})
    lm = qkv.load(tmp_path / "theirs")
    tokens, valid = batch("right")
    run = long_call if name == "longformer-model" else plain_call
    inputs = {"global_tokens": global_tokens(tokens)} if name == "longformer-model" else {}
    with torch.no_grad():
        expected = run(theirs, tokens, valid).last_hidden_state
        assert deviation(expected, lm.model(tokens, valid=valid, **inputs).hidden, valid) < 1e-4
    assert lm.config.head.kind == "none"
    lm.save(tmp_path / "ours", "hf")
    again = File(tmp_path / "ours" / "model.safetensors")
    assert {key for key in held if not key.startswith("pooler.")} == set(again)
    assert all(np.array_equal(again[key], held[key]) for key in again)


def test_a_stored_table_of_sines_is_ignored(tmp_path: Path) -> None:
    theirs = drawn(without_table(t.RoFormerForMaskedLM(t.RoFormerConfig(**SMALL))))
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    path = tmp_path / "model.safetensors"
    held = {name: np.array(value) for name, value in File(path).items()}
    assert "roformer.encoder.embed_positions.weight" not in held
    _, tensors = read_model(tmp_path)
    expected = {name: np.array(value) for name, value in tensors.items()}
    write(path, {**held, "roformer.encoder.embed_positions.weight": np.zeros((40, 8), np.float32)})
    _, found = read_model(tmp_path)
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def our_random_blocks(pattern: BigBird, length: int) -> np.ndarray:
    """(blocks - 2, random blocks): what our pattern draws for every block but the first and last."""
    last = (length - 1) // pattern.block
    starts = pattern.block * np.arange(last + 1)
    query, key = (Coordinates(position=p, length=np.array(length)) for p in (starts[1:-1, None], starts[None, :]))
    q, k = query.position // pattern.block, key.position // pattern.block
    near_or_edge = (k == 0) | (k == last) | (abs(k - q) <= 1)
    drawn_blocks = pattern.allowed(query, key) & ~near_or_edge
    return np.nonzero(drawn_blocks)[1].reshape(last - 1, pattern.random_blocks)


def test_block_sparse_equals_the_peer_with_the_same_random_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside training the peer's random blocks are all block 0; here both have ours."""
    settings = {**SMALL, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 2}
    theirs = drawn(without_pooler(t.BigBirdForMaskedLM(t.BigBirdConfig(**settings))))
    theirs.save_pretrained(tmp_path)
    config, _, ours = load_ours(tmp_path)
    assert config.encoder is not None
    pattern = config.encoder.layers[0].attention.pattern
    assert pattern == BigBird(block=2, random_blocks=2)
    blocks = our_random_blocks(pattern, 36)
    monkeypatch.setattr(
        BigBirdBlockSparseAttention,
        "_bigbird_block_rand_mask_with_head",
        lambda self, num_heads, **sizes: [blocks] * num_heads,
    )
    tokens = torch.randint(3, VOCAB, (2, 36), generator=torch.Generator().manual_seed(2))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        expected, found = peer_logits(theirs, tokens, valid), our_logits(ours, tokens, valid)
        assert theirs.bert.attention_type == "block_sparse"
        assert deviation(expected, found, valid) < 1e-4
        theirs.bert.set_attention_type("original_full")
        assert deviation(peer_logits(theirs, tokens, valid), found, valid) > 1e-2


def test_block_sparse_is_our_pattern_and_is_written_back() -> None:
    data = {**BIGBIRD_LEGACY, "architectures": ["BigBirdModel"], "attention_type": "block_sparse", "block_size": 16}
    config = read_config(data)
    assert config.encoder is not None
    assert config.encoder.layers[0].attention.pattern == BigBird(block=16, random_blocks=3)
    family = family_for(config)
    assert family.name == "big-bird-model"
    assert read_config(write_config(config, family)) == config
    seeded = config.override({"encoder.layers.0.attention.pattern": BigBird(block=16, random_blocks=3, seed=7)})
    with pytest.raises(CheckpointError, match="cannot express"):
        write_config(seeded, family)


def test_rows_of_a_table_and_positions_differ_by_the_padding() -> None:
    config = read_config({**PEERS["roberta"].legacy, "pad_token_id": 5})
    assert config.max_seq_len == 36
    assert config.embedding.positions == Learned(offset=6)
    assert config.shapes()["embed.positions.weight"].shape == (42, 32)
    written = write_config(config, family_for(config))
    assert (written["max_position_embeddings"], written["pad_token_id"]) == (42, 5)


def test_roberta_cannot_say_that_positions_start_at_row_0() -> None:
    bert = read_config({**BERT_LEGACY, "architectures": ["BertModel"]})
    roberta_model = family_for(read_config(PEERS["roberta-model"].legacy))
    with pytest.raises(CheckpointError, match="cannot start at row 0"):
        write_config(bert, roberta_model)


def wide(small: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A legacy config at the size of the released base model."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    return {**small, **sizes, **changes}


PUBLISHED = {
    "roformer-base": wide(
        ROFORMER_LEGACY, architectures=["RoFormerForMaskedLM"], vocab_size=50000, embedding_size=768,
        max_position_embeddings=1536,
    ),
    "longformer-base": wide(
        PEERS["longformer-model"].legacy, vocab_size=50265, max_position_embeddings=4098, attention_window=[512] * 12
    ),
    "bigbird-base": wide(
        PEERS["bigbird-model"].legacy, vocab_size=50358, max_position_embeddings=4096, attention_type="block_sparse"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_our_presets(name: str) -> None:
    assert read_config(PUBLISHED[name]) == qkv.preset(name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**ROFORMER_LEGACY, "rotary_value": True}, "rotary_value is True"),
        ({**ROFORMER_LEGACY, "embedding_size": 16}, r"embedding_size is 16; this qkv needs that of hidden_size \(32\)"),
        ({**BIGBIRD_LEGACY, "attention_type": "full"}, "attention_type is 'full'"),
        ({**DISTIL_LEGACY, "n_groups": 2}, r"n_groups \(2\) is not understood"),
        ({**PEERS["longformer"].legacy, "attention_mode": "tvm"}, "attention_mode is 'tvm'"),
    ],
)
def test_what_is_not_understood_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(data)


def test_every_config_here_is_written_as_it_was_read() -> None:
    for name, peer in PEERS.items():
        if peer.legacy:
            config: ModelConfig = read_config(peer.legacy)
            assert read_config(write_config(config, family_for(config))) == config, name
