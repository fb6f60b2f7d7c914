"""BART with its heads, and Marian with one vocabulary or two, against the peer library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor, nn

from checkpoint.as_family import drawn
from checkpoint.harness import VOCAB, Peer, batch, load_ours
from qkv.checkpoint.huggingface import family_for, read_config, read_model, write_config
from qkv.checkpoint.safetensors import File, write
from qkv.errors import CheckpointError
from qkv.nn import Transformer

from .test_bert import check_own
from .test_t5 import our_hidden, our_logits, peer_hidden, peer_logits

SMALL = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 40,
}  # fmt: skip
# Keys that the first releases wrote besides; most say what the model lacks.
OLD = {
    **SMALL, "activation_dropout": 0.0, "add_bias_logits": False, "add_final_layer_norm": False,
    "attention_dropout": 0.0, "classif_dropout": 0.0, "classifier_dropout": 0.0, "decoder_layerdrop": 0.0,
    "dropout": 0.1, "encoder_layerdrop": 0.0, "gradient_checkpointing": False, "init_std": 0.02,
    "is_encoder_decoder": True, "normalize_before": False, "num_beams": 4, "num_hidden_layers": 3,
    "scale_embedding": False, "use_cache": True, "_num_labels": 3,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
}  # fmt: skip
BART = {
    **OLD, "model_type": "bart", "activation_function": "gelu", "bos_token_id": 0, "decoder_start_token_id": 2,
    "eos_token_id": 2, "extra_pos_embeddings": 2, "forced_eos_token_id": 2, "normalize_embedding": True,
    "pad_token_id": 1, "static_position_embeddings": False, "early_stopping": True, "no_repeat_ngram_size": 3,
}  # fmt: skip
MARIAN = {
    **OLD, "model_type": "marian", "activation_function": "swish", "bad_words_ids": [[95]], "bos_token_id": 0,
    "decoder_start_token_id": 95, "decoder_vocab_size": VOCAB, "eos_token_id": 0, "forced_eos_token_id": 0,
    "max_length": 512, "normalize_embedding": False, "pad_token_id": 95, "scale_embedding": True,
    "share_encoder_decoder_embeddings": True, "static_position_embeddings": True,
}  # fmt: skip
END = 2


def with_bias(model: nn.Module) -> nn.Module:
    """The bias of the logits is a buffer of zeros in a new model; released ones carry values."""
    bias = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    model.final_logits_bias = bias  # type: ignore[assignment]
    return model


def ended(tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """A classifier's source, which ends in its last real token, and the decoder's tokens: the source shifted right."""
    last = valid.sum(1, keepdim=True) - 1
    source = tokens.scatter(1, last, END)
    return source, torch.cat((torch.full_like(source[:, :1], END), source[:, :-1]), 1)


def peer_classes(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return model(input_ids=ended(tokens, valid)[0], attention_mask=valid.long()).logits


def our_classes(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    source, target = ended(tokens, valid)
    found = model(target, valid=valid, source=source, source_valid=valid).logits
    assert found is not None
    return found


def peer_span(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = model(input_ids=tokens, attention_mask=valid.long(), decoder_input_ids=ended(tokens, valid)[1])
    return torch.stack((out.start_logits, out.end_logits), -1)


def our_span(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    found = model(ended(tokens, valid)[1], source=tokens, source_valid=valid).logits
    assert found is not None
    return found


def without_tables(model: nn.Module) -> nn.Module:
    """Marian's tables of sines are parameters though computed; here buffers that are neither drawn nor saved."""
    for stack in (model.base_model.encoder, model.base_model.decoder):  # type: ignore[union-attr]
        weight = stack.embed_positions.weight.data  # type: ignore[union-attr]
        del stack.embed_positions.weight  # type: ignore[union-attr]
        stack.embed_positions.register_buffer("weight", weight, persistent=False)  # type: ignore[union-attr]
    return model


def bart(old: dict[str, Any] | None, **changes: Any) -> Peer:
    legacy = {} if old is None else {**BART, "architectures": ["BartForConditionalGeneration"], **old}
    settings = {**SMALL, **changes}
    return Peer(
        lambda: with_bias(t.BartForConditionalGeneration(t.BartConfig(**settings))), peer_logits, our_logits, legacy
    )


def marian(old: dict[str, Any] | None, **changes: Any) -> Peer:
    legacy = {} if old is None else {**MARIAN, "architectures": ["MarianMTModel"], **old}
    settings = {
        **SMALL, "activation_function": "swish", "scale_embedding": True, "pad_token_id": 95,
        "decoder_start_token_id": 95, **changes,
    }  # fmt: skip
    return Peer(
        lambda: without_tables(with_bias(t.MarianMTModel(t.MarianConfig(**settings)))), peer_logits, our_logits, legacy
    )


