"""From a recipe to the parts of a run: tokenizer, model, examples, and what is asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from qkv.config import ModelConfig
from qkv.config.recipe import Lora, Recipe
from qkv.config.training import Classify, FindSpan, Masked, Objective, SpanCorruption, Tag
from qkv.errors import ConfigError
from qkv.model import TextModel, build, load
from qkv.nn import Transformer
from qkv.text import ByteTokenizer, Tokenizer, tokenizer_from
from qkv.text.folder import read_folder
from qkv.text.training import train_bpe
from qkv.train.adapters import add_adapter, quantise_base
from qkv.train.data import Shards, Stream, prepare, training_texts
from qkv.train.loss import Loss
from qkv.train.objectives import Maker, make
from qkv.train.vocabulary import Vocabulary

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    lm: TextModel
    maker: Maker
    loss: Loss
    train: Shards
    valid: Shards

    def stream(self, recipe: Recipe) -> Stream:
        """The training examples, from the first on."""
        data, run = recipe.data, recipe.run
        length = self.maker.raw_length(data.context)
        return Stream(self.train, length, run.batch, run.seed, data.documents, ahead=self.maker.ahead)


def parts_of(recipe: Recipe, *, begun: bool = False) -> Parts:
    """Make or open everything; texts are tokenised into the run's folder if they are not there yet.

    begun: whether the tokenizer in that folder is the run's, and not that of an attempt which was refused.
    """
    folder, data = Path(recipe.run.folder), recipe.data
    source = recipe.model
    loaded = None if source.checkpoint is None else load(source.checkpoint, dtype=torch.float32)
    tokenizer = _tokenizer(recipe, loaded, begun)
    vocabulary = Vocabulary.of(tokenizer)
    if loaded is None:
        config = source.architecture
        assert config is not None, "a recipe names a checkpoint or an architecture"
        _check(recipe, config, vocabulary)
        lm = TextModel(build(config, seed=source.seed, device=_device(recipe)), tokenizer)
    else:
        _check(recipe, loaded.config, vocabulary)
        lm = TextModel(loaded.model.to(_device(recipe)), tokenizer, loaded.family, token_ids=loaded.token_ids)
    if recipe.lora is not None:
        _adapt(lm.model, recipe.lora, recipe.model.seed)
    maker = make(recipe.objective, vocabulary, lm.config)
    train, valid = (
        prepare(data, tokenizer, folder / "data", split, separator=data.separator) for split in ("train", "valid")
    )
    return Parts(lm, maker, Loss.of(recipe.objective, lm.config), train, valid)


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
    problems = [f"model.{path}: {what}" for path, what in recipe.objective.misfits(config)]
    if recipe.model.checkpoint is not None and recipe.model.overrides:
        problems.append("model.overrides: a checkpoint has the architecture that it was trained with; leave them out")
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
            yield "tokenizer: has no mask token; objective 'masked' needs one"
        case SpanCorruption() if not len(vocabulary.sentinels):
            yield "tokenizer: has no sentinels <extra_id_0>, <extra_id_1> ...; objective 'span-corruption' needs them"
        case Classify() | Tag() | FindSpan():
            yield f"objective.kind: labels for {objective.kind!r} cannot be read from files yet; choose another"


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
    learned = train_bpe(training_texts(recipe.data, separator=recipe.data.separator), recipe.entries)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(dict(learned.to_dict())), encoding="utf-8")
    return learned
