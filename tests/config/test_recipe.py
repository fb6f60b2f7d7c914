"""Recipes: they round-trip, name every problem with its path, and take changes as a command line gives them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qkv.config.presets as published
from qkv.config import Config, ModelConfig, Variant
from qkv.config.recipe import DataSource, Log, ModelSource, Recipe, Run, assignments
from qkv.config.training import Masked, NextToken, Objective, Optimizer, Schedule, TokenLoss, Warm
from qkv.errors import ConfigError

from .examples import block as block_of
from .examples import decoder_only, encoder_decoder, encoder_only, multi_head

UNIONS: tuple[type[Variant], ...] = (Objective, Optimizer, Schedule)
MEMBERS = [member for union in UNIONS for member in union.members]
every_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)

TEXT = """
[model]
preset = "gpt2"
[model.overrides]
decoder.n_layers = 4
d_model = 128
"decoder.layers.*.attention.n_heads" = 4
"decoder.layers.*.attention.head_dim" = 32
"decoder.layers.*.ffn.d_ff" = 512
[data]
train = ["a.txt"]
context = 64
[schedule]
kind = "cosine"
peak = 1e-3
warmup = 100
[run]
steps = 2000
batch = 12
folder = "runs/a"
"""
BASE = Recipe.from_toml(TEXT)
SCHEDULE = {"kind": "constant", "peak": 1e-3}
RUN = {"steps": 1, "batch": 1, "folder": "r"}


def recipe(model: ModelConfig | dict[str, Any] | str, objective: dict[str, Any], **data: Any) -> Recipe:
    """A recipe of a model (a config, or the path of a checkpoint) and an objective."""
    source: dict[str, Any] = {"checkpoint": model} if isinstance(model, str) else {"config": model}
    return Recipe.from_dict(
        {
            "model": source,
            "data": {"train": ["a"], "context": 16} | data,
            "objective": objective,
            "schedule": SCHEDULE,
            "run": RUN,
        }
    )


def classifier(kind: str, **fields: Any) -> dict[str, Any]:
    return encoder_only(block_of(multi_head("bidirectional")), head={"kind": kind} | fields)


GPT = decoder_only(block_of(multi_head()))
BERT = encoder_only(block_of(multi_head("bidirectional")))
PAIR = encoder_only(block_of(multi_head("bidirectional")), embedding={"n_segments": 2})
FITTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "next-token": (GPT, {}),
    "masked": (BERT, {}),
    "span-corruption": (encoder_decoder(), {}),
    "prefix": (decoder_only(block_of(multi_head("prefix"))), {}),
    "seq2seq": (encoder_decoder(), {"format": "parallel"}),
    "answers": (GPT, {"format": "chat"}),
    "classify": (classifier("classifier", n_classes=3), {"format": "labelled"}),
    "tag": (classifier("token-classifier", n_classes=3), {"format": "tagged"}),
    "span": (classifier("span"), {"format": "questions"}),
    "dpo": (GPT, {"format": "preferences"}),
}


# The tree


def test_a_file_says_little_and_the_rest_has_defaults() -> None:
    assert BASE.objective == NextToken()
    assert BASE.tokenizer == "bytes"
    assert BASE.run == Run(steps=2000, batch=12, folder="runs/a", clip=1.0, precision="fp32", keep=2)
    assert BASE.data == DataSource(train=("a.txt",), context=64)
    assert BASE.log == Log(tensorboard=False, wandb=False)
    model = BASE.model.architecture
    assert model is not None
    assert model.decoder is not None
    assert (model.decoder.n_layers, model.d_model, model.vocab_size) == (4, 128, 50257)


@pytest.mark.parametrize("kind", FITTING)
def test_every_objective_has_a_model_and_a_round_trip(kind: str) -> None:
    model, data = FITTING[kind]
    made = recipe(model, {"kind": kind}, **data)
    assert made.objective.kind == kind
    assert Recipe.from_toml(made.to_toml()) == made
    assert Recipe.from_json(made.to_json()) == made
    assert Recipe.from_dict(made.to_dict()) == made


def test_a_written_recipe_holds_every_field_and_rereads_as_itself() -> None:
    again = Recipe.from_toml(BASE.to_toml())
    assert again == BASE
    assert again.to_toml() == BASE.to_toml()
    assert again.model.overrides == {
        "decoder.n_layers": 4,
        "d_model": 128,
        "decoder.layers.*.attention.n_heads": 4,
        "decoder.layers.*.attention.head_dim": 32,
        "decoder.layers.*.ffn.d_ff": 512,
    }
    unset = {"micro_batch", "ema"}
    assert set(BASE.to_dict()["run"]) == set(Run.model_fields) - unset


def filled(member: type[Variant], draw: st.DrawFn) -> dict[str, Any]:
    """Values of a member's fields that are legal alone."""
    drawn: dict[str, Any] = {"kind": member.model_fields["kind"].default}
    for name, field in member.model_fields.items():
        default = field.get_default() if not field.is_required() else 0.5
        if isinstance(default, bool):
            drawn[name] = draw(st.booleans())
        elif isinstance(default, int):
            drawn[name] = draw(st.integers(1, 10**6))
        elif isinstance(default, float):
            drawn[name] = draw(st.floats(1e-6, 0.5) if name != "mean_length" else st.floats(1, 9))
        elif isinstance(default, tuple):
            drawn[name] = [draw(st.floats(0, 0.999)), draw(st.floats(0, 0.999))]
    return drawn


