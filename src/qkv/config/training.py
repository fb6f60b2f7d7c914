"""Training choices as data: what a model is taught, how its weights are moved, and how far at each step.

    objective    which tokens are hidden, which are targets            `qkv.train.objectives`
    optimizer    from gradients to a step                              `qkv.train.optimizers`
    schedule     the learning rate of step 1, 2, ... `run.steps`       `qkv.train.schedule`

Steps are optimizer steps, counted from 1, however many micro-batches each is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from qkv.config.base import Config, NonNegative, Positive, PositiveFloat, Probability, Problem, Variant
from qkv.config.head import Classifier, Head, MaskedLanguageModel, Span, TokenClassifier
from qkv.config.model import ModelConfig
from qkv.config.position import NoPositions, Rotary

Share = Annotated[float, Field(gt=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Betas = Annotated[tuple[Probability, Probability], Field(strict=False)]
Format = Literal["text", "jsonl", "parallel", "chat", "labelled", "tagged", "questions", "preferences"]


# Objectives


class Objective(Variant):
    """The union of what a model can be taught: which tokens it sees, and which it must give."""

    formats: ClassVar[tuple[Format, ...]] = ("text", "jsonl")
    """The data that it can be made from."""
    heads: ClassVar[tuple[type[Head], ...]] = ()
    """The heads that answer it; empty: those that predict the next token."""
    translates: ClassVar[bool] = False
    """Whether an example is two texts, one for the encoder and one for the decoder."""
    vocabulary: ClassVar[Literal["texts", "frames", "pairs", "spans"]] = "texts"
    """Which control tokens it needs of a vocabulary that is learned for it (`qkv.text.training`)."""
    in_a_row: ClassVar[bool] = False
    """Whether a decoder alone may read these two texts one after the other."""

    balance: Weight = 0.01
    """Multiplies the loss that keeps experts equally busy (Fedus 2021, arXiv 2101.03961, equation 4: 0.01); a model
    without experts has no such loss."""

    def misfits(self, model: ModelConfig) -> Iterator[Problem]:
        """Why this architecture cannot be taught this; each with its path below the model's config."""
        head = model.head
        if not (isinstance(head, self.heads) if self.heads else head.reads == "past"):
            kinds = [kind for kind, member in Head.kinds().items() if self._answered_by(member)]
            yield "head", f"objective {self.kind!r} is answered by {' or '.join(map(repr, kinds))}, not {head.kind!r}"
        if self.translates and len(model.stacks) < 2 and not (self.in_a_row and model.encoder is None):
            (name,) = model.stacks
            yield "", f"objective {self.kind!r} needs an encoder and a decoder, but this model has only {_a(name)}"
        if not self.translates and len(model.stacks) > 1:
            yield "", f"objective {self.kind!r} has one text, but this model's encoder waits for another"

    def _answered_by(self, head: type[Variant]) -> bool:
        return issubclass(head, self.heads) if self.heads else issubclass(head, Head) and head.reads == "past"


def _a(stack: str) -> str:
    return "an encoder" if stack == "encoder" else "a decoder"


class TokenLoss(Config):
    """The loss of objectives whose targets are tokens: cross-entropy against softened targets, plus a penalty."""

    smoothing: Probability = 0.0
    """This share of each target is spread evenly over the whole vocabulary (Szegedy 2015; Vaswani 2017: 0.1)."""
    z_loss: Weight = 0.0
    """Multiplies the squared log of the softmax's denominator, which keeps logits small (Chowdhery 2022: 1e-4)."""


class NextToken(TokenLoss, Objective):
    """Each token from those before it (Radford 2018, GPT, equation 1)."""

    kind: Literal["next-token"] = "next-token"
    formats = ("text", "jsonl", "chat")
    memory: NonNegative = 0
    """How many tokens of the segments before each layer still sees, without gradient (Dai 2019, Transformer-XL); above
    0 the texts are read as contiguous streams, one per row of the batch."""

    def misfits(self, model: ModelConfig) -> Iterator[Problem]:
        yield from super().misfits(model)
        if self.memory:
            yield from _unremembered(model)