PEERS = {
    "bart": bart({}),
    "bart-scaled": bart({"scale_embedding": True}, scale_embedding=True),
    "bart-dropouts": bart(
        {"activation_dropout": 0.1, "attention_dropout": 0.2}, activation_dropout=0.1, attention_dropout=0.2
    ),
    "bart-relu": bart(None, activation_function="relu", init_std=0.03),
    "bart-model": Peer(
        lambda: t.BartModel(t.BartConfig(**SMALL)), peer_hidden, our_hidden, {**BART, "architectures": ["BartModel"]}
    ),
    "bart-classifier": Peer(
        lambda: t.BartForSequenceClassification(t.BartConfig(**SMALL)), peer_classes, our_classes,
        {**BART, "architectures": ["BartForSequenceClassification"], "finetuning_task": "mnli"},
    ),
    "bart-span": Peer(
        lambda: t.BartForQuestionAnswering(t.BartConfig(**SMALL, num_labels=2)), peer_span, our_span,
        {**BART, "architectures": ["BartForQuestionAnswering"], "id2label": {"0": "A", "1": "B"}},
    ),
    "marian": marian({}),
    "marian-plain": marian(
        {"scale_embedding": False, "activation_function": "relu"}, scale_embedding=False, activation_function="relu"
    ),
    "marian-two-vocabularies": marian(
        {"share_encoder_decoder_embeddings": False}, share_encoder_decoder_embeddings=False
    ),
    "marian-model": Peer(
        lambda: without_tables(t.MarianModel(t.MarianConfig(**SMALL, pad_token_id=95, scale_embedding=True))),
        peer_hidden, our_hidden, {**MARIAN, "architectures": ["MarianModel"], "activation_function": "gelu"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check_own(PEERS[name], tmp_path)


def held(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in File(folder / "model.safetensors").items()}


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_copies_and_leftovers_of_published_files(name: str, tmp_path: Path) -> None:
    drawn(PEERS[name].make()).save_pretrained(tmp_path)
    tensors = held(tmp_path)
    _, before = read_model(tmp_path)
    expected = {key: np.array(value) for key, value in before.items()}
    shared = tensors["model.shared.weight"]
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    extra = {"model.encoder.version": np.ones(1, np.float32)}
    if name == "marian":
        extra["model.encoder.embed_positions.weight"] = np.zeros((40, 32), np.float32)
    write(tmp_path / "model.safetensors", {**tensors, **dict.fromkeys(copies, shared), **extra})
    _, found = read_model(tmp_path)
    assert set(found) == set(expected)
    assert all(np.array_equal(found[key], expected[key]) for key in found)
    for copy in copies:
        write(tmp_path / "model.safetensors", {**tensors, copy: shared + 1})
        with pytest.raises(CheckpointError, match=rf"{copy} is tied to .* but differs"):
            read_model(tmp_path)


def test_the_head_of_two_vocabularies_is_the_targets_table(tmp_path: Path) -> None:
    drawn(PEERS["marian-two-vocabularies"].make()).save_pretrained(tmp_path)
    tensors = held(tmp_path)
    config, _, _ = load_ours(tmp_path)
    assert config.sharing == "none"
    target = tensors["model.decoder.embed_tokens.weight"]
    write(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": target})
    read_model(tmp_path)
    write(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": tensors["model.encoder.embed_tokens.weight"]})
    with pytest.raises(CheckpointError, match=r"lm_head.weight is tied to model.decoder.embed_tokens.weight"):
        read_model(tmp_path)


def test_the_targets_padding_changes_nothing(tmp_path: Path) -> None:
    """The source is padded in the second row: its padding is seen by no decoder token."""
    theirs = drawn(PEERS["bart"].make())
    theirs.save_pretrained(tmp_path)
    _, _, ours = load_ours(tmp_path)
    tokens, valid = batch("right")
    changed = torch.where(valid, tokens, (tokens + 11) % VOCAB)
    source_only = {"source_valid": valid}
    target = tokens[:, :9]
    with torch.no_grad():
        one = ours(target, source=tokens, **source_only).logits
        two = ours(target, source=changed, **source_only).logits
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**BART, "normalize_before": True}, "normalize_before is True"),
        ({**BART, "normalize_embedding": False}, "normalize_embedding is False"),
        ({**BART, "static_position_embeddings": True}, "static_position_embeddings is True"),
        ({**MARIAN, "static_position_embeddings": False}, "static_position_embeddings is False"),
        ({**MARIAN, "decoder_vocab_size": 50}, r"decoder_vocab_size is 50; this qkv needs that of vocab_size \(96\)"),
        ({**BART, "tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({**BART, "n_memories": 2}, r"n_memories \(2\) is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(data)


def test_every_config_here_is_written_as_it_was_read() -> None:
    for name, peer in PEERS.items():
        if peer.legacy:
            config = read_config(peer.legacy)
            assert read_config(write_config(config, family_for(config))) == config, name