@every_member
@given(data=st.data())
def test_members_round_trip(member: type[Variant], data: st.DataObject) -> None:
    union = next(union for union in UNIONS if issubclass(member, union))
    config = union.from_dict(data.draw(st.composite(lambda draw: filled(member, draw))()))
    assert type(config) is member
    for again in (union.from_toml(config.to_toml()), union.from_json(config.to_json()), member(**dict(config))):
        assert again == config
        assert hash(again) == hash(config)


# What each part says about itself


@every_member
def test_a_member_names_its_paper_or_adds_nothing(member: type[Variant]) -> None:
    described = vars(member).get("__doc__") or ""
    assert described.strip().endswith((".", ")"))
    assert re.search(r"\b(19|20)\d\d\b", described) is not None or member.__name__ == "ConstantRate"
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", member.model_fields["kind"].default)


def test_the_unions_list_their_members() -> None:
    for union in UNIONS:
        assert {m for m in union.__subclasses__() if m.__module__.startswith("qkv.config")} == set(union.members)
        assert len(union.kinds()) == len(union.members)
    assert list(Optimizer.kinds()) == ["adamw", "adafactor", "lion", "muon"]
    assert list(Schedule.kinds()) == ["noam", "cosine", "wsd", "linear", "inverse-sqrt", "constant"]
    assert list(Objective.kinds()) == list(FITTING)


@pytest.mark.parametrize("config", [ModelSource, DataSource, Run, TokenLoss, Warm, Objective, Optimizer])
def test_fields_are_described(config: type[Config]) -> None:
    fields = {name: field.description for name, field in config.model_fields.items() if name != "kind"}
    assert fields
    assert all(fields.values()), fields


def test_the_figures_of_the_papers() -> None:
    masked = Masked()
    assert (masked.share, masked.mask, masked.random) == (0.15, 0.8, 0.1)
    assert Objective.from_dict({"kind": "span-corruption"}).to_dict()["density"] == 0.15
    assert Objective.from_dict({"kind": "span-corruption"}).to_dict()["mean_length"] == 3.0
    assert Objective.from_dict({"kind": "seq2seq"}).to_dict()["smoothing"] == 0.1
    assert Objective.from_dict({"kind": "next-token"}).to_dict()["smoothing"] == 0.0
    assert Optimizer.from_dict({"kind": "lion"}).to_dict()["betas"] == [0.9, 0.99]
    assert Schedule.from_dict({"kind": "noam"}).to_dict()["warmup"] == 4000