def _unremembered(model: ModelConfig) -> Iterator[Problem]:
    """What of a model would mean something else where it looks at the layers' inputs of earlier segments."""
    embedded = model.embedding.positions
    if not isinstance(embedded, NoPositions):
        yield (
            "embedding.positions",
            f"{embedded.kind!r} numbers each segment anew, so that a memory has the same numbers; set it to "
            "{ kind = 'none' }, and attention.positions to a kind that counts distances, or set objective.memory to 0",
        )
    for block in () if model.decoder is None else dict.fromkeys(model.decoder.blocks):
        fields = block.attention.pattern.fields & {"prefix_length", "is_global", "length"}
        if fields:
            kind = block.attention.pattern.kind
            yield "decoder", f"pattern {kind!r} is about whole rows, not the end of one; set objective.memory to 0"
        positions = block.attention.positions
        if isinstance(positions, Rotary) and positions.scaling.reads_length:
            kind = positions.scaling.kind
            yield "decoder", f"scaling {kind!r} turns by the length of the text read so far; set objective.memory to 0"


class Masked(TokenLoss, Objective):
    """Tokens that were hidden, from both sides (Devlin 2018, BERT, section 3.1).

    Of the chosen tokens `mask` become the mask token and `random` a random one; the rest stay as they are, and are
    targets too. Special tokens and padding are never chosen.
    """

    kind: Literal["masked"] = "masked"
    heads = (MaskedLanguageModel,)
    vocabulary = "frames"
    share: Share = 0.15
    """How many of a row's tokens are chosen."""
    mask: Annotated[float, Field(ge=0, le=1)] = 0.8
    random: Annotated[float, Field(ge=0, le=1)] = 0.1
    whole_word: bool = False
    """Whether all pieces of a word are chosen together (the 2019 release of BERT)."""
    next_sentence: bool = False
    """Whether a row is two pieces of text, and the model also says whether the second follows the first: class 0 if
    it does. Half of the pairs do."""

    def problems(self) -> Iterator[Problem]:
        if self.mask + self.random > 1 + 1e-9:  # 0.7 + 0.3 may be a hair above 1
            yield "random", f"mask and random share the chosen tokens: {self.mask} + {self.random} exceed 1"

    def misfits(self, model: ModelConfig) -> Iterator[Problem]:
        yield from super().misfits(model)
        if self.next_sentence and isinstance(model.head, MaskedLanguageModel) and not model.head.next_sentence:
            yield "head.next_sentence", "decides which sentence is next: set it to true, or leave out the objective's"
        if self.next_sentence and model.embedding.n_segments < 2:
            count = model.embedding.n_segments
            yield "embedding.n_segments", f"next_sentence tells two segments apart: needs 2 or more, got {count}"


class SpanCorruption(TokenLoss, Objective):
    """Spans give way to one sentinel each; the decoder writes each span after its sentinel (Raffel 2019, 3.1.4)."""

    kind: Literal["span-corruption"] = "span-corruption"
    translates = True
    vocabulary = "spans"
    density: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """How many of a text's tokens lie in spans."""
    mean_length: Annotated[float, Field(ge=1)] = 3.0
    """Tokens per span, on average."""


class PrefixLM(TokenLoss, Objective):
    """Each token of a text's end, from those before it; the start is seen from both sides (Raffel 2019, 3.2.1)."""

    kind: Literal["prefix"] = "prefix"
    share: Share = 1.0
    """The prefix's length is drawn evenly between 1 token and this share of the row; one target at least remains."""


class Seq2Seq(TokenLoss, Objective):
    """Each token of the target from the source and the target so far (Sutskever 2014; Vaswani 2017).

    A decoder alone reads the source, and then the target behind it (Liu 2018): such rows have twice `data.context`.
    """

    kind: Literal["seq2seq"] = "seq2seq"
    formats = ("parallel",)
    translates = in_a_row = True
    vocabulary = "pairs"
    smoothing: Probability = 0.1


