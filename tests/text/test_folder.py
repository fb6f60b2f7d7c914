"""Hugging Face folders, and what the peer library makes of the same files."""

from __future__ import annotations

import json
import pickle
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from qkv.errors import CheckpointError, DataError
from qkv.text import language_reference, tokenizer_from
from qkv.text.folder import Settings, finish, read_folder
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer
from qkv.text.sentencepiece import SentencePieceTokenizer

from .files import CHATML, SENTENCEPIECE, trained_bpe

SAMPLES = [
    "", " ", "Hello world", "  two  spaces ", "naïve café, 的人有!", "a\n\n\tb", "x<s>y</s>z", "don't", "🦙🦙", "1234",
]  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def folder_of(path: Path, library: Tokenizer, **files: Any) -> PieceTokenizer:
    return read_folder(write(path, tokenizer__json=library.to_str(), **files))


def llama_like() -> Tokenizer:
    """BPE with byte fallback, spaces as ▁, and BOS by template, as the folders of Llama 2 have it."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, max_token_length=8
    )
    library.train_from_iterator(language_reference()[:20_000].split(), trainer)
    made = json.loads(library.to_str())
    # The bytes are pieces of the vocabulary, not tokens to be found in a text.
    made["added_tokens"] = made["added_tokens"][:3]
    library = Tokenizer.from_str(json.dumps(made))
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 1)])
    return library


def unigram() -> Tokenizer:
    """Unigram with a control token in the vocabulary, as the folders of T5 have it."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocab += [(c, -5.0 - at / 50) for at, c in enumerate("abcdefghijklmnopqrstuvwxyzHW</>!")] + [("▁Hello", -3.0)]
    library = Tokenizer(models.Unigram(vocab, 2, False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    library.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return library


@cache
def _loaded(name: str) -> PieceTokenizer:
    library = {"bpe": lambda: trained_bpe(["<s>"]), "llama": llama_like, "unigram": unigram}[name]()
    return finish(json.loads(library.to_str()), Settings({}, {}, frozenset(), None), name)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return trained_bpe(["<s>", "</s>", "<mask>"])


LLAMA = llama_like()


def test_a_tokenizer_json_gives_the_ids_of_the_library(tmp_path: Path, bpe: Tokenizer) -> None:
    for name, library in {"bpe": bpe, "llama": LLAMA, "unigram": unigram()}.items():
        tokenizer = folder_of(tmp_path / name, library)
        assert isinstance(tokenizer, LibraryTokenizer)
        for text in SAMPLES:
            assert tokenizer.encode(text, parse_special=True) == library.encode(text).ids
            assert (
                tokenizer.encode(text, add_special=False, parse_special=True)
                == library.encode(text, add_special_tokens=False).ids
            )
        assert tokenizer.vocab_size == library.get_vocab_size()


def test_text_is_never_a_control_token(tmp_path: Path, bpe: Tokenizer) -> None:
    for name, library in {"bpe": bpe, "llama": LLAMA, "unigram": unigram()}.items():
        tokenizer = folder_of(tmp_path / name, library)
        controls = {text: token for text, token in tokenizer.specials.controls.items() if text != "<unk>"}
        assert len(controls) >= 2
        for text, token in controls.items():
            assert token in tokenizer.encode(f"a{text}b", add_special=False, parse_special=True)
            tokens = tokenizer.encode(f"a{text}b", add_special=False)
            assert set(controls.values()).isdisjoint(tokens), (name, text)
            assert tokenizer.decode(tokens) == f"a{text}b"


@given(TEXTS)
def test_every_text_comes_back(text: str) -> None:
    bpe = _loaded("bpe")
    assert bpe.decode(bpe.encode(text)) == text
    llama = _loaded("llama")
    if "▁" not in text:
        assert llama.decode(llama.encode(text)) == text


@given(st.lists(st.integers(-2, 800)))
def test_pieces_of_a_stream_join_to_the_whole_text(tokens: list[int]) -> None:
    for name in ("bpe", "llama", "unigram"):
        tokenizer = _loaded(name)
        assert "".join(tokenizer.stream(tokens)) == tokenizer.decode(tokens)


def test_decoding_is_that_of_the_library_where_it_is_text(tmp_path: Path, bpe: Tokenizer) -> None:
    for name, library in {"bpe": bpe, "llama": LLAMA, "unigram": unigram()}.items():
        tokenizer = folder_of(tmp_path / name, library)
        for text in ("Hello world", " Hello", "hello the", "HHello  Wa!"):
            tokens = library.encode(text).ids
            assert tokenizer.decode(tokens) == library.decode(tokens)


def test_roles_ends_and_the_template_come_from_the_files_beside(tmp_path: Path, bpe: Tokenizer) -> None:
    tokenizer = folder_of(
        tmp_path / "a",
        bpe,
        tokenizer_config__json={"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML},
        special_tokens_map__json={"mask_token": "<mask>"},
        generation_config__json={"eos_token_id": [1, 7]},
    )
    specials = tokenizer.specials
    assert (specials.bos, specials.eos, specials.mask, specials.pad) == (0, 1, 2, None)
    assert specials.ends == {1, 7}
    assert specials.chat_template == CHATML
    assert specials.names() == {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    write(tmp_path / "a", chat_template__jinja="{{ 1 }}")
    assert read_folder(tmp_path / "a").specials.chat_template == "{{ 1 }}"


def test_a_token_of_the_config_that_the_vocabulary_lacks_gets_the_next_id(tmp_path: Path, bpe: Tokenizer) -> None:
    size = bpe.get_vocab_size()
    config = {"pad_token": "<pad>", "added_tokens_decoder": {str(size + 1): {"content": "<|x|>", "special": True}}}
    with pytest.raises(CheckpointError, match="ids of control tokens disagree"):
        folder_of(tmp_path / "gap", bpe, tokenizer_config__json={**config, "pad_token": None})
    tokenizer = folder_of(tmp_path / "b", bpe, tokenizer_config__json={"pad_token": "<pad>"})
    assert tokenizer.specials.pad == size
    assert tokenizer.vocab_size == size + 1


@pytest.mark.parametrize(
    ("flags", "around"),
    [
        ({}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ({"add_eos_token": True}, ([1], [2])),
    ],
)
def test_flags_of_the_config_overrule_the_template(
    tmp_path: Path, flags: dict[str, bool], around: tuple[list[int], list[int]]
) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", **flags}
    assert folder_of(tmp_path / "c", LLAMA, tokenizer_config__json=config).around == around


def test_truncation_and_padding_of_the_file_are_left_out(tmp_path: Path) -> None:
    library = trained_bpe(["<s>"])
    library.enable_truncation(4)
    library.enable_padding(length=9, pad_token="<s>")
    assert len(library.encode("a b c d e f").ids) == 9
    assert folder_of(tmp_path / "d", library).encode("a b c d e f") == trained_bpe(["<s>"]).encode("a b c d e f").ids


def test_vocab_json_and_merges_are_gpt_2(tmp_path: Path, bpe: Tokenizer) -> None:
    from transformers import GPT2TokenizerFast

    library = trained_bpe(["<|endoftext|>"])
    library.model.save(str(tmp_path))
    tokenizer = read_folder(tmp_path)
    peer = GPT2TokenizerFast.from_pretrained(str(tmp_path))
    end = library.token_to_id("<|endoftext|>")
    assert (tokenizer.specials.bos, tokenizer.specials.eos) == (end, end)
    for text in SAMPLES:
        assert tokenizer.encode(text) == peer(text)["input_ids"] == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|endoftext|>", parse_special=True)[-1] == end


def test_gpt_1_marks_the_ends_of_words(tmp_path: Path) -> None:
    vocab = ["<unk>", "h", "e", "l", "o", "o</w>", "he", "ll", "hell", "hello</w>", "!</w>", "!"]
    merges = "#version: 0.2\nh e\nl l\nhe ll\nhell o</w>\n"
    write(tmp_path, vocab__json={text: token for token, text in enumerate(vocab)}, merges__txt=merges)
    tokenizer = read_folder(tmp_path)
    assert tokenizer.encode("Hello hello!") == [9, 9, 10]
    assert tokenizer.decode([9, 9, 10]) == "hello hello !"
    assert list(tokenizer.stream([8, 5, 9])) == ["hell", "o", " hello"]


def test_vocab_txt_is_bert(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "hello",
        "world",
        "##s",
        "cafe",
        "!",
        "的",
        "人",
        "[",
        "]",
        "mask",
    ]
    write(tmp_path, vocab__txt="\n".join(words) + "\n")
    tokenizer, peer = read_folder(tmp_path), BertTokenizerFast.from_pretrained(str(tmp_path))
    for text in [*SAMPLES, "Hello worlds!", "CAFÉ [MASK]"]:
        assert tokenizer.encode(text, parse_special=True) == peer(text)["input_ids"]
        if text:  # to the peer no second text is no pair
            pair = peer("hello", text)
            assert tokenizer.encode_pair("hello", text, parse_special=True) == (
                pair["input_ids"],
                pair["token_type_ids"],
            )
    assert tokenizer.encode("[MASK]") == [2, 12, 14, 13, 3]
    write(tmp_path, tokenizer_config__json={"do_lower_case": False})
    assert read_folder(tmp_path).encode("Hello") == [2, 1, 3]


def test_a_sentencepiece_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((SENTENCEPIECE / "bpe.model").read_bytes())
    write(tmp_path, tokenizer_config__json={"add_eos_token": True, "chat_template": CHATML, "bos_token": "<s>"})
    tokenizer = read_folder(tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.around == ([1], [2])
    assert tokenizer.specials.chat_template == CHATML
    assert tokenizer.specials.unk == 0
    write(tmp_path, added_tokens__json={"<new>": 700})
    with pytest.raises(CheckpointError, match="1 added tokens"):
        read_folder(tmp_path)


def test_a_saved_tokenizer_is_made_again(tmp_path: Path, bpe: Tokenizer) -> None:
    config = {"bos_token": "<s>", "chat_template": CHATML, "add_bos_token": True}
    tokenizer = folder_of(tmp_path / "e", bpe, tokenizer_config__json=config)
    saved = json.loads(json.dumps(tokenizer.to_dict()))
    for again in (tokenizer_from(saved), pickle.loads(pickle.dumps(tokenizer))):
        assert isinstance(again, LibraryTokenizer)
        assert again.specials == tokenizer.specials
        assert again.around == tokenizer.around == ([0], [])
        assert again.to_dict() == tokenizer.to_dict()
        for text in SAMPLES:
            assert again.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True)
    assert Tokenizer.from_str(json.dumps(saved["json"])).encode("Hello").ids == tokenizer.encode("Hello")
    del saved["json"]
    with pytest.raises(CheckpointError, match="huggingface description is damaged"):
        tokenizer_from(saved)


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer, wrong = _loaded("bpe"), []

    def work(special: bool) -> None:
        expected = tokenizer.encode("a<s>b", parse_special=special)
        wrong.extend(x for _ in range(200) if (x := tokenizer.encode("a<s>b", parse_special=special)) != expected)

    threads = [threading.Thread(target=work, args=(flag,)) for flag in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_pairs_need_a_template(tmp_path: Path, bpe: Tokenizer) -> None:
    tokenizer = folder_of(tmp_path / "f", bpe)
    assert isinstance(tokenizer, LibraryTokenizer)
    with pytest.raises(DataError, match="how two texts are joined"):
        tokenizer.encode_pair("a", "b")


def test_added_tokens_that_are_text_are_found_and_mean_themselves(tmp_path: Path) -> None:
    library = trained_bpe(["<s>"])
    library.add_tokens([AddedToken("Ġword"), AddedToken("ü"), AddedToken("<think>")])
    tokenizer = folder_of(tmp_path / "g", library)
    for text in ("Ġword", "für", "a<think>b"):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no tokenizer in it"),
        ({"tokenizer__json": "{"}, "tokenizer.json: not JSON"),
        ({"tokenizer__json": "[]"}, "a JSON object belongs here, not list"),
        ({"tokenizer__json": "[" * 100_000}, "nested too deeply"),
        ({"tokenizer__json": {"model": {}}}, "not a tokenizer.json"),
        ({"tokenizer__json": {"model": {"type": "Magic", "vocab": {"a": 0}}}}, "the tokenizer is not understood"),
        ({"tokenizer__json": {"model": {"vocab": {}}, "decoder": {"type": "CTC"}}}, "decoder CTC is not understood"),
        ({"vocab__json": {"a": 0}}, "merges.txt: cannot be read"),
        ({"vocab__txt": "a\nb\na"}, "1 lines stand in it twice"),
        ({"vocab__txt": "[UNK]\n[CLS]"}, r"a WordPiece vocabulary needs \[SEP\]"),
    ],
)
def test_damaged_folders_are_refused_in_one_line(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_folder(tmp_path)
    assert "\n" not in str(caught.value)