# What is wrong, and where


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run.step=1", "run.step: unknown field; did you mean 'steps'?"),
        ("run.steps=0", "run.steps: must be >= 1, got 0"),
        ("run.steps=ten", "run.steps: expected a whole number, got 'ten'"),
        ("run.micro_batch=13", "run.micro_batch: must be at most batch (12), got 13"),
        ("run.precision=fp8", "run.precision: unknown value 'fp8'; choose one of bf16, fp16, fp32"),
        ("run.clip=-1", "run.clip: must be >= 0.0, got -1"),
        ("run.ema=1.0", "run.ema: must be < 1.0, got 1.0"),
        ("data.train=[]", "data.train: needs at least one file"),
        ("data.format=csv", "data.format: unknown value 'csv'; choose one of chat, jsonl, labelled, "
         "parallel, preferences, questions, tagged, text"),
        ("data.format=parallel", "data.format: objective 'next-token' needs 'text' or 'jsonl' or 'chat', "
         "got 'parallel'"),
        (
            "data.context=1025",
            "data.context: must be at most 1024, the positions that the model can learn, got 1025",
        ),
        ("schedule.kind=cosin", "schedule: unknown kind 'cosin'; did you mean 'cosine'?"),
        ("schedule.floor=2", "schedule.floor: must be <= 1.0, got 2"),
        ('schedule={kind="wsd",peak=1.0,shape="exponential"}', "schedule.floor: an exponential never reaches 0: "
         "set a floor above 0"),
        ('objective={kind="masked",mask=0.9,random=0.2}', "objective.random: mask and random share the chosen tokens: "
         "0.9 + 0.2 exceed 1"),
        ('optimizer={kind="adamw",betas=[0.9,1.0]}', "optimizer.betas.1: must be < 1.0, got 1.0"),
        ("tokenizer=checkpoint", "tokenizer: 'checkpoint' is that of model.checkpoint, which is not given"),
        ("tokenizer=train-bpe:256", "tokenizer: expected 'train-bpe:' and a number of entries above 256, "
         "got 'train-bpe:256'"),
        ("model.preset=gpt3", "model.preset: unknown preset 'gpt3'; did you mean 'gpt2' or 'gpt-1'?"),
        ("model.preset=none", "model: needs exactly one of preset, config and checkpoint, got none"),
        ("model.checkpoint=x", "model: needs exactly one of preset, config and checkpoint, got preset and checkpoint"),
        ("model.overrides.d_modl=2", "model.overrides.d_modl: unknown field; did you mean 'd_model'?"),
        ("model.overrides.decoder.n_layers=0", "model.overrides.decoder.n_layers: must be >= 1, got 0"),
        ("model.overrides.decoder.layers.3.ffn=1", "model.overrides.decoder.layers.3.ffn: '3' is not one of the "
         "indices 0 to 0, nor '*'"),
    ],
)  # fmt: skip
def test_one_wrong_value_is_one_line_with_its_path(change: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BASE.override(assignments([change]))
    assert str(caught.value) == message


def test_documents_are_parted_once() -> None:
    assert BASE.override({"data.separator": "", "data.documents": True}).data.separator == ""
    with pytest.raises(ConfigError, match=r"data\.separator: records of 'jsonl' data are parted already: leave it out"):
        BASE.override({"data.separator": "", "data.format": "jsonl"})
    with pytest.raises(ConfigError, match=r"data\.documents: rows of 'parallel' data hold one example each"):
        recipe(encoder_decoder(), {"kind": "seq2seq"}, format="parallel", documents=True)


def test_averaging_needs_checkpoints() -> None:
    with pytest.raises(ConfigError) as caught:
        BASE.override({"run.average_last": 5})
    assert str(caught.value).split("\n  ") == [
        "2 problems:",
        "run.keep: must be at least average_last (5), got 2",
        "run.save_every: without checkpoints on the way there are no 5 to average",
    ]
    assert BASE.override({"run.average_last": 5, "run.keep": 5, "run.save_every": 10}).run.average_last == 5


def test_problems_of_all_parts_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe.from_toml(TEXT.replace("peak", "peek").replace("batch = 12", "batch = -1").replace('"gpt2"', '"gpt22"'))
    assert str(caught.value).split("\n  ") == [
        "4 problems:",
        "model.preset: unknown preset 'gpt22'; did you mean 'gpt2' or 'gpt2-xl' or 'gpt-1'?",
        "schedule.peek: unknown field; did you mean 'peak'?",
        "schedule.peak: required, but not given",
        "run.batch: must be >= 1, got -1",
    ]


@pytest.mark.parametrize(
    ("model", "objective", "data", "message"),
    [
        (GPT, "masked", {}, "model.overrides.head: objective 'masked' is answered by 'masked-lm', not 'lm'"),
        (BERT, "next-token", {}, "model.overrides.head: objective 'next-token' is answered by 'lm' or 'adaptive', "
         "not 'masked-lm'"),
        (GPT, "tag", {"format": "tagged"}, "model.overrides.head: objective 'tag' is answered by 'token-classifier', "
         "not 'lm'"),
        (GPT, "tag", {"format": "tagged", "documents": True}, "data.documents: rows of 'tagged' data hold one example "
         "each: leave it out"),
        (GPT, "span-corruption", {}, "model: objective 'span-corruption' needs an encoder and a decoder, "
         "but this model has only a decoder"),
        (encoder_decoder(), "next-token", {}, "model: objective 'next-token' has one text, but this model's encoder "
         "waits for another"),
        (GPT, "answers", {}, "data.format: objective 'answers' needs 'chat', got 'text'"),
        (PAIR | {"head": {"kind": "lm"}}, "masked", {}, "model.config.head.tied: required, but not given"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_be_taught(
    model: dict[str, Any], objective: str, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(model, {"kind": objective}, **data)
    assert str(caught.value) == message


def test_next_sentence_needs_two_segments() -> None:
    objective, head = Masked(next_sentence=True), {"head.next_sentence": True}
    assert list(objective.misfits(ModelConfig.from_dict(PAIR).override(head))) == []
    ((path, what),) = objective.misfits(ModelConfig.from_dict(BERT).override(head))
    assert (path, what[:34]) == ("embedding.n_segments", "next_sentence tells two segments a")
    ((path, what),) = objective.misfits(ModelConfig.from_dict(PAIR))
    assert (path, what[:38]) == ("head.next_sentence", "decides which sentence is next: set it")


def test_a_decoder_reads_source_and_target_in_a_row() -> None:
    made = recipe(GPT, {"kind": "seq2seq"}, format="parallel", context=16)
    model = made.model.architecture
    assert model is not None
    most = model.max_seq_len // 2
    learned = made.override({"model.config.embedding.positions": {"kind": "learned"}, "data.context": most})
    with pytest.raises(ConfigError, match=rf"data\.context: must be at most {most}, .* for source and target each"):
        learned.override({"data.context": most + 1})


def test_the_mean_of_checkpoints_and_the_moving_average_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=re.escape("run.average_last: the final model is either this mean or")):
        BASE.override({"run.average_last": 1, "run.ema": 0.99})


def test_adapters_learn_in_place_of_the_model() -> None:
    made = recipe(GPT, {"kind": "next-token"}).override({"lora": {"rank": 4, "base": "int8"}})
    assert made.lora is not None
    assert (made.lora.rank, made.lora.base) == (4, "int8")
    assert Recipe.from_toml(made.to_toml()) == made
    with pytest.raises(ConfigError, match=re.escape("run.average_last: averages whole models")):
        made.override({"run.average_last": 2, "run.keep": 2, "run.save_every": 1})
    with pytest.raises(ConfigError, match=re.escape("lora.targets: needs at least one name")):
        made.override({"lora.targets": []})


def test_a_checkpoint_is_judged_when_it_is_read() -> None:
    made = recipe("folder", {"kind": "masked"})
    assert made.model.architecture is None
    assert list(made.objective.misfits(ModelConfig.from_dict(GPT))) == [
        ("head", "objective 'masked' is answered by 'masked-lm', not 'lm'")
    ]
    assert list(made.objective.misfits(ModelConfig.from_dict(BERT))) == []
    assert made.override({"tokenizer": "checkpoint"}).tokenizer == "checkpoint"


# Changes


def test_assignments_are_read_as_toml_and_else_as_text() -> None:
    texts = ["a=1", "b = 1e-3", "c=true", "d=[1, 2]", 'e={kind = "lion"}', "f=runs/a", 'g="1"', "h=none", "i=a=b", "j="]
    values = {"a": 1, "b": 1e-3, "c": True, "d": [1, 2], "e": {"kind": "lion"}, "f": "runs/a", "g": "1", "h": None}
    assert assignments(texts) == values | {"i": "a=b", "j": ""}
    assert assignments(["a=1\nb=2"]) == {"a": "1\nb=2"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["run.steps"], "'run.steps': expected path=value, as in run.steps=100"),
        (["=1"], "'=1': expected path=value, as in run.steps=100"),
        (["a=1", "a=2"], "a: set twice; give one value"),
    ],
)
def test_what_is_no_assignment(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assignments(texts)
    assert str(caught.value) == message


def test_changes_reach_every_part() -> None:
    texts = ["run.steps=100", "run.ema=0.99", 'optimizer={kind="muon"}', "model.overrides.decoder.n_layers=2",
             "model.overrides.decoder.layers.*.ffn.dropout=0.5", 'data.train=["b", "c"]']  # fmt: skip
    made = BASE.override(assignments(texts))
    assert (made.run.steps, made.run.ema, made.optimizer.kind, made.data.train) == (100, 0.99, "muon", ("b", "c"))
    model = made.model.architecture
    assert model is not None
    assert model.decoder is not None
    assert model.decoder.n_layers == 2
    assert model.decoder.layers[0].ffn.to_dict()["dropout"] == 0.5
    assert model.d_model == 128, "the recipe's own overrides stay"
    assert Recipe.from_toml(made.to_toml()) == made
    assert made.override({"run.ema": None}).run.ema is None


def test_overrides_may_be_given_whole_and_in_any_nesting() -> None:
    whole = BASE.override({"model.overrides": {"decoder": {"n_layers": 1}}, "model.overrides.max_seq_len": 64})
    assert whole.model.overrides == {"decoder.n_layers": 1, "max_seq_len": 64}
    member = {"kind": "rmsnorm", "eps": 1e-5}
    nested = ModelSource(preset="gpt2", overrides={"decoder": {"norm": member}})
    assert nested.overrides == {"decoder.norm": member}
    written = published.preset("gpt2").toy()
    assert ModelSource(config=written, overrides={"embedding.dropout": 0.0}).architecture == written.override(
        {"embedding.dropout": 0.0}
    )


def test_a_file_is_read_and_its_errors_name_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(TEXT, encoding="utf-8")
    assert Recipe.read(path) == BASE
    assert Recipe.read(str(path), {"run.steps": 7}).run.steps == 7
    with pytest.raises(ConfigError) as caught:
        Recipe.read(path, {"run.steps": 0})
    assert str(caught.value) == f"{path}: run.steps: must be >= 1, got 0"
    path.write_text("[model\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: not TOML: .*line 1"):
        Recipe.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text; give the path of a recipe"):
        Recipe.read(path)
    with pytest.raises(ConfigError, match="No such file or directory; give the path of a recipe"):
        Recipe.read(tmp_path / "none.toml")


def test_the_number_of_entries_of_a_tokenizer_to_be_learned() -> None:
    assert BASE.entries is None
    assert BASE.override({"tokenizer": "train-bpe:4096"}).entries == 4096
    assert BASE.override({"tokenizer": "vocab.json"}).entries is None


def test_no_infinite_numbers() -> None:
    for value in (math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"schedule\.peak: expected a finite number"):
            BASE.override({"schedule.peak": value})
