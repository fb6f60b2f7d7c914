"""Tokenizers as GGUF metadata: read again, they give the same ids; what the format cannot say is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import qkv
from qkv.checkpoint.gguf import read_gguf, write_gguf
from qkv.checkpoint.gguf_file import File
from qkv.errors import CheckpointError
from qkv.text import ByteTokenizer, gguf, language_reference
from qkv.text.cuts import cut_name
from qkv.text.folder import Settings, finish
from qkv.text.gguf_export import PROBES, metadata_of
from qkv.text.pieces import PieceTokenizer
from qkv.text.pretokenizers import PRE_TOKENIZERS
from qkv.text.sentencepiece import Kind, SentencePieceTokenizer
from qkv.text.spec import BYTE_LEVEL, added_token, bert, byte_level_bpe, template

from .files import CHATML, SENTENCEPIECE, gguf_metadata, sentencepiece, tiny_gguf, trained_bpe

Spec = dict[str, Any]
NAMES = ["<s>", "</s>", "<|im_end|>"]
CHAT = Settings({"bos_token": "<s>", "eos_token": "</s>"}, {}, frozenset({2}), CHATML)
PLAIN = Settings({}, {}, frozenset(), None)


def byte_level(pre_tokenizer: Spec | None = None, **changes: Any) -> PieceTokenizer:
    """A trained vocabulary under a cut of words, with a chat's control tokens and a piece of text of its own."""
    spec = json.loads(trained_bpe(NAMES).to_str())
    spec["added_tokens"].append(added_token(600, "  \n", special=False))
    spec |= {"pre_tokenizer": pre_tokenizer or spec["pre_tokenizer"], **changes}
    return finish(spec, CHAT, "test")


def digits_apart() -> PieceTokenizer:
    steps = [{"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}]
    return byte_level({"type": "Sequence", "pretokenizers": steps})


def starting_with_bos() -> PieceTokenizer:
    pre = byte_level_bpe(PRE_TOKENIZERS["llama-bpe"].patterns)
    return byte_level(pre, post_processor=template((["<s>"], []), {"<s>": 0}))


def composing() -> PieceTokenizer:
    return byte_level(byte_level_bpe(PRE_TOKENIZERS["qwen2"].patterns), normalizer={"type": "NFC"})


def ranked(
    normalizer: Spec | None = None, pre_tokenizer: Spec | None = None, with_literals: bool = False, **changes: Any
) -> PieceTokenizer:
    """The small SentencePiece BPE as converters write it: merges in the order of the scores."""
    pieces = sentencepiece("bpe").pieces
    ids = {text: token for token, text in enumerate(pieces.texts)}
    usable = {text for token, text in enumerate(pieces.texts) if pieces.kinds[token] == Kind.NORMAL}
    ordered = sorted(usable, key=lambda text: -pieces.scores[ids[text]])
    merges = [
        [text[:cut], text[cut:]]
        for text in ordered
        for cut in range(1, len(text))
        if text[:cut] in usable and text[cut:] in usable
    ]
    named = [text for token, text in enumerate(pieces.texts) if pieces.kinds[token] in (Kind.CONTROL, Kind.UNKNOWN)]
    literal = [text for token, text in enumerate(pieces.texts) if pieces.kinds[token] == Kind.USER_DEFINED]
    controls, literal = (named, literal) if with_literals else ([*named, *literal], [])
    spec = {
        "added_tokens": [
            *(added_token(ids[text], text, special=True) for text in controls),
            *(added_token(ids[text], text, special=False) for text in literal),
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": template((["<s>"], []), {"<s>": ids["<s>"]}),
        "decoder": {"type": "Sequence", "decoders": [BACK, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": ids, "merges": merges, "byte_fallback": True, "fuse_unk": True,
                  "unk_token": "<unk>", **changes},
    }  # fmt: skip
    settings = Settings({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, {}, frozenset(), CHATML)
    return finish(spec, settings, "test")


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
BACK = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}


def metaspace(scheme: str) -> Spec:
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}


def llama_2() -> PieceTokenizer:
    return ranked({"type": "Sequence", "normalizers": [PREPEND, REPLACE]})


def llama_2_not_legacy() -> PieceTokenizer:
    return ranked(pre_tokenizer=metaspace("first"))


def gemma() -> PieceTokenizer:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return ranked(REPLACE, split, with_literals=True)


def t5() -> PieceTokenizer:
    """The small SentencePiece unigram model as converters write T5's.

    They leave whitespace to a step of its own, which is the same only where the compiled map makes spaces of it, as
    T5's does: `spaces.map` is what sentencepiece 0.2.1 compiles of 9, A, D, A0, 3000 -> 20; FB01 -> 66 69; FF01 -> 21.
    """
    pieces = sentencepiece("unigram").pieces
    controls = {t: i for i, t in enumerate(pieces.texts) if pieces.kinds[i] in (Kind.CONTROL, Kind.UNKNOWN)}
    charsmap = base64.b64encode((SENTENCEPIECE / "spaces.map").read_bytes()).decode()
    spec = {
        "added_tokens": [added_token(token, text, special=True) for text, token in controls.items()],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace("always")]},
        "post_processor": template(([], ["</s>"]), controls),
        "decoder": metaspace("always"),
        "model": {"type": "Unigram", "unk_id": controls["<unk>"], "byte_fallback": False,
                  "vocab": [[text, score] for text, score in zip(pieces.texts, pieces.scores, strict=True)]},
    }  # fmt: skip
    return finish(spec, Settings({"eos_token": "</s>", "unk_token": "<unk>"}, {}, frozenset(), None), "test")


def trained_unigram() -> PieceTokenizer:
    library = Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>",
                                      show_progress=False)  # fmt: skip
    library.train_from_iterator([language_reference()[:20_000]], trainer)
    spec = json.loads(library.to_str()) | {"decoder": metaspace("never")}
    return finish(spec, Settings({"eos_token": "</s>", "unk_token": "<unk>"}, {}, frozenset(), None), "test")


