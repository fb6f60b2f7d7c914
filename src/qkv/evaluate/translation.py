"""Translation: BLEU (Papineni 2002) and chrF (Popovic 2015) of what an encoder-decoder makes of held-out sentences.

Both are computed by `sacrebleu` (Post 2018, arXiv 1804.08771) and come with its signature, since figures of other
tokenisations, cases or numbers of references cannot be compared. A sentence that stands in the data with several
translations is translated once, and has them all as references.

Papers on English-German from 2017 on often split compounds at their hyphens in both texts before counting
(`split_compounds`: "bottom-up" counts as three words), which raises BLEU; the signature then says `compounds:split`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from qkv.config.decoding import Beam, Greedy
from qkv.errors import DataError
from qkv.model import TextModel

TOKENIZERS = ("13a", "intl", "zh", "char", "none")
"""Those of sacrebleu that need no further package: 13a for most languages, zh for Chinese."""
_BATCH = 16  # sentences that are translated together
_HYPHEN = re.compile(r"(?<=\S)-(?=\S)")


@dataclass(frozen=True)
class Sentence:
    """What is to be translated, and how people did."""

    source: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Metric:
    """A figure and how it was counted."""

    score: float
    """0 to 100."""
    signature: str
    """sacrebleu's: the options that another figure must share to be compared."""


@dataclass(frozen=True)
class Translated:
    """How well a model translates."""

    bleu: Metric
    chrf: Metric
    sentences: int
    references: int
    protocol: str
    """How the translations were searched for, in words."""
    translations: list[str]
    """In the order of the sentences."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


def grouped(pairs: Iterable[tuple[str, str]]) -> list[Sentence]:
    """Pairs of a sentence and a translation as sentences with all their translations, in the order of the first."""
    found: dict[str, dict[str, None]] = {}
    for source, target in pairs:
        found.setdefault(source, {})[target] = None
    return [Sentence(source, tuple(targets)) for source, targets in found.items()]


def translate(
    lm: TextModel,
    sources: Sequence[str],
    decoding: Greedy | Beam | None = None,
    *,
    max_new_tokens: int = 256,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """The model's translation of each source; those of similar length are made together."""
    if lm.model.encoder is None or lm.model.decoder is None:
        raise DataError("model: translating needs an encoder-decoder, and this model has one stack")
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    texts = [""] * len(sources)
    for start in range(0, len(order), _BATCH):
        part = order[start : start + _BATCH]
        made = lm.generate([sources[i] for i in part], max_new_tokens, decoding=decoding or Greedy())
        for i, one in zip(part, made, strict=True):
            texts[i] = one.text.strip()
        if progress is not None:
            progress(start + len(part))
    return texts


def bleu_and_chrf(
    translations: Sequence[str], sentences: Sequence[Sentence], tokenize: str = "13a", *, split_compounds: bool = False
) -> tuple[Metric, Metric]:
    """Both metrics of the translations of these sentences, in their order."""
    metrics = _metrics(tokenize)
    most = max(len(sentence.references) for sentence in sentences)
    streams = [[(*one.references, *[None] * most)[k] for one in sentences] for k in range(most)]
    chrf = metrics.CHRF()
    chrf_score = chrf.corpus_score(list(translations), streams).score
    said = ""
    if split_compounds:
        translations = [_HYPHEN.sub(" - ", text) for text in translations]
        streams = [[None if text is None else _HYPHEN.sub(" - ", text) for text in stream] for stream in streams]
        said = "|compounds:split"
    bleu = metrics.BLEU(tokenize=tokenize)
    bleu_score = bleu.corpus_score(list(translations), streams).score
    return Metric(bleu_score, f"{bleu.get_signature()}{said}"), Metric(chrf_score, str(chrf.get_signature()))


def translation_quality(
    lm: TextModel,
    sentences: Sequence[Sentence],
    decoding: Greedy | Beam | None = None,
    *,
    tokenize: str = "13a",
    split_compounds: bool = False,
    prefix: str = "",
    max_new_tokens: int = 256,
    progress: Callable[[int], None] | None = None,
) -> Translated:
    """BLEU and chrF of the model's translations; `prefix` is put before each source (T5)."""
    if not sentences:
        raise DataError("data: no sentences; give pairs of a source and a translation")
    _metrics(tokenize)  # refused now rather than after an hour
    sources = [prefix + sentence.source for sentence in sentences]
    texts = translate(lm, sources, decoding, max_new_tokens=max_new_tokens, progress=progress)
    bleu, chrf = bleu_and_chrf(texts, sentences, tokenize, split_compounds=split_compounds)
    search = f"beam of {decoding.width}" if isinstance(decoding, Beam) else "greedy"
    references = sum(len(sentence.references) for sentence in sentences)
    return Translated(bleu, chrf, len(texts), references, f"{search}, at most {max_new_tokens} tokens", texts)


def _metrics(tokenize: str) -> Any:
    """The library; asked for only here."""
    if tokenize not in TOKENIZERS:
        raise DataError(f"tokenize: {tokenize!r}: choose one of {', '.join(TOKENIZERS)}")
    try:
        return import_module("sacrebleu.metrics")
    except ImportError:
        raise DataError("BLEU and chrF need the library sacrebleu; install it with: pip install 'qkv[eval]'") from None
