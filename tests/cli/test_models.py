"""`embed`, `fill`, `convert`, `generate` and `show` on saved models of other formats; `pull` by its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv.checkpoint.huggingface import write_folder
from qkv.checkpoint.source import read_source
from qkv.errors import GenerationError
from qkv.text import ByteTokenizer

from .helpers import Result

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "dog", "."]
BERT = qkv.preset("bert-base-uncased").toy().override({"vocab_size": len(WORDS), "head": {"kind": "masked-lm"}})


def trained_on_one_sentence(config: qkv.ModelConfig) -> qkv.nn.Transformer:
    """A tiny masked model that has learnt what stands between `the` and `sat`."""
    model = qkv.build(config, seed=1)
    masked = torch.tensor([[2, 5, 4, 7, 8, 5, 9, 3]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(masked).logits[:, 2], torch.tensor([6]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a masked language model with its vocab.txt."""
    folder = tmp_path_factory.mktemp("bert") / "m"
    model = trained_on_one_sentence(BERT)
    write_folder(folder, BERT, {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder


def test_fill_finds_the_word_that_was_learnt(command: Callable[..., Result], bert: Path) -> None:
    shown = command("fill", str(bert), "the [MASK] sat on the mat", "--json")
    assert shown.code == 0, shown.err
    (words,) = json.loads(shown.out)
    assert words[0][0].strip() == "cat"
    assert words[0][1] > 0.9
    assert "mask 1: cat" in command("fill", str(bert), "the [MASK] sat on the mat").out


def test_fill_without_a_mask_says_so(command: Callable[..., Result], bert: Path) -> None:
    shown = command("fill", str(bert), "the cat sat")
    assert shown.code == 2
    assert shown.err == "qkv: fill: the text has no mask token; write it where a word is to be found\n"


def test_embed_shows_cosines(command: Callable[..., Result], bert: Path) -> None:
    answer = json.loads(command("embed", str(bert), "the cat", "the dog sat", "the cat", "--json").out)
    vectors = np.array(answer["vectors"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)
    alone = qkv.load(bert).embed(["the dog sat"])
    np.testing.assert_allclose(vectors[1], alone[0], atol=1e-6)  # padding beside a longer text changes nothing
    assert command("embed", str(bert), "the cat", "the cat").out.startswith(" 1.000   1.000   the cat")


def test_convert_goes_round_through_every_format(command: Callable[..., Result], saved: Path, tmp_path: Path) -> None:
    steps = (("hf", tmp_path / "hf"), ("gguf", tmp_path / "m.gguf"), ("qkv", tmp_path / "qkv"))
    source = saved
    for form, target in steps:
        shown = command("convert", str(source), str(target), *(("--format", "qkv") if form == "qkv" else ()))
        assert shown.code == 0, shown.err
        assert read_source(target).format == form
        source = target
    first, last = qkv.load(saved).model.state_dict(), qkv.load(tmp_path / "qkv").model.state_dict()
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_convert_to_an_unknown_format(command: Callable[..., Result], saved: Path, tmp_path: Path) -> None:
    shown = command("convert", str(saved), str(tmp_path / "x"), "--format", "onnx")
    assert shown.code == 2
    assert "format: 'onnx' is not written; choose qkv, hf or gguf" in shown.err


def test_show_reads_a_hugging_face_folder(command: Callable[..., Result], bert: Path) -> None:
    shown = command("show", str(bert))
    assert shown.code == 0
    assert f"{BERT.n_parameters:,} parameters" in shown.out


def test_pull_names_what_it_knows(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKV_HOME", str(tmp_path))
    shown = command("pull", "gpt5")
    assert shown.code == 2
    assert "'gpt5' is not known; give one of smollm2-135m" in shown.err
    shown = command("generate", "smollm2-135m", "x")
    assert shown.code == 2
    assert "run `qkv pull smollm2-135m` first" in shown.err


def test_generation_stops_at_a_token_that_ends_texts(tmp_path: Path) -> None:
    """The vocabulary's end token is made the likeliest one."""
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 8, "head.bias": True})
    model = qkv.build(config)
    with torch.no_grad():
        model.head.bias[7] = 100.0
    vocab = {"model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(8)}, "unk_token": "w0"}}
    vocab["added_tokens"] = [
        {"id": 7, "content": "w7", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
    ]  # fmt: skip
    vocab["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocab))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w7"}))
    from qkv.text.folder import read_folder

    lm = qkv.TextModel(model, read_folder(tmp_path))
    done = lm.generate("w1 w2", 5, decoding=qkv.Greedy())
    assert done.tokens == [7]
    assert done.finish_reason == "stop"
    assert done.text == ""


def test_b75_rows_that_pad_the_table_are_never_drawn() -> None:
    """A table of 320 rows for 256 bytes, where a padding row is the likeliest."""
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 320, "head.bias": True})
    model = qkv.build(config)
    with torch.no_grad():
        model.head.bias[300] = 100.0
    lm = qkv.TextModel(model, ByteTokenizer())
    for decoding in (qkv.Greedy(), qkv.Sampling()):
        assert max(lm.generate("text", 20, decoding=decoding).tokens) < 256


def test_a_trained_tokenizer_is_read_again(command: Callable[..., Result], tmp_path: Path) -> None:
    """English and Chinese."""
    text = tmp_path / "text.txt"
    text.write_text(
        "the cat sat on the mat. " * 40 + "\u732b\u5750\u5728\u57ab\u5b50\u4e0a\u3002" * 40, encoding="utf-8"
    )
    shown = command("tokenizer", "train", str(text), str(tmp_path / "t"), "--vocab-size", "320")
    assert shown.code == 0, shown.err
    from qkv.text.folder import read_folder

    tokenizer = read_folder(tmp_path / "t")
    assert tokenizer.vocab_size <= 320
    for sample in ("the cat sat.", "\u732b\u5728\u57ab\u5b50\u4e0a", "\U0001f600 new"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert len(tokenizer.encode("\u732b\u5750\u5728\u57ab\u5b50\u4e0a")) < 18


def test_a_hugging_face_folder_keeps_its_tokenizer(bert: Path, tmp_path: Path) -> None:
    lm = qkv.load(bert)
    lm.save(tmp_path / "again", "hf")
    again = qkv.load(tmp_path / "again")
    assert again.tokenizer is not None
    assert again.tokenizer.encode("the cat") == lm.tokenizer.encode("the cat")
    assert again.fill("the [MASK] sat on the mat")[0][0][0].strip() == "cat"


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_nothing_that_exists_is_replaced(command: Callable[..., Result], bert: Path, form: str, tmp_path: Path) -> None:
    """Also not the model itself, from which the weights are mapped."""
    target = bert if form == "hf" else tmp_path / "m.gguf"
    if form == "gguf":
        target.write_text("mine")
    before = [path.read_bytes() for path in sorted(bert.iterdir())]
    shown = command("convert", str(bert), str(target), "--format", form)
    assert shown.code == 2
    assert f"{target}: exists already; choose another" in shown.err
    assert before == [path.read_bytes() for path in sorted(bert.iterdir())]


def test_vectors_of_nothing_are_refused(saved: Path) -> None:
    lm = qkv.load(saved)
    for texts in ([], ["a", ""]):
        with pytest.raises(GenerationError, match=r"embed: text \d has no tokens"):
            lm.embed(texts)


def test_a_file_that_cannot_be_written_is_one_line(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.verify.PATHS", ())
    shown = command("verify", "gpt2", "--out", str(tmp_path / "no" / "such" / "certificate.json"))
    assert shown.code == 2
    assert shown.err.strip().splitlines()[-1].endswith("No such file or directory")
