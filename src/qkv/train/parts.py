"""From a recipe to the parts of a run: tokenizer, model, examples, and what is asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from qkv.config import Classifier, MaskedLanguageModel, ModelConfig, TokenClassifier
from qkv.config.recipe import Lora, ModelSource, Recipe
from qkv.config.training import Masked, NextToken, Objective, SpanCorruption
from qkv.errors import ConfigError
from qkv.model import TextModel, build, load
from qkv.model.weights import skeleton
from qkv.nn import Transformer
from qkv.text import ByteTokenizer, Tokenizer, tokenizer_from
from qkv.text.folder import read_folder
from qkv.text.training import train_bpe_for
from qkv.train.adapters import add_adapter, quantise_base
from qkv.train.data import (
    CLASSES,
    Contiguous,
    Shards,
    Stream,
    names_beside,
    prepare,
    training_classes,
    training_texts,
)
from qkv.train.loss import Loss
from qkv.train.maker import Maker
from qkv.train.objectives import make
from qkv.train.vocabulary import Vocabulary

TOKENIZER = "tokenizer.json"
_LEARNED = "train-bpe:4096, which learns one for the objective"


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    lm: TextModel
    maker: Maker
    loss: Loss
    train: Shards
    valid: Shards
    memory: int = 0
    """How many tokens of earlier segments the model recalls."""
    classes: tuple[str, ...] = ()
    """The names of the classes, in the order of their numbers, where the data has any."""

    def stream(self, recipe: Recipe) -> Stream | Contiguous:
        """The training examples, from the first on."""
        data, run = recipe.data, recipe.run
        if self.memory:
            return Contiguous(self.train, data.context, run.batch, ahead=self.maker.ahead)
        length = self.maker.raw_length(data.context)
        return Stream(self.train, length, run.batch, run.seed, data.documents, ahead=self.maker.ahead)


def parts_of(recipe: Recipe, *, begun: bool = False, empty: bool = False) -> Parts:
    """Make or open everything; texts are tokenised into the run's folder if they are not there yet.

    begun: whether the tokenizer in that folder is the run's, and not that of an attempt which was refused.
    empty: whether a new model comes without weights, for somebody who takes only a share of them.
    """
    folder, data = Path(recipe.run.folder), recipe.data
    source = recipe.model
    loaded = None if source.checkpoint is None else load(source.checkpoint, dtype=torch.float32)
    tokenizer = _tokenizer(recipe, loaded, begun)
    vocabulary = Vocabulary.of(tokenizer)
    if loaded is not None and source.overrides:
        loaded = _with_head(loaded, source)
    if loaded is None:
        config = source.architecture
        assert config is not None, "a recipe names a checkpoint or an architecture"
        _check(recipe, config, vocabulary)
        model = skeleton(config) if empty else build(config, seed=source.seed, device=_device(recipe))
        lm = TextModel(model, tokenizer)
    else:
        _check(recipe, loaded.config, vocabulary)
        lm = TextModel(loaded.model.to(_device(recipe)), tokenizer, loaded.family, token_ids=loaded.token_ids)
    if recipe.lora is not None:
        _adapt(lm.model, recipe.lora, recipe.model.seed)
    maker = make(recipe.objective, vocabulary, lm.config, data.context)
    classes = _classes(recipe, lm.config, begun)
    train, valid = (
        prepare(data, tokenizer, folder / "data", split, separator=data.separator, classes=classes)
        for split in ("train", "valid")
    )
    memory = recipe.objective.memory if isinstance(recipe.objective, NextToken) else 0
    return Parts(lm, maker, Loss.of(recipe.objective, lm.config), train, valid, memory, classes)


def _with_head(loaded: TextModel, source: ModelSource) -> TextModel:
    """A saved model with another head, whose weights are new where no tensor of the old one is the same."""
    config = loaded.config.override(source.overrides)
    if config == loaded.config:
        return loaded
    model, before = build(config, seed=source.seed), loaded.model.state_dict()
    new, same = model.state_dict(), config.head.kind == loaded.config.head.kind
    for name, tensor in before.items():
        # What a class or a token is differs from head to head; a pooler is the same one in all of BERT's.
        kept = same or not name.startswith("head.") or name.startswith("head.pooler.")
        if kept and name in new and new[name].shape == tensor.shape:
            new[name].copy_(tensor)
    named = same and not isinstance(config.head, MaskedLanguageModel)  # with a second head, files have another name
    return TextModel(model, loaded.tokenizer, loaded.family if named else None, token_ids=loaded.token_ids)


def _classes(recipe: Recipe, model: ModelConfig, begun: bool) -> tuple[str, ...]:
    """The names of the classes, kept in the run's folder; refused if the head has another number of them."""
    if recipe.data.format not in ("labelled", "tagged"):
        return ()
    kept = Path(recipe.run.folder) / CLASSES
    if begun and kept.is_file():
        return tuple(json.loads(kept.read_text(encoding="utf-8")))
    head = model.head
    assert isinstance(head, Classifier | TokenClassifier)
    known = () if recipe.model.checkpoint is None else names_beside(recipe.model.checkpoint)
    names = training_classes(recipe.data, known if len(known) == head.n_classes else ())
    numbered = names == tuple(str(number) for number in range(len(names)))
    if len(names) > head.n_classes or (len(names) < head.n_classes and not numbered):
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(
            f"model.overrides.head.n_classes: the head has {head.n_classes} classes, the texts {len(names)} ({shown}); "
            f"set it to {len(names)}"
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    return names


def _adapt(model: Transformer, lora: Lora, seed: int) -> None:
    """Freeze the model, and put matrices that learn beside its own."""
    if lora.base != "as-is":
        quantise_base(model, lora.base, lora.targets)
    add_adapter(model, lora.rank, lora.alpha, lora.targets, lora.dropout, rslora=lora.rslora, seed=seed)


def _device(recipe: Recipe) -> str:
    wanted = recipe.run.device
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts that it has it
        what = str(error).partition("\n")[0]
        raise ConfigError(f"run.device: {wanted!r} cannot be used ({what}); take auto, or cpu") from None
    return wanted


def _check(recipe: Recipe, config: ModelConfig, vocabulary: Vocabulary) -> None:
    """What a recipe cannot know before its model and its tokenizer are there."""
    problems = [f"{path}: {what}" for path, what in recipe.misfits(config)]
    if vocabulary.size > config.vocab_size:
        problems.append(
            f"model.overrides.vocab_size: the tokenizer has {vocabulary.size} entries, the model "
            f"{config.vocab_size} rows; set it to {vocabulary.size} or more"
        )
    problems += _lacks(recipe.objective, vocabulary)
    if problems:
        raise ConfigError("\n  ".join(problems))


def _lacks(objective: Objective, vocabulary: Vocabulary) -> Iterator[str]:
    """What the objective asks for and neither the tokenizer nor the trainer has."""
    match objective:
        case Masked() if vocabulary.specials.mask is None:
            yield f"tokenizer: has no mask token; objective 'masked' needs one: take {_LEARNED}"
        case SpanCorruption() if not len(vocabulary.sentinels):
            yield f"tokenizer: has no sentinels <extra_id_0> ...; 'span-corruption' needs them: take {_LEARNED}"


def _tokenizer(recipe: Recipe, loaded: TextModel | None, begun: bool) -> Tokenizer:
    """The recipe's tokenizer; one that is learned is kept in the run's folder."""
    if recipe.tokenizer == "bytes":
        return ByteTokenizer()
    if recipe.tokenizer == "checkpoint":
        if loaded is None or loaded.tokenizer is None:
            raise ConfigError("tokenizer: the checkpoint has none; give the path of one, or bytes")
        return loaded.tokenizer
    if recipe.entries is None:
        path = Path(recipe.tokenizer)
        if not path.exists():
            raise ConfigError(f"tokenizer: {path} is not there; give a path, bytes, checkpoint, or train-bpe:4096")
        return read_folder(path if path.is_dir() else path.parent)
    kept = Path(recipe.run.folder) / TOKENIZER
    if begun and kept.is_file():
        return tokenizer_from(json.loads(kept.read_text(encoding="utf-8")))
    texts = training_texts(recipe.data, separator=recipe.data.separator)
    learned = train_bpe_for(recipe.objective.vocabulary, texts, recipe.entries)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(dict(learned.to_dict())), encoding="utf-8")
    return learned
