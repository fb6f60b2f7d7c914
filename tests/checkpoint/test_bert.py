"""BERT with each of its heads against the peer library, and the names and leftovers of published files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor, nn

import qkv
from checkpoint.as_family import check_as, drawn
from checkpoint.harness import VOCAB, Peer, batch, deviation, load_ours
from qkv.checkpoint.families import FAMILIES
from qkv.checkpoint.huggingface import read_config, read_model
from qkv.checkpoint.rules import Fallback, Spelling, respelled
from qkv.checkpoint.safetensors import File, write
from qkv.config import ModelConfig
from qkv.errors import CheckpointError
from qkv.nn import Transformer
from qkv.train.loss import pair_head

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 40,
}  # fmt: skip
LEGACY = {
    **SMALL, "model_type": "bert", "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12,
    "pad_token_id": 0, "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2, "use_cache": True,
}  # fmt: skip


def check_own(peer: Peer, folder: Path) -> ModelConfig:
    """Everything that a family must show, saved as the family of the peer's class."""
    architecture = type(peer.make()).__name__
    return check_as(next(family.name for family in FAMILIES if family.architecture == architecture), peer, folder)


def segments(tokens: Tensor) -> Tensor:
    """A segment for each token, so that the table's second row has a part in the result."""
    return tokens.remainder(2)


def outputs(tokens: Tensor, valid: Tensor, hidden: Tensor, *others: Tensor | None) -> Tensor:
    """Everything that is to be compared, in one vector."""
    return torch.cat([hidden[valid].flatten(), *(other.flatten() for other in others if other is not None)])


def peer_call(model: nn.Module, tokens: Tensor, valid: Tensor) -> Any:
    return model(input_ids=tokens, attention_mask=valid.long(), token_type_ids=segments(tokens))