class Answers(TokenLoss, Objective):
    """Each token of the assistant's turns in a conversation; the other turns are only read (Ouyang 2022, 3.1)."""

    kind: Literal["answers"] = "answers"
    formats = ("chat",)


class Classify(Objective):
    """The class of a text, or of a pair of texts (Radford 2018, section 3.2; Devlin 2018, section 4.1)."""

    kind: Literal["classify"] = "classify"
    formats = ("labelled",)
    heads = (Classifier,)
    vocabulary = "frames"


class Tag(Objective):
    """The class of each word, read at its first piece (Devlin 2018, section 5.3: named entities)."""

    kind: Literal["tag"] = "tag"
    formats = ("tagged",)
    heads = (TokenClassifier,)
    vocabulary = "frames"


class FindSpan(Objective):
    """Where a text answers a question: first and last token (Devlin 2018, section 4.2)."""

    kind: Literal["span"] = "span"
    formats = ("questions",)
    heads = (Span,)
    vocabulary = "frames"


class Prefer(Objective):
    """The answer that was chosen rather than the one that was rejected (Rafailov 2023, DPO, arXiv 2305.18290)."""

    kind: Literal["dpo"] = "dpo"
    formats = ("preferences",)
    translates = in_a_row = True
    vocabulary = "pairs"
    beta: PositiveFloat = 0.1
    """How dearly the model pays for leaving what it was at the start: less allows more (section 6: 0.1 to 0.5)."""


Objective.members = (NextToken, Masked, SpanCorruption, PrefixLM, Seq2Seq, Answers, Classify, Tag, FindSpan, Prefer)


# Optimizers


class Optimizer(Variant):
    """The union of ways to move the weights against their gradients. The rate of a step is the schedule's."""

    weight_decay: Weight = 0.1
    """A step also takes rate * weight_decay * weight off (decoupled; Loshchilov and Hutter 2017, arXiv 1711.05101).
    Matrices decay; norms, biases, relative position tables and other vectors never do."""
    decay_embeddings: bool = True
    """Whether the tables of tokens, positions and segments decay too (BERT, GPT-2: yes; OLMo 2: no)."""


class AdamW(Optimizer):
    """Gradients averaged and divided by their running root mean square (Kingma 2014; Loshchilov and Hutter 2017)."""

    kind: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)
    """How much of the averages of gradients and of squared gradients is kept (Brown 2020; Vaswani 2017: 0.9, 0.98)."""
    eps: PositiveFloat = 1e-8
    """Added to the root; Vaswani 2017: 1e-9."""


class Adafactor(Optimizer):
    """Adam whose squared gradients are kept as one row and one column per matrix (Shazeer and Stern 2018, 1804.04235).

    Algorithms 4 and 5, without first moment. Stacked experts are matrices each on its own. The paper's relative step
    size, min(1e-2, 1/sqrt(t)), is the schedule `inverse-sqrt` as it stands.
    """

    kind: Literal["adafactor"] = "adafactor"
    weight_decay: Weight = 0.0
    relative_step: bool = True
    """Whether the rate is a share of the weights' own size: a step is rate * max(min_scale, RMS(weights)) * update."""
    factored: bool = True
    """Whether matrices keep a row and a column; otherwise every element, as vectors always do."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The average of squares keeps 1 - t^-decay at step t (section 7.2)."""
    clip: PositiveFloat = 1.0
    """An update whose root mean square is larger is scaled down to it (section 6)."""
    eps: PositiveFloat = 1e-30
    """Added to squared gradients."""
    min_scale: PositiveFloat = 1e-3
    """The least size that weights count as, so that what starts at 0 can move."""


class Lion(Optimizer):
    """The sign of an average of gradients (Chen 2023, arXiv 2302.06675, algorithm 2).

    Every weight moves by the whole rate, so rates are 3 to 10 times smaller than AdamW's, and decay larger by as much.
    """

    kind: Literal["lion"] = "lion"
    betas: Betas = (0.9, 0.99)
    """How much of the average counts in the step, and how much of it is kept."""


