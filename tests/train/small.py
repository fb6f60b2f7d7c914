"""Small models, a small vocabulary, and ragged examples for every objective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import qkv
from qkv.config import (
    AdaptiveSoftmax,
    Bidirectional,
    Block,
    Causal,
    Classifier,
    Dense,
    Embedding,
    Head,
    LanguageModel,
    Learned,
    MaskedLanguageModel,
    ModelConfig,
    MultiHead,
    NoPositions,
    Pattern,
    Prefix,
    PreNorm,
    RMSNorm,
    Span,
    Stack,
    TokenClassifier,
    training,
)
from qkv.config.ffn import FeedForward
from qkv.nn import Transformer
from qkv.text.pieces import Specials
from qkv.train.batch import Batch, Example
from qkv.train.maker import Maker
from qkv.train.objectives import make
from qkv.train.vocabulary import Frame, Vocabulary

SIZE = 64
BOS, EOS, CLS, SEP, MASK, TEXT = 1, 2, 3, 4, 5, 12
SPECIALS = Specials(
    {"<pad>": 0, "<s>": 1, "</s>": 2, "[CLS]": 3, "[SEP]": 4, "[MASK]": 5, "<unk>": 6}
    | {f"<extra_id_{number}>": 11 - number for number in range(5)},
    bos=BOS,
    eos=EOS,
    unk=6,
    pad=0,
    sep=SEP,
    cls=CLS,
    mask=MASK,
)
BARE = Vocabulary(SIZE, SPECIALS)
FRAMED = Vocabulary(SIZE, SPECIALS, Frame((CLS,), (SEP,), (SEP,)), np.arange(SIZE) % 3 == 0)
DENSE = Dense(d_ff=32, activation="gelu")


def layer(pattern: Pattern, ffn: FeedForward, *, crossed: bool = False) -> Block:
    heads = MultiHead(n_heads=2, head_dim=8, pattern=pattern, positions=NoPositions())
    source = heads.override({"pattern": Bidirectional()}) if crossed else None
    return Block(attention=heads, cross_attention=source, ffn=ffn, norm=RMSNorm(), residual=PreNorm())


def config(
    head: Head, kind: str = "decoder", *, pattern: Pattern | None = None, ffn: FeedForward = DENSE
) -> ModelConfig:
    """`kind`: encoder, decoder or both."""
    stacks = {}
    if kind != "decoder":
        stacks["encoder"] = Stack(n_layers=1, layers=(layer(Bidirectional(), ffn),), norm=RMSNorm())
    if kind != "encoder":
        block = layer(pattern or Causal(), ffn, crossed=kind == "both")
        stacks["decoder"] = Stack(n_layers=1, layers=(block,), norm=RMSNorm())
    embedding = Embedding(positions=Learned(), n_segments=2 if kind == "encoder" else 0)
    return ModelConfig(vocab_size=SIZE, d_model=16, max_seq_len=32, embedding=embedding, head=head, **stacks)


def texts(count: int, *, longest: int = 14) -> list[np.ndarray]:
    """Of different lengths, the same in every run."""
    random = np.random.default_rng(count)
    return [random.integers(TEXT, SIZE, size) for size in random.integers(5, longest + 1, count)]


def pairs(count: int) -> list[Example]:
    random = np.random.default_rng(count)
    return [Example(text, random.integers(TEXT, SIZE, random.integers(3, 9))) for text in texts(count)]


def chats(count: int) -> list[Example]:
    random = np.random.default_rng(count)
    return [Example(text, answers=random.random(len(text)) < 0.5) for text in texts(count)]


def packed(count: int) -> list[Example]:
    return [Example(text, documents=np.arange(len(text)) // 4) for text in texts(count)]


def classes(count: int) -> list[Example]:
    return [Example(one.tokens, one.source, labels=np.array(at % 3)) for at, one in enumerate(pairs(count))]


def names(count: int) -> list[Example]:
    """Words of one or two pieces, each with a class."""
    found = []
    for text in texts(count):
        words = np.cumsum(text % 2) - text[0] % 2
        found.append(Example(text, words=words, labels=np.arange(words[-1] + 1) % 3))
    return found


def answered(count: int) -> list[Example]:
    """A question, a passage and the place of the answer; in one, there is none."""
    found = [Example(one.tokens, one.source, labels=np.array([1, at % 3 + 1])) for at, one in enumerate(pairs(count))]
    return [*found[:-1], Example(found[-1].tokens, found[-1].source, labels=np.array([-1, -1]))]


@dataclass(frozen=True)
class Case:
    objective: training.Objective
    model: ModelConfig
    vocabulary: Vocabulary
    examples: list[Example]

    @property
    def maker(self) -> Maker:
        return make(self.objective, self.vocabulary, self.model)

    def batch(self, seed: int = 0) -> Batch:
        return self.maker.batch(self.examples, np.random.default_rng(seed))

    def build(self, dtype: torch.dtype = torch.float64) -> Transformer:
        return qkv.build(self.model, seed=1).to(dtype)


TIED, OWN = LanguageModel(tied=True, softcap=5.0), LanguageModel(tied=False, bias=True)
RARE = AdaptiveSoftmax(cutoffs=(24, 40), divisor=2, tied=False)
SPANS = training.SpanCorruption(density=0.3, mean_length=2.0)
CASES = {
    "next-token": Case(training.NextToken(), config(TIED), BARE, [Example(text) for text in texts(5)]),
    "next-token, packed": Case(training.NextToken(), config(OWN), BARE, packed(5)),
    "next-token, adaptive": Case(training.NextToken(), config(RARE), BARE, [Example(text) for text in texts(5)]),
    "answers": Case(training.Answers(), config(OWN), BARE, chats(5)),
    "prefix": Case(training.PrefixLM(), config(TIED, pattern=Prefix()), BARE, [Example(text) for text in texts(5)]),
    "masked": Case(
        training.Masked(), config(MaskedLanguageModel(), "encoder"), FRAMED, [Example(text) for text in texts(5)]
    ),
    "masked, pairs": Case(
        training.Masked(next_sentence=True, whole_word=True),
        config(MaskedLanguageModel(), "encoder"),
        FRAMED,
        [Example(text) for text in texts(5)],
    ),
    "span-corruption": Case(SPANS, config(TIED, "both"), BARE, [Example(text) for text in texts(5)]),
    "seq2seq": Case(training.Seq2Seq(), config(OWN, "both"), BARE, pairs(5)),
    "seq2seq, one decoder": Case(training.Seq2Seq(), config(TIED, pattern=Prefix()), BARE, pairs(5)),
    "classify": Case(training.Classify(), config(Classifier(n_classes=3), "encoder"), FRAMED, classes(5)),
    "classify, decoder": Case(
        training.Classify(),
        config(Classifier(n_classes=3, pooling="last", hidden="none")),
        BARE,
        [Example(one.tokens, labels=one.labels) for one in classes(5)],
    ),
    "tag": Case(training.Tag(), config(TokenClassifier(n_classes=3), "encoder"), FRAMED, names(5)),
    "span": Case(training.FindSpan(), config(Span(), "encoder"), FRAMED, answered(5)),
}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest absolute deviation over the largest absolute value, of all tensors together."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest
