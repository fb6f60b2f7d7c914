"""A training run as data: one file from which the run can be made, and made again.

    [model]      preset = "gpt2"                        or `config`, or `checkpoint`
    [data]       train = ["shakespeare.txt"]
                 context = 64
    [objective]  kind = "next-token"
    [optimizer]  kind = "adamw"
    [schedule]   kind = "cosine"
                 peak = 1e-3
    [run]        steps = 2000
                 batch = 12
                 folder = "runs/shakespeare"

Paths of files are as the shell would take them: relative to the folder in which the command is run.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from qkv.config.base import Config, NonNegative, Positive, PositiveFloat, Probability, Problem, Tuple
from qkv.config.model import ModelConfig
from qkv.config.parallel import Parallel
from qkv.config.position import Learned
from qkv.config.presets import preset
from qkv.config.training import AdamW, Format, Lion, Masked, NextToken, Objective, Optimizer, Schedule, Seq2Seq
from qkv.errors import ConfigError

Seed = Annotated[int, Field(ge=0, lt=2**63)]
_OVERRIDES = "model.overrides."


def _dotted(value: Any, prefix: str = "") -> Any:
    """Nested tables as one table of dotted paths: in TOML `decoder.n_layers = 4` is a table in a table.

    A table with a `kind` is a value: a member of a union is replaced whole.
    """
    if not isinstance(value, Mapping):
        return value
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, Mapping) and "kind" not in inner:
            flat |= _dotted(inner, f"{path}.")
        else:
            flat[path] = inner.to_dict() if isinstance(inner, Config) else inner
    return flat


class ModelSource(Config):
    """Where the model comes from: exactly one of `preset`, `config` and `checkpoint`."""

    preset: str | None = None
    """The name of a published architecture; its weights start at random."""
    config: ModelConfig | None = None
    """An architecture written out; its weights start at random."""
    checkpoint: str | None = None
    """A folder, a file or a name that `qkv.load` takes; training goes on from its weights."""
    overrides: Annotated[dict[str, Any], BeforeValidator(_dotted), Field(default_factory=dict)]
    """What of the architecture is changed: dotted paths and their values, as in `ModelConfig.override`. Of a checkpoint
    only the head can be, to finetune for another task: `head = { kind = "classifier", n_classes = 2 }`."""
    seed: Seed = 0
    """Of the random weights."""

    def problems(self) -> Iterator[Problem]:
        given = [name for name in ("preset", "config", "checkpoint") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            yield "", f"needs exactly one of preset, config and checkpoint, got {got}"
            return
        try:
            written = self._written
        except ConfigError as error:
            yield "preset", str(error)
            return
        if written is not None:
            yield from _override_problems(written, self.overrides)
        elif others := [path for path in self.overrides if path.partition(".")[0] != "head"]:
            what = "a checkpoint has the architecture that it was trained with, but for its head: leave it out"
            yield f"overrides.{others[0]}", what

    @property
    def architecture(self) -> ModelConfig | None:
        """The model's config with its overrides; None where it stands in a checkpoint."""
        written = self._written
        return None if written is None else written.override(self.overrides)

    @property
    def _written(self) -> ModelConfig | None:
        return self.config if self.preset is None else preset(self.preset)


def _override_problems(config: ModelConfig, changes: Mapping[str, Any]) -> Iterator[Problem]:
    try:
        config.override(changes)
    except ConfigError as error:
        first, *listed = str(error).split("\n  ")
        for line in listed or [first]:
            path, _, what = line.partition(": ")
            yield ("overrides" if path == "config" else f"overrides.{path}"), what


class DataSource(Config):
    """The texts, and the rows that are made of them."""

    train: Tuple[str]
    """Sources to train on: files, `one.de::one.en` (two files, line by line), or `datasets:NAME` of that library."""
    valid: Tuple[str] = ()
    """Sources to be tested on; without them a part of the training texts is held out."""
    format: Format = "text"
    """`text`: plain text; `jsonl`: an object per line; `parallel`: pairs of texts; `chat`: a conversation per line;
    `labelled`, `tagged`, `questions`, `preferences`: an object per line with a class, with classes of words, with a
    question and the place of its answer, or with two answers to a prompt (`qkv.train.data.labels`)."""
    field: str = "text"
    """Of `jsonl`: the field that holds the text. Of `parallel`: the columns of source and target, by default `1,2`."""
    separator: str | None = None
    """Of `text`: lines equal to it stand between documents, "" for blank lines; without it a file is one document."""
    context: Positive
    """Tokens per row."""
    documents: bool = False
    """Whether several texts are packed into one row, each blind to the others; otherwise rows are windows of one long
    stream of texts."""
    valid_share: Probability = 0.1
    """How much of the training texts is held out where `valid` is empty."""

    def problems(self) -> Iterator[Problem]:
        if not self.train:
            yield "train", "needs at least one file"
        if self.separator is not None and self.format != "text":
            yield "separator", f"records of {self.format!r} data are parted already: leave it out"
        if self.documents and self.format not in ("text", "jsonl", "chat"):
            yield "documents", f"rows of {self.format!r} data hold one example each: leave it out"