def peer_logits(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return peer_call(model, tokens, valid).logits


def peer_vectors(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = peer_call(model, tokens, valid)
    return outputs(tokens, valid, out.last_hidden_state, out.pooler_output)


def peer_span(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = peer_call(model, tokens, valid)
    return torch.stack((out.start_logits, out.end_logits), -1)


def our_logits(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    found = model(tokens, valid=valid, segments=segments(tokens)).logits
    assert found is not None
    return found


def our_vectors(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    out = model(tokens, valid=valid, segments=segments(tokens))
    return outputs(tokens, valid, out.hidden, out.pooled)


def bert(
    name: str, run: Callable[..., Tensor] = peer_logits, legacy: dict[str, Any] | None = None, **changes: Any
) -> Peer:
    """A peer of one class; a config.json of the old form where it is given."""
    old = {} if legacy is None else {**LEGACY, "architectures": [name], **legacy}
    ours = our_vectors if run is peer_vectors else our_logits
    return Peer(lambda: getattr(t, name)(t.BertConfig(**{**SMALL, **changes})), run, ours, old)


def peer_heads(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    out = peer_call(model, tokens, valid)
    return outputs(tokens, valid, out.prediction_logits, out.seq_relationship_logits)


def our_heads(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    out, second = model(tokens, valid=valid, segments=segments(tokens)), pair_head(model)
    assert second is not None
    assert out.logits is not None
    return outputs(tokens, valid, out.logits, second(out.hidden, model.embed.tokens, valid)[0])


def pretraining() -> Peer:
    """A file with both heads."""
    both = bert("BertForPreTraining", legacy={})
    return Peer(both.make, peer_heads, our_heads, both.legacy)


PEERS = {
    "masked": bert("BertForMaskedLM", legacy={}),
    "masked-relu-wide": bert("BertForMaskedLM", hidden_act="relu", intermediate_size=72, layer_norm_eps=1e-5),
    "masked-tanh-gelu": bert("BertForMaskedLM", hidden_act="gelu_new", type_vocab_size=3),
    "pretraining": pretraining(),
    "model": bert("BertModel", peer_vectors, legacy={}),
    "next-sentence": bert("BertForNextSentencePrediction", legacy={}),
    "classifier": bert(
        "BertForSequenceClassification", num_labels=5,
        legacy={"id2label": {str(n): f"L{n}" for n in range(5)}, "label2id": {f"L{n}": n for n in range(5)}},
    ),
    "classifier-two": bert("BertForSequenceClassification", legacy={"finetuning_task": "mrpc"}),
    "classifier-dropout": bert(
        "BertForSequenceClassification", classifier_dropout=0.2, num_labels=3,
        legacy={"classifier_dropout": 0.2, "num_labels": 3},
    ),
    "tokens": bert(
        "BertForTokenClassification", num_labels=9,
        legacy={"_num_labels": 9, "id2label": {str(n): f"B-{n}" for n in range(9)}, "label2id": {}},
    ),
    "span": bert("BertForQuestionAnswering", peer_span, legacy={}),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check_own(PEERS[name], tmp_path)


def written(folder: Path, model: nn.Module, architecture: str, change: Callable[[str], str]) -> Path:
    """The peer's folder with other names in its file, and another architecture in its config."""
    model.save_pretrained(folder)  # type: ignore[operator]
    held = {change(name): np.array(value) for name, value in File(folder / "model.safetensors").items()}
    write(folder / "model.safetensors", held)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return folder


def old_norms(name: str) -> str:
    """The first converted files' names."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


SPELLINGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "old norms": ("BertForMaskedLM", old_norms),
    "old norms of a bare model": ("BertModel", old_norms),
    "no prefix": ("BertForMaskedLM", lambda name: name.removeprefix("bert.")),
    "a prefix where none should be": ("BertModel", lambda name: f"bert.{name}"),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_other_names_of_published_files_are_understood(case: str, tmp_path: Path) -> None:
    architecture, change = SPELLINGS[case]
    theirs = drawn(getattr(t, architecture)(t.BertConfig(**SMALL)))
    folder = written(tmp_path, theirs, architecture, change)
    _, _, ours = load_ours(folder)
    tokens, valid = batch("right")
    run, own = (peer_logits, our_logits) if "LM" in architecture else (peer_vectors, our_vectors)
    with torch.no_grad():
        assert deviation(run(theirs, tokens, valid), own(ours, tokens, valid), valid) < 1e-4


def test_a_pretraining_file_gives_either_head(tmp_path: Path) -> None:
    theirs = drawn(t.BertForPreTraining(t.BertConfig(**SMALL)))
    tokens, valid = batch("right")
    for architecture, wanted in (
        ("BertForPreTraining", "prediction_logits"),
        ("BertForMaskedLM", "prediction_logits"),
        ("BertForNextSentencePrediction", "seq_relationship_logits"),
    ):
        _, _, ours = load_ours(written(tmp_path / architecture, theirs, architecture, str))
        with torch.no_grad():
            expected = getattr(peer_call(theirs, tokens, valid), wanted)
            assert deviation(expected, our_logits(ours, tokens, valid), valid) < 1e-4


def masked_folder(folder: Path, **extra: np.ndarray) -> Path:
    """A masked LM's folder with more tensors in its file."""
    drawn(t.BertForMaskedLM(t.BertConfig(**SMALL))).save_pretrained(folder)
    held = {name: np.array(value) for name, value in File(folder / "model.safetensors").items()}
    write(folder / "model.safetensors", {**held, **extra})
    return folder


def test_copies_and_buffers_of_published_files_are_accepted(tmp_path: Path) -> None:
    folder = masked_folder(tmp_path)
    config, tensors = read_model(folder)
    expected = {name: np.array(value) for name, value in tensors.items()}  # the file is about to change
    held = {name: np.array(value) for name, value in File(folder / "model.safetensors").items()}
    held["cls.predictions.decoder.weight"] = held["bert.embeddings.word_embeddings.weight"]
    held["cls.predictions.decoder.bias"] = held["cls.predictions.bias"]
    held["bert.embeddings.position_ids"] = np.arange(40, dtype=np.float32)[None]
    held["bert.pooler.dense.weight"] = np.zeros((32, 32), np.float32)
    held["bert.pooler.dense.bias"] = np.zeros(32, np.float32)
    write(folder / "model.safetensors", held)
    again, found = read_model(folder)
    assert again == config
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert set(found) == set(expected)


def test_a_copy_that_differs_is_refused(tmp_path: Path) -> None:
    folder = masked_folder(tmp_path, **{"cls.predictions.decoder.bias": np.ones(VOCAB, np.float32)})
    with pytest.raises(CheckpointError, match=r"decoder.bias is tied to cls.predictions.bias .* but differs"):
        read_model(folder)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    gamma = np.ones(32, np.float32)
    folder = masked_folder(tmp_path, **{"bert.embeddings.LayerNorm.gamma": gamma})
    with pytest.raises(CheckpointError, match=r"LayerNorm.weight and .*LayerNorm.gamma are two names"):
        read_model(folder)


def test_a_head_that_the_file_lacks_is_missed_by_name(tmp_path: Path) -> None:
    theirs = drawn(t.BertModel(t.BertConfig(**SMALL)))
    folder = written(tmp_path, theirs, "BertForSequenceClassification", str)
    with pytest.raises(CheckpointError, match=r"classifier.bias is missing; classifier.weight is missing"):
        read_model(folder)


def test_a_bert_without_its_pooler_is_its_hidden_states(tmp_path: Path) -> None:
    theirs = drawn(t.BertModel(t.BertConfig(**SMALL), add_pooling_layer=False))
    theirs.save_pretrained(tmp_path / "theirs")
    lm = qkv.load(tmp_path / "theirs")
    tokens, valid = batch("right")
    with torch.no_grad():
        expected = peer_call(theirs, tokens, valid).last_hidden_state
        found = lm.model(tokens, valid=valid, segments=segments(tokens)).hidden
        assert deviation(expected, found, valid) < 1e-4
    lm.save(tmp_path / "ours", "hf")
    original, saved = (File(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert set(saved) == set(original)
    assert all(np.array_equal(original[name], saved[name]) for name in original)
    again = t.BertModel.from_pretrained(tmp_path / "ours", add_pooling_layer=False).eval()
    with torch.no_grad():
        assert torch.equal(peer_call(again, tokens, valid).last_hidden_state, expected)


def test_half_a_pooler_is_refused(tmp_path: Path) -> None:
    drawn(t.BertModel(t.BertConfig(**SMALL))).save_pretrained(tmp_path)
    held = {name: np.array(value) for name, value in File(tmp_path / "model.safetensors").items()}
    write(tmp_path / "model.safetensors", {name: held[name] for name in held if name != "pooler.dense.bias"})
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias is missing"):
        read_model(tmp_path)
    write(tmp_path / "model.safetensors", {name: held[name] for name in held if name != "pooler.dense.weight"})
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias is not understood"):
        read_model(tmp_path)


def test_names_are_respelled_in_order_and_filled_in() -> None:
    ways = (Spelling(r"^old\.", "new."), Spelling(r"gamma$", "weight"), Fallback("head", "new.weight"))
    one, two = np.zeros(1), np.zeros(2)
    assert respelled({"old.gamma": one, "rest": two}, ways) == {"new.weight": one, "rest": two, "head": one}
    assert respelled({"old.gamma": one, "head": two}, ways) == {"new.weight": one, "head": two}
    assert respelled({"rest": two}, ways) == {"rest": two}


PUBLISHED: dict[str, dict[str, Any]] = {
    "bert-base-uncased": {"vocab_size": 30522},
    "bert-base-cased": {"vocab_size": 28996, "pooler_fc_size": 768, "pooler_type": "first_token_transform"},
    "bert-large-uncased": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    },
    "minilm-l6": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6},
}  # fmt: skip
BASE = {
    **LEGACY, "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 512, "vocab_size": 30522,
    "num_attention_heads": 12, "num_hidden_layers": 12, "architectures": ["BertModel"],
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_our_presets(name: str) -> None:
    assert read_config({**BASE, **PUBLISHED[name]}) == qkv.preset(name)


def test_the_first_published_files_name_no_architecture_and_hold_the_masked_head() -> None:
    config = read_config(LEGACY)
    assert config.head.kind == "masked-lm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"attention_sparsity": 3}, r"attention_sparsity \(3\) is not understood"),
        ({"num_attention_heads": 5}, r"num_attention_heads \(5\) must divide hidden_size \(32\)"),
    ],
)
def test_what_is_not_bert_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**LEGACY, "architectures": ["BertForMaskedLM"], **change})
