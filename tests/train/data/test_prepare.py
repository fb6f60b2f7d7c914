"""Files become shards once; damaged or foreign shards are refused; nothing half-written stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.errors import DataError
from qkv.text import ByteTokenizer
from qkv.text.training import train_bpe
from qkv.train.data import Reading, Stream, open_shards, prepare, preparing, tokenizer_hash, training_texts, verify
from qkv.train.data.encoding import text_tokens
from text.test_chat import CHAT, chat_tokenizer

from .toys import Counting, Shifted, Source, Wide, texts, written

BYTES = ByteTokenizer()


def jsonl(*documents: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


# What is in the shards


def test_texts_are_documents(tmp_path: Path) -> None:
    names = (written(tmp_path, "a.txt", "one\n\ntwo\n"), written(tmp_path, "b.txt", "zwölf"))
    shards = prepare(Source(names), BYTES, tmp_path / "out")
    assert texts(shards) == ["one\n\ntwo\n", "zwölf"]
    assert (shards.n_documents, shards.n_tokens) == (2, 9 + 6)
    parted = prepare(Source(names), BYTES, tmp_path / "parted", separator="")
    assert texts(parted) == ["one", "two", "zwölf"]
    verify(tmp_path / "out" / "train")


@pytest.mark.parametrize(("tokenizer", "kind"), [(BYTES, np.uint16), (Wide(), np.uint32)])
def test_tokens_take_the_bytes_they_need(tmp_path: Path, tokenizer: ByteTokenizer, kind: type) -> None:
    shards = prepare(Source((written(tmp_path, "a.txt", "text"),)), tokenizer, tmp_path / "out")
    assert isinstance(shards.tokens.pieces[0], np.memmap)
    assert shards.tokens.pieces[0].dtype == kind
    assert shards.tokens.document(0).tolist() == tokenizer.encode("text")
    assert shards.tokens.document(0).dtype == np.int64


def test_documents_go_over_the_ends_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "SHARD", 7)
    monkeypatch.setattr(preparing, "_BUFFER", 5)
    documents = ["a" * 20, "bc", "d" * 6, "e"]
    source = Source((written(tmp_path, "a.jsonl", jsonl(*documents)),), format="jsonl")
    shards = prepare(source, BYTES, tmp_path / "out")
    assert [len(piece) for piece in shards.tokens.pieces] == [7, 7, 7, 7, 1]
    assert texts(shards) == documents
    whole = "".join(documents).encode()
    for start in range(30):
        for stop in range(start, 30):
            assert bytes(shards.tokens.read(start, stop).tolist()) == whole[start:stop]
    verify(tmp_path / "out" / "train")


def test_documents_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    source = Source((written(tmp_path, "a.jsonl", jsonl("a", "", " \n", "b")),), format="jsonl")
    assert texts(prepare(source, BYTES, tmp_path / "out")) == ["a", "b"]
    (entry,) = manifest(tmp_path / "out" / "train")["sources"]
    assert (entry["documents"], entry["left_out"]) == (2, 2)


def test_pairs_have_a_source(tmp_path: Path) -> None:
    source = Source((written(tmp_path, "a.tsv", "Hi\tHallo\nRun\tLauf\n"),), format="parallel", field="2,1")
    shards = prepare(source, BYTES, tmp_path / "out")
    assert (texts(shards), texts(shards, "source")) == (["Hi", "Run"], ["Hallo", "Lauf"])
    assert shards.n_tokens == 5


def test_chats_have_marks(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    lines = [{"messages": messages}, {"messages": messages[:1]}]
    name = written(tmp_path, "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    shards = prepare(Source((name,), format="chat"), CHAT, tmp_path / "out")
    assert shards.answers is not None
    assert shards.n_documents == 1
    marked = shards.tokens.document(0)[shards.answers.document(0) == 1]
    assert CHAT.decode(marked.tolist(), keep_special=True, continues=True) == "Hello<|im_end|>"
    with pytest.raises(DataError, match="needs a tokenizer with a chat template"):
        prepare(Source((name,), format="chat"), BYTES, tmp_path / "other")


def test_a_chat_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    strict = chat_tokenizer("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
                            "{% endif %}{{ m.content }}{% endfor %}")  # fmt: skip
    lines = [[{"role": role, "content": "a"} for role in roles] for roles in (("user", "assistant"), ("tool",))]
    lines[1].append({"role": "assistant", "content": "b"})
    name = written(tmp_path, "a.jsonl", "".join(json.dumps({"messages": line}) + "\n" for line in lines))
    with pytest.raises(DataError, match=r"a.jsonl: line 2: .*no tools"):
        prepare(Source((name,), format="chat"), strict, tmp_path / "out")


def test_texts_stand_between_the_tokens_that_begin_and_end_them() -> None:
    bpe = train_bpe(["some text"], 300)
    assert text_tokens(bpe, "some text") == [*bpe.encode("some text"), bpe.specials.eos]
    with_bos = chat_tokenizer(add_bos_token=True, add_eos_token=True)
    tokens = text_tokens(with_bos, "some text")
    inner = with_bos.encode("some text", add_special=False)
    assert tokens == [with_bos.specials.bos, *inner, with_bos.specials.eos]
    assert text_tokens(BYTES, "é") == [195, 169]
    assert text_tokens(CHAT, "a") == [*CHAT.encode("a"), CHAT.specials.eos]  # it has a BOS, but asks for none


# Held out


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    names = tuple(written(tmp_path, f"{name}.txt", name * 10) for name in "abc")
    source = Source(names, valid_share=0.4)
    training, valid = (prepare(source, BYTES, tmp_path / "out", side) for side in ("train", "valid"))
    assert texts(training) == ["a" * 10, "b" * 8]
    assert texts(valid) == ["b" * 2, "c" * 10]
    assert "".join(training_texts(source)) == "a" * 10 + "b" * 8


def test_the_end_moves_with_the_text(tmp_path: Path) -> None:
    names = (written(tmp_path, "a.txt", "a" * 10), written(tmp_path, "b.txt", "b" * 10))
    source = Source(names, valid_share=0.3)
    assert texts(prepare(source, BYTES, tmp_path / "out")) == ["a" * 10, "b" * 4]
    written(tmp_path, "a.txt", "a" * 20)
    assert texts(prepare(source, BYTES, tmp_path / "out")) == ["a" * 20, "b"]
    assert texts(prepare(replace(source, valid_share=0.1), BYTES, tmp_path / "out")) == ["a" * 20, "b" * 7]


def test_something_is_left_to_train_on(tmp_path: Path) -> None:
    source = Source((written(tmp_path, "a.jsonl", jsonl("a", "b", "b")),), format="jsonl", valid_share=0.95)
    sides = [set(texts(prepare(source, BYTES, tmp_path / "out", side))) for side in ("train", "valid")]
    assert sides in ([{"a"}, {"b"}], [{"b"}, {"a"}])


@pytest.mark.parametrize("share", [0.001, 0.25, 0.9])
def test_the_same_record_is_always_on_the_same_side(tmp_path: Path, share: float) -> None:
    documents = [f"document {number}" for number in range(40)]
    first, second = (
        written(tmp_path, "a.jsonl", jsonl(*documents)),
        written(tmp_path, "b.jsonl", jsonl(*documents[::2])),
    )
    source = Source((first, second), format="jsonl", valid_share=share)
    sides = [texts(prepare(source, BYTES, tmp_path / "out", side)) for side in ("train", "valid")]
    assert sorted(sides[0] + sides[1]) == sorted(documents + documents[::2])
    assert set(sides[0]).isdisjoint(sides[1])
    assert abs(len(sides[1]) - max(1, share * 60)) <= 1
    assert list(training_texts(source)) == sides[0]


def test_files_of_their_own_are_held_out(tmp_path: Path) -> None:
    train, valid = written(tmp_path, "a.txt", "train"), written(tmp_path, "b.txt", "valid")
    source = Source((train,), (valid,), valid_share=0.5)
    assert texts(prepare(source, BYTES, tmp_path / "out")) == ["train"]
    assert texts(prepare(source, BYTES, tmp_path / "out", "valid")) == ["valid"]


def test_pairs_to_train_on_are_apart_from_those_held_out(tmp_path: Path) -> None:
    train = written(tmp_path, "a.tsv", "Hi\tHallo\nHi\tHallo\nHey\tHallo\nRun\tLauf\nrun\trenne\nGo\tGeh\n")
    valid = written(tmp_path, "b.tsv", "hey\thallo\nWait\tGEH\nWait\tGEH\n")
    source = Source((train,), (valid,), format="parallel")
    shards = prepare(source, BYTES, tmp_path / "out")
    assert texts(shards, "source") == ["Run", "run"]
    assert texts(prepare(source, BYTES, tmp_path / "out", "valid"), "source") == ["hey", "Wait"]
    assert list(training_texts(source)) == ["Run", "Lauf", "run", "renne"]
    written(tmp_path, "b.tsv", "hey\thallo\n")  # what is held out changes what is trained on
    assert texts(prepare(source, BYTES, tmp_path / "out"), "source") == ["Run", "run", "Go"]


def test_a_share_of_pairs_is_held_out_with_all_translations(tmp_path: Path) -> None:
    lines = [f"source {number // 2}\ttarget {number}\n" for number in range(60)]
    source = Source((written(tmp_path, "a.tsv", "".join(lines)),), format="parallel", valid_share=0.2)
    sides = [prepare(source, BYTES, tmp_path / "out", side) for side in ("train", "valid")]
    assert set(texts(sides[0], "source")).isdisjoint(texts(sides[1], "source"))
    assert sides[0].n_documents + sides[1].n_documents == 60
    assert sides[1].n_documents == 12


# Once


def test_knowing_that_nothing_changed_takes_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source((written(tmp_path, "a.tsv", "a\tb\nc\td\ne\tf\n"),), format="parallel", valid_share=0.4)
    before = [prepare(source, BYTES, tmp_path / "out", side) for side in ("train", "valid")]
    monkeypatch.setattr(Reading, "records", lambda self, name: pytest.fail("a record was read"))
    after = [prepare(source, BYTES, tmp_path / "out", side) for side in ("train", "valid")]
    assert [one.identity for one in after] == [one.identity for one in before]


def test_what_is_there_is_not_tokenised_again(tmp_path: Path) -> None:
    first, second = written(tmp_path, "a.jsonl", jsonl("a", "b")), written(tmp_path, "b.jsonl", jsonl("cc"))
    source = Source((first, second), format="jsonl")
    counting = Counting()
    before = prepare(source, counting, tmp_path / "out")
    assert (counting.calls, counting.characters) == (3, 4)
    stamp = (tmp_path / "out" / "train" / "manifest.json").stat().st_mtime_ns
    again = prepare(source, counting, tmp_path / "out")
    assert counting.calls == 3
    assert (tmp_path / "out" / "train" / "manifest.json").stat().st_mtime_ns == stamp
    assert again.identity == before.identity
    assert texts(again) == ["a", "b", "cc"]


def test_only_what_changed_is_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "SHARD", 3)
    names = [written(tmp_path, f"{name}.jsonl", jsonl(name * 4, "", name)) for name in "abc"]
    counting = Counting()
    old = prepare(Source(tuple(names), format="jsonl"), counting, tmp_path / "out")
    written(tmp_path, "b.jsonl", jsonl("new"))
    more = [names[2], *names[:2], written(tmp_path, "d.jsonl", jsonl("d"))]
    counting.calls = 0
    shards = prepare(Source(tuple(more), format="jsonl"), counting, tmp_path / "out")
    assert counting.calls == 2
    assert texts(shards) == ["cccc", "c", "aaaa", "a", "new", "d"]
    assert [entry["left_out"] for entry in manifest(tmp_path / "out" / "train")["sources"]] == [1, 1, 0, 0]
    assert shards.identity != old.identity
    verify(tmp_path / "out" / "train")
    prepare(Source(tuple(more), format="jsonl"), Counting(), tmp_path / "fresh")
    for path in (tmp_path / "fresh" / "train").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / "train" / path.name).read_bytes()


def test_another_way_of_reading_is_another_preparation(tmp_path: Path) -> None:
    name = written(tmp_path, "a.jsonl", '{"text": "a", "title": "b"}\n')
    assert texts(prepare(Source((name,), format="jsonl"), BYTES, tmp_path / "out")) == ["a"]
    assert texts(prepare(Source((name,), format="jsonl", field="title"), BYTES, tmp_path / "out")) == ["b"]
    source = Source((written(tmp_path, "b.txt", "x\n\ny"),))
    assert texts(prepare(source, BYTES, tmp_path / "out")) == ["x\n\ny"]
    assert texts(prepare(source, BYTES, tmp_path / "out", separator="")) == ["x", "y"]


def test_the_cost_of_preparing_is_that_of_the_text(tmp_path: Path) -> None:
    costs = []
    for count in (10, 20, 40):
        counting = Counting()
        source = Source((written(tmp_path, f"{count}.jsonl", jsonl(*["word"] * count)),), format="jsonl")
        prepare(source, counting, tmp_path / f"out {count}")
        costs.append((counting.calls, counting.characters))
    assert costs == [(count, 4 * count) for count in (10, 20, 40)]


def test_tokenizers_are_told_apart_by_all_they_are() -> None:
    one, other = train_bpe(["some text"], 300), train_bpe(["some text"], 300)
    assert tokenizer_hash(one) == tokenizer_hash(other)
    different = [BYTES, Shifted(), one, train_bpe(["some other text"], 300), CHAT, chat_tokenizer("{{ messages }}")]
    assert len({tokenizer_hash(tokenizer) for tokenizer in different}) == len(different)


# All or nothing


def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    class Failing(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            if text == "bad":
                raise KeyboardInterrupt
            return super().encode(text)

    name = written(tmp_path, "a.jsonl", jsonl("good"))
    prepare(Source((name,), format="jsonl"), Failing(), tmp_path / "out")
    written(tmp_path, "a.jsonl", jsonl("better", "bad"))
    with pytest.raises(KeyboardInterrupt):
        prepare(Source((name,), format="jsonl"), Failing(), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        prepare(Source((name,), format="jsonl"), Failing(), tmp_path / "new")
    assert texts(open_shards(tmp_path / "out" / "train")) == ["good"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir()) == ["out", "train"]


def test_a_broken_file_leaves_nothing(tmp_path: Path) -> None:
    name = written(tmp_path, "a.jsonl", jsonl("good") + "{\n")
    with pytest.raises(DataError, match=r"a.jsonl: line 2: no JSON"):
        prepare(Source((name,), format="jsonl"), BYTES, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "side", "message"),
    [
        (Source(("a.jsonl",), format="jsonl", valid_share=0.1), "valid", "1 different records are too few"),
        (Source(("b.txt",), valid_share=0.01), "valid", "the share that is held out is empty"),
        (Source(("b.txt",)), "valid", "valid: no files and valid_share = 0"),
        (Source(("c.jsonl",), format="jsonl"), "train", "nothing to train on"),
        (Source(("none.txt",)), "train", "cannot be read"),
    ],
)
def test_there_must_be_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Source, side: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in [("a.jsonl", jsonl("a", "a")), ("b.txt", "b"), ("c.jsonl", jsonl("", " "))]:
        written(tmp_path, name, text)
    with pytest.raises(DataError, match=message):
        prepare(source, BYTES, tmp_path / "out", side)


# Refused


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Source, Path]:
    source = Source((written(tmp_path, "a.txt", "text"),))
    prepare(source, BYTES, tmp_path / "out")
    return source, tmp_path / "out" / "train"


def test_shards_of_another_tokenizer_are_refused(prepared: tuple[Source, Path]) -> None:
    source, folder = prepared
    message = "prepared with another tokenizer .*; prepare into another folder, or delete this one"
    with pytest.raises(DataError, match=message):
        prepare(source, Shifted(), folder.parent)
    with pytest.raises(DataError, match=message):
        open_shards(folder, Shifted())
    assert texts(open_shards(folder, BYTES)) == ["text"]


def test_other_files_are_never_deleted(prepared: tuple[Source, Path], tmp_path: Path) -> None:
    source, folder = prepared
    written(folder, "thesis.txt", "mine")
    written(tmp_path, "a.txt", "changed")
    with pytest.raises(DataError, match=r"holds other files \(thesis.txt\)"):
        prepare(source, BYTES, folder.parent)
    assert (folder / "thesis.txt").read_text() == "mine"
    foreign = written(tmp_path, "foreign/train/a.txt", "mine")
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read"):
        prepare(source, BYTES, tmp_path / "foreign")
    assert Path(foreign).read_text() == "mine"
    written(tmp_path, "file/train", "mine")
    with pytest.raises(DataError, match="is a file"):
        prepare(source, BYTES, tmp_path / "file")


def damage(folder: Path, what: str) -> None:
    """Do something to a folder of shards."""
    shard, bounds, path = folder / "tokens-00000.bin", folder / "tokens-bounds.bin", folder / "manifest.json"
    said = manifest(folder)
    if what == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif what == "longer":
        shard.write_bytes(shard.read_bytes() + b"\0\0")
    elif what == "foreign":
        shard.write_bytes(b"x" * len(shard.read_bytes()))
    elif what == "of another":
        other = shard.read_bytes()
        shard.write_bytes(other[:8] + bytes(16) + other[24:])
    elif what == "missing":
        shard.unlink()
    elif what == "bounds":
        raw = bounds.read_bytes()
        bounds.write_bytes(raw[:-8] + (3).to_bytes(8, "little"))
    elif what == "no json":
        path.write_text("{")
    elif what == "other json":
        path.write_text("[]")
    elif what == "version":
        path.write_text(json.dumps({**said, "version": 2}))
    elif what == "entry":
        path.write_text(json.dumps({**said, "columns": {}}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("truncated", r"tokens-00000.bin: 31 bytes, but the manifest says 32: cut short or changed; delete the folder"),
        ("longer", "34 bytes, but the manifest says 32"),
        ("foreign", "tokens-00000.bin: is no shard of qkv"),
        ("of another", "tokens-00000.bin: belongs to another preparation"),
        ("missing", "tokens-00000.bin: cannot be read"),
        ("bounds", "tokens-bounds.bin: its documents do not cover the 4 tokens once each"),
        ("no json", "manifest.json: no JSON"),
        ("other json", "manifest.json: not written by qkv"),
        ("version", "manifest.json: version 2, but this qkv reads 1"),
        ("entry", r"manifest.json: damaged \(KeyError\('tokens'\)\)"),
    ],
)
def test_damaged_shards_are_refused(prepared: tuple[Source, Path], what: str, message: str) -> None:
    source, folder = prepared
    damage(folder, what)
    with pytest.raises(DataError, match=message):
        open_shards(folder)
    with pytest.raises(DataError, match=message):
        prepare(source, BYTES, folder.parent)


def test_a_changed_byte_is_found_when_asked_for(prepared: tuple[Source, Path]) -> None:
    _, folder = prepared
    shard = folder / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(DataError, match=r"tokens-00000.bin: changed since it was prepared"):
        verify(folder)


def test_a_tokenizer_beyond_its_own_vocabulary_is_refused(tmp_path: Path) -> None:
    class Lying(ByteTokenizer):
        vocab_size = 100

    with pytest.raises(DataError, match="gives token 120, but says that it has 100"):
        prepare(Source((written(tmp_path, "a.txt", "text"),)), Lying(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.data
def test_shakespeare_is_split_as_by_nanogpt(data: Path, tmp_path: Path) -> None:
    source = Source((str(data / "corpora" / "tinyshakespeare.txt"),), valid_share=0.1)
    training, valid = (prepare(source, BYTES, tmp_path, side) for side in ("train", "valid"))
    assert (training.n_tokens, valid.n_tokens) == (1_003_855, 111_539)
    stream = Stream(training, 64, 12, seed=0, ahead=1)
    assert len(stream.rows) == -(-1_003_854 // 64)
    assert all(len(row.tokens) == 65 for row in next(stream))