class Muon(Optimizer):
    """Momentum whose singular values are all set near 1, for hidden matrices; AdamW for the rest (Jordan 2024).

    Hidden are the projections of attention and of feed-forward networks, each expert's on its own. The quintic
    Newton-Schulz iteration brings singular values to between 0.7 and 1.2.
    """

    kind: Literal["muon"] = "muon"
    momentum: Probability = 0.95
    nesterov: bool = True
    iterations: Positive = 5
    """Of Newton and Schulz."""
    bf16: bool = False
    """Whether the iterations run in bfloat16, as in the author's code: 5 times faster where bfloat16 products are."""
    scale: Literal["rms", "aspect"] = "rms"
    """What multiplies a step: `rms` is 0.2 sqrt(max(rows, columns)), as large as AdamW's steps are, so that one rate
    serves both (Liu 2025, arXiv 2502.16982, equation 4); `aspect` is sqrt(max(1, rows / columns)) (Jordan 2024)."""
    other_rate: PositiveFloat = 1.0
    """The rate of the rest is this times the schedule's (Jordan 2024, with `aspect`: 0.02 and 3e-4, so 0.015)."""
    betas: Betas = (0.9, 0.95)
    """Of the rest, as in AdamW."""
    eps: PositiveFloat = 1e-8
    """Of the rest, as in AdamW."""


Optimizer.members = (AdamW, Adafactor, Lion, Muon)


# Schedules


class Schedule(Variant):
    """The union of learning rates as functions of the step."""


class Warm(Config):
    """What schedules with a peak begin with: a line from 0, which it would have at step 0, to the peak."""

    peak: PositiveFloat
    """The largest rate."""
    warmup: NonNegative = 0
    """The step at which the peak is reached (Goyal 2017, section 2.2); with 0 the first step has it already."""


class Decaying(Warm):
    """What schedules that fall to an end have."""

    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate of the last step, as a share of the peak."""


class Noam(Schedule):
    """factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani 2017, equation 3)."""

    kind: Literal["noam"] = "noam"
    factor: PositiveFloat = 1.0
    warmup: Positive = 4000


class Cosine(Decaying, Schedule):
    """After the warm-up half a cosine down to the floor (Loshchilov and Hutter 2016, equation 5; Brown 2020: 0.1)."""

    kind: Literal["cosine"] = "cosine"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1


class WSD(Decaying, Schedule):
    """Warm-up, a long stable stretch at the peak, and a short decay (Hu 2024, MiniCPM, arXiv 2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay: Share = 0.1
    """The share of all steps, at the end, in which the rate falls."""
    shape: Literal["linear", "sqrt", "exponential"] = "linear"
    """How it falls with the share x of the decay that is done: as 1 - x, as 1 - sqrt(x) (Hagele 2024, arXiv
    2405.18392), or as floor^x (Hu 2024)."""

    def problems(self) -> Iterator[Problem]:
        if self.shape == "exponential" and not self.floor:
            yield "floor", "an exponential never reaches 0: set a floor above 0"


class Linear(Decaying, Schedule):
    """After the warm-up a straight line down to the floor (Devlin 2018, appendix A.2)."""

    kind: Literal["linear"] = "linear"


class InverseSqrt(Schedule):
    """peak until step `hold`, then peak * sqrt(hold / step) (Shazeer 2018, Adafactor; Raffel 2019, section 3.1.2).

    As it stands, min(1e-2, 1/sqrt(step)).
    """

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    peak: PositiveFloat = 1e-2
    hold: Positive = 10_000


class ConstantRate(Warm, Schedule):
    """The peak, from the end of the warm-up on."""

    kind: Literal["constant"] = "constant"


Schedule.members = (Noam, Cosine, WSD, Linear, InverseSqrt, ConstantRate)