def word_piece(**changes: Any) -> PieceTokenizer:
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    library.train_from_iterator([language_reference()[:20_000]], trainer)
    vocab = library.get_vocab() | {"[unused0]": 400}
    spec = bert("test", vocab, {name: vocab[name] for name in special}, lowercase=True, strip_accents=None)
    spec["normalizer"] |= changes
    roles = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    return finish(spec, Settings(roles, {}, frozenset(), None), "test")


TOKENIZERS: dict[str, Callable[[], PieceTokenizer]] = {
    "byte-level": byte_level,
    "byte-level, digits apart": digits_apart,
    "byte-level, bos": starting_with_bos,
    "byte-level, composed": composing,
    "ranked merges": llama_2,
    "ranked merges, first space": llama_2_not_legacy,
    "ranked merges, no space": gemma,
    "SentencePiece BPE": lambda: sentencepiece("bpe"),
    "SentencePiece unigram": lambda: sentencepiece("unigram"),
    "unigram as T5": t5,
    "unigram, trained": trained_unigram,
    "WordPiece": word_piece,
    "WordPiece, cased": lambda: word_piece(lowercase=False, strip_accents=False),
}
NOT_TEXT = ("Cs", "Cn", "Cc", "Zs", "Zl", "Zp")
"""Rare whitespace aside: `spaces.map` does not know it all."""
BUILT: dict[str, tuple[PieceTokenizer, PieceTokenizer]] = {}


def both(name: str) -> tuple[PieceTokenizer, PieceTokenizer]:
    """A tokenizer, and what is read from its metadata."""
    if name not in BUILT:
        made = TOKENIZERS[name]()
        BUILT[name] = made, gguf.from_metadata(metadata_of(made), name)
    return BUILT[name]


every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@every_tokenizer
def test_read_again_it_is_the_same_tokenizer(name: str) -> None:
    made, again = both(name)
    assert again.vocab_size == made.vocab_size
    assert again.specials == made.specials
    assert again.around == made.around
    controls = list(made.specials.controls)
    for text in [*PROBES, language_reference()[:3000], "".join(controls), f"a{controls[0]}  b {controls[-1]} c"]:
        assert again.encode(text) == made.encode(text)
        assert again.encode(text, parse_special=True) == made.encode(text, parse_special=True)
    for token in range(made.vocab_size):
        assert again.decode([token], continues=True) == made.decode([token], continues=True)


@every_tokenizer
@given(text=st.text(st.sampled_from("aeiou thn.,'’\n\t12é的ſ\u0301") | st.characters(exclude_categories=NOT_TEXT)))
def test_any_text_has_the_same_ids(name: str, text: str) -> None:
    made, again = both(name)
    assert again.encode(text) == made.encode(text)