class Run(Config):
    """How long, on what, and what is kept."""

    steps: Positive
    """Optimizer steps."""
    batch: Positive
    """Rows per step."""
    micro_batch: Positive | None = None
    """Rows per forward pass, where a whole batch needs too much memory; the gradient is that of the whole batch."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the products; weights and optimizer stay in fp32. fp16 scales the loss against underflow."""
    seed: Seed = 0
    """Of the data's order, of dropout, and of what objectives draw."""
    device: str = "auto"
    """`auto` takes a GPU if there is one."""
    compile: bool = False
    """Whether blocks are compiled: a minute at the start, then faster steps."""
    checkpoint_activations: bool = False
    """Whether activations are computed again in the backward pass rather than kept: a third more time, less memory."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """A gradient with a larger norm is scaled down to it (Pascanu 2012); 0 leaves every gradient as it is."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """If given, an average of the weights is kept that takes over 1 - ema of them at each step."""
    average_last: NonNegative = 0
    """How many of the last checkpoints are averaged at the end (Vaswani 2017, section 6.1: 5); 0: none."""
    eval_every: NonNegative = 0
    """Steps between two evaluations; 0: at the end only."""
    save_every: NonNegative = 0
    """Steps between two checkpoints; 0: at the end only."""
    keep: Positive = 2
    """How many checkpoints stay; older ones are deleted."""
    sample_every: NonNegative = 0
    """Steps between two texts written by the model; 0: none."""
    folder: str
    """Where everything that the run writes goes."""

    def problems(self) -> Iterator[Problem]:
        if self.micro_batch is not None and self.micro_batch > self.batch:
            yield "micro_batch", f"must be at most batch ({self.batch}), got {self.micro_batch}"
        if self.average_last > self.keep:
            yield "keep", f"must be at least average_last ({self.average_last}), got {self.keep}"
        if self.average_last > 1 and not self.save_every:
            yield "save_every", f"without checkpoints on the way there are no {self.average_last} to average"
        if self.average_last and self.ema is not None:
            yield "average_last", "the final model is either this mean or that of ema: leave out one of them"


class Lora(Config):
    """Small matrices that learn beside frozen ones: W x + (alpha / rank) B A x (Hu 2021, arXiv 2106.09685)."""

    rank: Positive = 8
    alpha: PositiveFloat = 16.0
    dropout: Probability = 0.0
    targets: Tuple[str] = ("q_proj", "v_proj")
    """The names of the linear layers, or patterns of whole names (`decoder.layers.*.ffn.up_proj`)."""
    rslora: bool = False
    """Whether the factor is alpha / sqrt(rank) (Kalajdzievski 2023)."""
    base: Literal["as-is", "int8", "int4"] = "as-is"
    """Whether the frozen matrices beside adapters are kept as codes of 8 or 4 bits (Dettmers 2023, QLoRA)."""

    def problems(self) -> Iterator[Problem]:
        if not self.targets:
            yield "targets", "needs at least one name, such as q_proj"


class Log(Config):
    """Where the figures of a run go, besides the JSON lines in its folder."""

    tensorboard: bool = False
    wandb: bool = False


class Recipe(Config):
    """One training run."""

    model: ModelSource
    tokenizer: str = "bytes"
    """`bytes`; `checkpoint`: that of `model.checkpoint`; `train-bpe:4096`: learned from the training texts, with so
    many entries, the control tokens that the objective needs among them; anything else is a file or folder that holds
    one."""
    data: DataSource
    objective: Objective = NextToken()
    optimizer: Optimizer = AdamW()
    schedule: Schedule
    run: Run
    lora: Lora | None = None
    """If given, adapters learn and the model's own weights stay."""
    parallel: Parallel = Parallel()
    """How the processes that torchrun starts share the work; one process does all of it."""
    log: Log = Log()

    def problems(self) -> Iterator[Problem]:
        yield from self._tokenizer_problems()
        if self.data.format not in self.objective.formats:
            wanted = " or ".join(map(repr, self.objective.formats))
            yield "data.format", f"objective {self.objective.kind!r} needs {wanted}, got {self.data.format!r}"
        yield from self._parallel_problems()
        if self.lora is not None and self.run.average_last:
            yield "run.average_last", "averages whole models, and with lora only adapters learn: leave it out"
        if isinstance(self.objective, Masked) and self.objective.next_sentence and self.data.documents:
            yield "data.documents", "objective.next_sentence packs two texts into a row itself: leave it out"
        if isinstance(self.objective, NextToken) and self.objective.memory and self.data.documents:
            yield "data.documents", "objective.memory is of one text, read in order: leave out the one or the other"
        model = self.model.architecture
        if model is not None:
            yield from self.misfits(model)

    def misfits(self, model: ModelConfig) -> Iterator[Problem]:
        """Why this model cannot be trained so, with the recipe's own paths."""
        for path, what in self.objective.misfits(model):
            yield (f"{_OVERRIDES}{path}" if path else "model"), what
        yield from ((f"parallel.{path}", what) for path, what in self.parallel.misfits(model))
        in_a_row = isinstance(self.objective, Seq2Seq) and len(model.stacks) == 1
        most = model.max_seq_len // 2 if in_a_row else model.max_seq_len
        if isinstance(model.embedding.positions, Learned) and self.data.context > most:
            what = "the positions that the model can learn" + (", for source and target each" if in_a_row else "")
            yield "data.context", f"must be at most {most}, {what}, got {self.data.context}"

    def _parallel_problems(self) -> Iterator[Problem]:
        parallel, run = self.parallel, self.run
        if run.compile and parallel.tensor * parallel.context > 1:
            yield "run.compile", "blocks divided by parallel.tensor or parallel.context are not compiled: leave it out"
        if parallel.splits_weights:
            remedy = "divided weights (parallel.data = 'fsdp', or parallel.tensor) do not go with it: "
            if run.precision == "fp16":
                yield "run.precision", remedy + "take bf16"
            if run.average_last:
                yield "run.average_last", remedy + "take run.ema"
            if self.lora is not None:
                yield "lora", remedy + "take 'ddp'"
            if not isinstance(self.optimizer, AdamW | Lion):
                yield "optimizer.kind", remedy + f"{self.optimizer.kind!r} needs whole matrices; take adamw or lion"
        if parallel.tensor > 1 and run.sample_every:
            yield "run.sample_every", "the memory of a text is not divided by parallel.tensor: set it to 0"

    def _tokenizer_problems(self) -> Iterator[Problem]:
        if self.tokenizer == "checkpoint" and self.model.checkpoint is None:
            yield "tokenizer", "'checkpoint' is that of model.checkpoint, which is not given"
        if self.tokenizer.startswith("train-") and self.entries is None:
            yield "tokenizer", f"expected 'train-bpe:' and a number of entries above 256, got {self.tokenizer!r}"

    @property
    def entries(self) -> int | None:
        """How many entries a tokenizer has that is still to be learned; None where it is given."""
        size = re.fullmatch(r"train-bpe:([0-9]{1,7})", self.tokenizer)
        return int(size[1]) if size is not None and int(size[1]) > 256 else None

    @classmethod
    def read(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Self:
        """The recipe of a TOML file, with the values at dotted paths replaced. Errors name the file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{path}: {what}; give the path of a recipe, a TOML file") from None
        try:
            return cls.from_toml(text).override(changes or {})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def override(self, changes: Mapping[str, Any]) -> Self:
        """As in every config; what follows `model.overrides.` is a path of the architecture, and joins the others."""
        others = {path: value for path, value in changes.items() if not path.startswith(_OVERRIDES)}
        ours = {path.removeprefix(_OVERRIDES): value for path, value in changes.items() if path.startswith(_OVERRIDES)}
        if ours:
            before = others.get("model.overrides", self.model.overrides)
            others["model.overrides"] = {**_dotted(before), **_dotted(ours)}
        return super().override(others)


def assignments(texts: Sequence[str]) -> dict[str, Any]:
    """`path=value` as on a command line, as changes for `Recipe.override`.

    A value is read as in TOML (`1e-3`, `true`, `["a.txt"]`, `{kind = "lion"}`), and is a plain string where that fails;
    `none` takes a value away. A path may come once.
    """
    changes: dict[str, Any] = {}
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not path or not equals:
            raise ConfigError(f"{text!r}: expected path=value, as in run.steps=100")
        if path in changes:
            raise ConfigError(f"{path}: set twice; give one value")
        changes[path] = None if value == "none" else _literal(value)
    return changes


def _literal(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if table.keys() == {"value"} else text
