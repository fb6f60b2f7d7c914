"""How byte-level BPE vocabularies of published models cut a text into words, by the names that GGUF files use.

Merges never cross the border of a word, so a wrong cut gives wrong ids. Each name stands for patterns that are applied
in turn: what one matches is a word, and what lies between its matches is left to the next one. They are those of the
models' own tokenizer.json files, written for Oniguruma, the engine of the library.
"""

from __future__ import annotations

from typing import NamedTuple

from qkv.errors import CheckpointError

_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"

# Letters with case as DeepSeek counts them: without the blocks that Unicode added or paired later.
_CASED = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}"
    r"\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}"
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}"
    r"\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}"
    r"\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}"
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}"
    r"\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}"
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}"
    r"\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}"
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}"
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}"
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)


def _words(letters: str, digits: str, after_marks: str = r"[\r\n]*") -> str:
    """The pattern of GPT-4 and its heirs: a word takes one character before it along, digits stand in groups."""
    return rf"{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_marks}|{_SPACES}"


def _by_case(ending: str) -> str:
    """Words that end where an upper-case letter follows a lower-case one."""
    return rf"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"


_PLAIN = rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+"


class PreTokenizer(NamedTuple):
    """Patterns, and what else the name says about a vocabulary."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is in the vocabulary is one token, even if no merges lead there."""
    add_bos: bool = False
    add_sep: bool = False
    """Texts stand between BOS and EOS, and a pair has two separators between them, as in RoBERTa."""


_LLAMA3 = (_words(_PLAIN, r"\p{N}{1,3}"),)
_QWEN2 = (_words(_PLAIN, r"\p{N}"),)
_GPT4O = (_words(_by_case(f"{_SUFFIXES}?"), r"\p{N}{1,3}", r"[\r\n/]*"),)
_TEKKEN = (_words(_by_case(""), r"\p{N}", r"[\r\n/]*"),)
_DIGITS_FIRST = (r"\p{N}", _GPT2)
_PUNCTUATION_FIRST = r"[\p{P}$+<=>^~|`]+"

_GROUPS: list[tuple[str, PreTokenizer]] = [
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion "
        "granite-docling exaone4",
        PreTokenizer((_GPT2,)),
    ),
    ("roberta-bpe jina-v1-en jina-v2-code", PreTokenizer((_GPT2,), add_sep=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe glm4", PreTokenizer(_LLAMA3)),
    ("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer(_QWEN2)),
    (
        "qwen35",
        PreTokenizer(
            (rf"{_SUFFIXES}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
        ),
    ),
    ("gpt-4o llama4 kanana2", PreTokenizer(_GPT4O)),
    ("tekken", PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer(_DIGITS_FIRST)),
    ("falcon", PreTokenizer((_PUNCTUATION_FIRST, _GPT2, r"[0-9][0-9][0-9]"))),
    ("default", PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("bloom gpt3-finnish poro-chat", PreTokenizer((_SENTENCES,))),
    ("viking", PreTokenizer((_SENTENCES, r"\p{N}"))),
    (
        "deepseek-coder",
        PreTokenizer(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+", r"\p{N}")
        ),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
                r"\s+$",
                r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-v3 hunyuan-dense",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
            )
        ),
    ),
]

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: one for names, one in _GROUPS for name in names.split()}


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """The cut of that name; an unknown one is refused, since any other would give wrong ids."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(f"{where}: unknown pre-tokenizer {name!r}; this qkv knows {known}")
    return PRE_TOKENIZERS[name]