@every_tokenizer
def test_it_goes_through_a_file(name: str, tmp_path: Path) -> None:
    made, _ = both(name)
    config = qkv.preset("llama-2-7b").toy().override({"vocab_size": made.vocab_size + 5})
    tensors = {n: np.zeros(p.shape, np.float32) for n, p in config.shapes().items()}
    path = tmp_path / "model.gguf"
    write_gguf(path, config, tensors, metadata=metadata_of(made, config.vocab_size))
    held = read_gguf(path)
    again = gguf.from_metadata(held.metadata, str(path))
    # The table's last rows are fillers, which no text has and no model may say.
    assert len(File(path).metadata["tokenizer.ggml.tokens"]) == held.config.vocab_size
    assert again.vocab_size == made.vocab_size
    assert again.specials == made.specials
    assert all(again.encode(text) == made.encode(text) for text in PROBES)
    fields = package.GGUFReader(path).fields
    types = {key.removeprefix("tokenizer.ggml."): [kind.name for kind in field.types] for key, field in fields.items()}
    expected = {
        "tokens": ["ARRAY", "STRING"], "token_type": ["ARRAY", "INT32"], "scores": ["ARRAY", "FLOAT32"],
        "merges": ["ARRAY", "STRING"], "precompiled_charsmap": ["ARRAY", "UINT8"], "eos_token_id": ["UINT32"],
        "add_bos_token": ["BOOL"], "model": ["STRING"],
    }  # fmt: skip
    assert all(types.get(key, kind) == kind for key, kind in expected.items())


@pytest.mark.data
@pytest.mark.parametrize("name", ["bert-bge", "deepseek-coder", "gpt-2", "llama-spm"])
def test_published_metadata_comes_back(data: Path, name: str) -> None:
    path = data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    published = gguf_metadata(path)
    tokens = published["tokenizer.ggml.tokens"]
    found = metadata_of(gguf.from_metadata(published, path.name), len(tokens))
    for key in ("tokens", "merges", "scores", "model", "bos_token_id", "eos_token_id"):
        assert found.get(f"tokenizer.ggml.{key}") == published.get(f"tokenizer.ggml.{key}"), key


# --- Which cut of words it is -----------------------------------------------------------------------------------------


def cut_by(*steps: Spec, ignore_merges: bool = False, merges: list[str] | None = None, **vocab: int) -> Spec:
    model = {"ignore_merges": ignore_merges, "vocab": {"a": 0, "b": 1, **vocab}, "merges": merges or []}
    return {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}}


def pattern(text: str, behavior: str = "Isolated", invert: bool = False) -> Spec:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": behavior, "invert": invert}


LLAMA_3 = PRE_TOKENIZERS["llama-bpe"].patterns[0]


def test_a_cut_in_other_words_has_the_name_of_what_it_does() -> None:
    spelled = [pattern("[\r\n]"), pattern(r"\s?\p{L}+"), pattern(r"\s?\p{P}+"), pattern("[一-龥ࠀ-一가-\ud7ff]+")]
    assert cut_name(cut_by(*spelled, {"type": "Digits", "individual_digits": True}, BYTE_LEVEL)) == "deepseek-coder"
    removed = pattern(LLAMA_3, "Removed", invert=True)
    assert cut_name(cut_by(removed, BYTE_LEVEL, ignore_merges=True)) == "llama-bpe"
    assert cut_name(cut_by(removed, BYTE_LEVEL)) == "dbrx"


@pytest.mark.parametrize("wrong", [r"\w+|\W+", LLAMA_3.replace("{1,3}", "{1,2}"), LLAMA_3.replace("(?i:", "(?:")])
def test_a_cut_that_no_name_stands_for_has_none(wrong: str) -> None:
    assert cut_name(cut_by(pattern(wrong), BYTE_LEVEL)) is None


def test_words_looked_up_whole_matter_where_merges_do_not_lead_to_all() -> None:
    """Only Llama 3's name says `ignore_merges`; under Qwen's, a word that no merge makes would fall apart."""
    qwen = byte_level_bpe(PRE_TOKENIZERS["qwen2"].patterns)["pretokenizers"]
    reached = cut_by(*qwen, ignore_merges=True, merges=["a b"], ab=2)
    assert cut_name(reached) == "qwen2"
    assert cut_name(cut_by(*qwen, ignore_merges=True, merges=["a b"], ab=2, aa=3)) is None


