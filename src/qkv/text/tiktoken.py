"""Files of tiktoken: one token per line, its bytes in base64 and its rank, which is its id.

    IQ== 0
    Ig== 1

Neighbours are joined as long as their joint bytes have a rank, the lowest first (that is byte-level BPE whose merges
are all the ways to make each token). A file says neither how words are cut nor which tokens control: the reader of it
must. Llama 3's `tokenizer.model` and Qwen 1's `qwen.tiktoken` are such files.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qkv.errors import CheckpointError
from qkv.text.decoding import byte_alphabet
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import Specials
from qkv.text.pretokenizers import pre_tokenizer
from qkv.text.spec import BYTE_LEVEL, added_token, bpe, byte_level_bpe, template

# Llama 3 names 256 control tokens in its code; those without a purpose are numbered.
_LLAMA3_FIRST = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|python_tag|>",
]  # fmt: skip
_LLAMA3 = [*_LLAMA3_FIRST, *(f"<|reserved_special_token_{at}|>" for at in range(2, 258 - len(_LLAMA3_FIRST)))]


def is_tiktoken(path: Path) -> bool:
    """Whether a file begins as these files do."""
    with path.open("rb") as file:
        return re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n", file.read(200)) is not None


def read_llama3(path: Path) -> LibraryTokenizer:
    """The `tokenizer.model` of Llama 3: a text begins with <|begin_of_text|>; a text, a message or a turn ends."""
    ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    return read(path, "llama-bpe", _LLAMA3, bos=_LLAMA3[0], ends=ends)


def read(
    path: Path, pre: str, controls: Sequence[str] = (), *, bos: str | None = None, ends: Sequence[str] = ()
) -> LibraryTokenizer:
    """The tokenizer of a file.

    pre: how words are cut, by a name of `pretokenizers`.
    controls: the control tokens; they take the ids behind the last rank. `bos` is put before a text; any of `ends`
    ends one, and the first is its EOS.
    """
    ranks = _ranks(path)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    ids = {text: token for token, text in enumerate(controls, start=len(ranks))}
    spec = {
        "version": "1.0",
        "added_tokens": [added_token(token, text, special=True) for text, token in ids.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level_bpe(pre_tokenizer(pre, str(path)).patterns),
        "post_processor": template(([] if bos is None else [bos], []), ids),
        "decoder": BYTE_LEVEL,
        "model": bpe(
            {text: ranks[token] for token, text in written.items()},
            [[written[left], written[right]] for left, right in _merges(ranks)],
            # A word that is a token is that token, whether or not joins lead there.
            ignore_merges=True,
        ),
    }
    eos = ids[ends[0]] if ends else None
    specials = Specials(ids, bos=ids.get(bos or ""), eos=eos, ends=frozenset(ids[end] for end in ends))
    return LibraryTokenizer(spec, specials, str(path))


def _ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{path}: line {number} is not a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: the ranks are not 0 to {len(ranks) - 1}, each once")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{path}: {len(missing)} of 256 bytes have no rank")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=lambda one: ranks[one]):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        yield from (pair for pair in halves if pair[0] in ranks and pair[1] in ranks)
