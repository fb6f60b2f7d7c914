"""How well models read texts that are longer than those they were trained on, by the kind of their positions.

    python recipes/length.py tinyshakespeare.txt --out runs/length

trains one small model for each kind of positions on rows of 128 tokens, and measures the perplexity of held-out text in
windows of 128, 256, 512 and 1,024. The protocol is `sliding` with a stride of 128 from token 1,024 of the text on: of
each window its last 128 tokens count, and every length is asked for the same tokens. So a figure differs from that on
its left only because each token has as many more tokens before it.

Each is measured again after a short training on rows of 1,024 - but for learned positions, of which there are no more -
and the model with rotary positions also with each rule that stretches them by 8, before and after. `results.json`,
`table.md` and `length.png` are written anew after every model; what is done is not done again, and a run that was
killed goes on from its last checkpoint. Where others use the cores too, `OMP_NUM_THREADS=1` makes it several times
faster: threads that wait for each other waste what is left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import qkv
from qkv import config as c
from qkv.evaluate import Protocol, perplexity_of
from qkv.train import run as train

HELD_OUT = 0.1
BASE = "rope-10k"
"""The model whose angles are stretched."""
RULES = ("unscaled", "pi", "ntk", "dynamic-ntk", "yarn", "llama3")
UNSCALED, TUNED = RULES[0], "-tuned"
LEARNED = "learned"


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    text: Path
    out: Path
    steps: int
    batch: int
    context: int
    lengths: list[int]
    tune_steps: int
    tokens: int
    tokenizer: str
    d_model: int
    layers: int
    seed: int
    only: list[str] | None

    @property
    def longest(self) -> int:
        """The longest window."""
        return max(self.lengths)

    @property
    def vocab_size(self) -> int:
        """The entries of the tokenizer."""
        return 256 if self.tokenizer == "bytes" else int(self.tokenizer.partition(":")[2])


def schemes(context: int) -> dict[str, tuple[c.Positions, c.Positions]]:
    """What stands at the embedding, and at the attention, by name."""
    nothing = c.NoPositions()
    return {
        "sinusoidal": (c.Sinusoidal(), nothing),
        "learned": (c.Learned(), nothing),
        "none": (nothing, nothing),
        "alibi": (nothing, c.Alibi()),
        "t5-buckets": (nothing, c.T5Buckets(bidirectional=False)),
        "shaw": (nothing, c.Shaw(max_distance=context // 4)),
        "transformer-xl": (nothing, c.TransformerXL()),
        BASE: (nothing, c.Rotary(theta=10_000.0)),
        "rope-500k": (nothing, c.Rotary(theta=500_000.0)),
        "rope-1m": (nothing, c.Rotary(theta=1_000_000.0)),
    }


def scaling(plan: Plan, rule: str) -> c.RotaryScaling:
    """The rule that stretches angles from the trained context to the longest window."""
    factor, trained = plan.longest / plan.context, plan.context
    rules: dict[str, c.RotaryScaling] = {
        UNSCALED: c.NoScaling(),
        "pi": c.LinearScaling(factor=factor),
        "ntk": c.NtkScaling(factor=factor),
        # With 1 the angles are stretched by the row's length over the trained one.
        "dynamic-ntk": c.DynamicNtkScaling(factor=1.0, original_max_seq_len=trained),
        "yarn": c.YarnScaling(factor=factor, original_max_seq_len=trained),
        "llama3": c.Llama3Scaling(factor=factor, original_max_seq_len=trained),
    }
    return rules[rule]


def architecture(plan: Plan, embedding: c.Positions, attention: c.Positions) -> c.ModelConfig:
    """Llama's block with these positions."""
    heads = c.MultiHead(n_heads=4, head_dim=plan.d_model // 4, pattern=c.Causal(), positions=attention)
    feed_forward = c.Gated(d_ff=round(2.625 * plan.d_model))
    block = c.Block(attention=heads, ffn=feed_forward, norm=c.RMSNorm(), residual=c.PreNorm())
    # Sines are of size 1, and would drown a table that starts at 0.02 (Vaswani 2017, section 3.4, multiplies it too).
    embedded = c.Embedding(positions=embedding)
    if isinstance(embedding, c.Sinusoidal):
        embedded = c.Embedding(positions=embedding, scale="sqrt_d_model")
    return c.ModelConfig(
        vocab_size=plan.vocab_size,
        d_model=plan.d_model,
        max_seq_len=plan.context,
        embedding=embedded,
        decoder=c.Stack(n_layers=plan.layers, layers=(block,), norm=c.RMSNorm()),
        head=c.LanguageModel(tied=True),
    )


# Training


def trained(plan: Plan, name: str, model: Mapping[str, Any], changes: Mapping[str, Any]) -> Path:
    """The folder of the model that the recipe gives; made, or taken up, if it is not there."""
    folder = plan.out / name
    recipe = qkv.Recipe.from_dict(
        {
            "model": dict(model),
            "tokenizer": plan.tokenizer,
            "data": {
                "train": [str(plan.out / "train.txt")],
                "valid": [str(plan.out / "valid.txt")],
                "context": plan.context,
            },
            "schedule": {"kind": "cosine", "peak": 2e-3, "warmup": min(100, plan.steps // 10)},
            "run": {
                "steps": plan.steps,
                "batch": plan.batch,
                "seed": plan.seed,
                "save_every": max(1, plan.steps // 5),
                "folder": str(folder),
            },
        }
    ).override(changes)
    if not (folder / "model").is_dir():
        result = train(recipe, resume=(folder / "recipe.toml").is_file())
        print(f"{name}: {result.steps} steps, held-out loss {result.valid_loss:.4f}", flush=True)
    return folder / "model"


def from_scratch(plan: Plan, name: str) -> Path:
    """A model with these positions; Transformer-XL learns with the memory that it is for."""
    config = architecture(plan, *schemes(plan.context)[name])
    memory = {"objective.memory": plan.context} if name == "transformer-xl" else {}
    return trained(plan, name, {"config": config.to_dict(), "seed": plan.seed}, memory)


def stretched(plan: Plan, rule: str) -> Path:
    """The base model, which must be there, with its angles stretched; no training."""
    at = "decoder.layers.*.attention.positions.scaling"
    return changed(plan, BASE, f"{BASE}-{rule}", {at: scaling(plan, rule).to_dict()})


def changed(plan: Plan, source: str, name: str, changes: Mapping[str, Any]) -> Path:
    """A model that is there, for rows as long as the longest window, with other changes that need no new weights."""
    folder = plan.out / name / "as-it-is"
    if not folder.is_dir():
        lm = qkv.load(plan.out / source / "model")
        model = qkv.build(lm.config.override({**changes, "max_seq_len": plan.longest}))
        model.load_state_dict(lm.model.state_dict())
        qkv.TextModel(model, lm.tokenizer).save(folder)
    return folder


def tuned(plan: Plan, name: str, start: Callable[[], Path]) -> Path:
    """A model after a short training on rows as long as the longest window; Transformer-XL's still with its memory."""
    rows = max(1, plan.batch * plan.context // plan.longest)  # as many tokens a step as before
    changes = {
        "tokenizer": "checkpoint",
        "data.context": plan.longest,
        "schedule": {"kind": "constant", "peak": 5e-4, "warmup": plan.tune_steps // 10},
        "run.steps": plan.tune_steps,
        "run.save_every": 0,
        "run.batch": rows,
    }
    if name == "transformer-xl":
        changes |= {"objective.memory": plan.context}
    return trained(plan, f"{name}/tuned", {"checkpoint": str(start())}, changes)


# Measuring


def measured(plan: Plan, folder: Path) -> dict[str, Any]:
    """Perplexity and bits per byte by length; a length for which the model has no positions is None."""
    lm, text = qkv.load(folder), (plan.out / "valid.txt").read_text(encoding="utf-8")
    found: dict[str, Any] = {"parameters": lm.config.n_parameters, "perplexity": {}, "bits_per_byte": {}}
    for length in plan.lengths:
        limited = isinstance(lm.config.embedding.positions, c.Learned) and length > lm.config.max_seq_len
        done = None if limited else perplexity_of(lm, [text], protocol(plan, length), limit=plan.longest + plan.tokens)
        found["perplexity"][str(length)] = None if done is None else done.perplexity
        found["bits_per_byte"][str(length)] = None if done is None else done.bits_per_byte
        if done is not None:
            found["tokens"] = done.tokens
    return found


def protocol(plan: Plan, length: int) -> Protocol:
    """Of each window the last tokens, as many as a row of training has; the same tokens for every length."""
    return Protocol("sliding", length, min(plan.context, length), skip=plan.longest)


def models(plan: Plan) -> dict[str, Callable[[], Path]]:
    """How every model is made, by name; the base stands before what is stretched."""
    wanted = [name for name in schemes(plan.context) if plan.only is None or name in plan.only]
    made: dict[str, Callable[[], Path]] = {name: partial(from_scratch, plan, name) for name in wanted}
    rules = [rule for rule in RULES if rule != UNSCALED and BASE in made]
    starts = {f"{BASE}-{rule}": partial(stretched, plan, rule) for rule in rules}
    longer = {name: partial(changed, plan, name, name, {}) for name in wanted if name != LEARNED}
    made |= starts
    return made | {f"{name}{TUNED}": partial(tuned, plan, name, start) for name, start in (longer | starts).items()}


def prepare(plan: Plan) -> None:
    """The text in two files: to train on, and its end, to be measured on."""
    text = plan.text.read_text(encoding="utf-8")
    cut = len(text) - round(len(text) * HELD_OUT)
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "train.txt").write_text(text[:cut], encoding="utf-8")
    (plan.out / "valid.txt").write_text(text[cut:], encoding="utf-8")


def run(plan: Plan) -> None:
    """Everything that is not there yet."""
    prepare(plan)
    path = plan.out / "results.json"
    said = {**asdict(plan), "text": plan.text.name, "out": plan.out.name, "only": None}
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"plan": said, "models": {}}
    if results["plan"] != said:
        raise SystemExit(f"{path}: holds results of other settings; take these, or choose another --out")
    names = [protocol(plan, length) for length in plan.lengths]
    results["protocols"] = {str(length): str(name) for length, name in zip(plan.lengths, names, strict=True)}
    for name, make in models(plan).items():
        if name in results["models"]:
            continue
        results["models"][name] = measured(plan, make())
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        (plan.out / "table.md").write_text(table(results), encoding="utf-8")
        draw(plan.out / "length.png", results)
        print(f"{name}: {'  '.join(cells(results['models'][name]))}", flush=True)


# What is shown


def cells(result: Mapping[str, Any]) -> list[str]:
    """The perplexities of a model, by length."""
    return ["-" if value is None else f"{value:.2f}" for value in result["perplexity"].values()]


def table(results: Mapping[str, Any]) -> str:
    """All models in Markdown: kinds of positions; and rules that stretch angles, as they are and after training."""
    found, lengths = results["models"], list(results["protocols"])
    plan = results["plan"]
    head = [*lengths, *(f"{length}, tuned" for length in lengths)]

    def row(label: str, name: str) -> list[str]:
        after = f"{name}{TUNED}"
        return [label, *cells(found[name]), *(cells(found[after]) if after in found else ["-"] * len(lengths))]

    kinds = [row(name, name) for name in found if not name.startswith(f"{BASE}-") and not name.endswith(TUNED)]
    rules = [row(label, name) for label, name in rule_names() if name in found]
    said = (
        f"Perplexity of held-out text, in windows of as many tokens. Trained on rows of {plan['context']} tokens; "
        f"tuned: after {plan['tune_steps']} steps on rows of {lengths[-1]}."
    )
    lines = [said, "", *_markdown(["positions", *head], kinds)]
    if rules:
        lines += ["", f"Angles of `{BASE}` stretched.", "", *_markdown(["rule", *head], rules)]
    return "\n".join(lines) + "\n"


def rule_names() -> list[tuple[str, str]]:
    """Each rule, and the name of its model; unscaled it is the base itself."""
    return [(rule, BASE if rule == UNSCALED else f"{BASE}-{rule}") for rule in RULES]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """The same as curves over the length."""
    from matplotlib.figure import Figure

    found = results["models"]
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name in found:
        if not name.startswith(f"{BASE}-") and not name.endswith(TUNED):
            _curve(left, found[name], name, "-")
    for index, (rule, name) in enumerate(rule_names()):
        for shown, style, label in ((name, "-", rule), (f"{name}{TUNED}", "--", f"{rule}, tuned")):
            if shown in found:
                _curve(right, found[shown], label, style, color=f"C{index}")
    for axes, title in ((left, "kinds of positions"), (right, f"rules that stretch {BASE}")):
        ticks = [int(length) for length in results["protocols"]]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set(title=title, xlabel="tokens per window", ylabel="perplexity")
        axes.axvline(results["plan"]["context"], color="grey", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _curve(axes: Any, result: Mapping[str, Any], label: str, style: str, **how: Any) -> None:
    points = [(int(length), value) for length, value in result["perplexity"].items() if value is not None]
    axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=label, **how)


def asked(arguments: list[str] | None = None) -> Plan:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text; its last tenth is held out")
    parser.add_argument("--out", type=Path, default=Path("runs/length"), help="the folder for everything")
    parser.add_argument("--steps", type=int, default=1500, help="of each model")
    parser.add_argument("--batch", type=int, default=16, help="rows per step")
    parser.add_argument("--context", type=int, default=128, help="tokens per row of training")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024], help="tokens per window")
    parser.add_argument("--tune-steps", type=int, default=100, help="of each stretched model, on the longest rows")
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens that count")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or train-bpe:1024")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some kinds only; {BASE} brings its rules")
    plan = Plan(**vars(parser.parse_args(arguments)))
    if unknown := set(plan.only or ()) - set(schemes(plan.context)):
        parser.error(
            f"--only: no such kind: {', '.join(sorted(unknown))}; choose of {', '.join(schemes(plan.context))}"
        )
    return plan


if __name__ == "__main__":
    run(asked())