def test_roberta_has_a_name_of_its_own() -> None:
    gpt2 = cut_by({**BYTE_LEVEL, "use_regex": True})
    assert cut_name(gpt2) == "gpt-2"
    assert cut_name(gpt2, add_sep=True) == "roberta-bpe"
    assert cut_name(cut_by({**BYTE_LEVEL, "use_regex": True, "add_prefix_space": True})) is None


# --- What it cannot be ------------------------------------------------------------------------------------------------


def taking_spaces_along() -> PieceTokenizer:
    spec = json.loads(trained_bpe(NAMES).to_str())
    spec["added_tokens"].append(added_token(600, "<mask>", special=True, lstrip=True))
    return finish(spec, PLAIN, "test")


def one_way_only() -> PieceTokenizer:
    """A BPE trained on characters: each piece is made of one pair, where SentencePiece would join any."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    library.train_from_iterator([language_reference()[:20_000]], trainer)
    spec = json.loads(library.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    return finish(spec, Settings({"unk_token": "<unk>"}, {}, frozenset(), None), "test")


def ends(many: frozenset[int]) -> PieceTokenizer:
    spec = json.loads(trained_bpe([*NAMES, "<|a|>"]).to_str())
    return finish(spec, CHAT._replace(ends=many), "test")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "bytes": (ByteTokenizer, "no words for ByteTokenizer"),
    "lstrip": (taking_spaces_along, "token '<mask>' takes spaces along"),
    "one way": (one_way_only, "is made of some of its parts only"),
    "cut": (lambda: byte_level(byte_level_bpe([r"\w+|\W+"])), "no name stands for its cut"),
    "normalizer": (lambda: byte_level(normalizer={"type": "NFKC"}), "it normalizes texts by NFKC"),
    "around": (lambda: byte_level(post_processor=template((["</s>"], []), {"</s>": 1})), r"it puts \[1\] before"),
    "spaces": (lambda: ranked(pre_tokenizer=metaspace("always"), with_literals=True), "<tool> .* have other ids"),
    "ends": (lambda: ends(frozenset({0, 2, 3})), "3 tokens end a text besides its eos"),
    "lowercase": (lambda: ranked({"type": "Lowercase"}), "it prepares texts by Lowercase"),
    "Chinese": (lambda: word_piece(handle_chinese_chars=False), "it prepares texts unlike BERT"),
    "no bytes": (lambda: ranked(PREPEND, byte_fallback=False), "neither the letters nor the pieces of bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_says_why(name: str) -> None:
    make, problem = REFUSED[name]
    made = make()
    with pytest.raises(CheckpointError, match=f"^tokenizer: GGUF cannot express it: .*{problem}") as caught:
        metadata_of(made)
    assert "\n" not in str(caught.value)
    assert gguf.to_metadata(made) is None


def test_three_tokens_may_end_a_text() -> None:
    made = ends(frozenset({0, 2}))
    assert made.specials.ends == {0, 1, 2}
    found = gguf.to_metadata(made)
    assert found is not None
    assert [found[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot", "eom")] == [1, 0, 2]
    assert gguf.from_metadata(found).specials.ends == {0, 1, 2}


# --- What only qkv reads ----------------------------------------------------------------------------------------------


def test_spaces_after_control_tokens_have_a_key_of_our_own() -> None:
    made, again = both("ranked merges, first space")
    assert isinstance(again, SentencePieceTokenizer)
    keys = {f"tokenizer.qkv.space_{where}" for where in ("after_control", "before_space")}
    assert {key for key, value in metadata_of(made).items() if value is False} >= keys
    assert keys.isdisjoint(metadata_of(both("ranked merges")[0]))
    start, after = again.encode("<s>the", parse_special=True), again.encode("the")
    assert start[0] == after[0] == again.specials.bos
    assert start != after, "a text at the very start has a space before it, one behind a control token has none"


@pytest.mark.parametrize(("last", "kept"), [("[PAD261]", 261), ("[PAD9]", 262)])
def test_fillers_at_the_end_are_no_tokens(last: str, kept: int) -> None:
    texts = [*tiny_gguf()["tokenizer.ggml.tokens"], last]
    assert len(texts) == 262
    tokenizer = gguf.from_metadata(tiny_gguf(tokens=texts, token_type=[1] * 259 + [3, 4, 5]))
    assert tokenizer.vocab_size == kept
