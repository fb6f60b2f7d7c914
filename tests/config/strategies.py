"""Hypothesis strategies for every config class, derived from the types of its fields.

A new union member is drawn without a word here, unless its fields depend on each other: then `REPAIRS` says how drawn
fields are made to fit.
"""

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from qkv import config as c

Fields = dict[str, Any]
AnyConfig = TypeVar("AnyConfig", bound=c.Config)
WIDTH = 8  # of every head that is drawn: rotary, with every scaling rule, needs an even number above 2


def members() -> list[type[c.Variant]]:
    """Every member of every union."""
    return [member for union in c.UNIONS for member in union.members]


def replaced(config: AnyConfig, **changes: Any) -> AnyConfig:
    """The config with these fields changed, checked again."""
    return type(config)(**dict(config) | changes)


def configs(cls: type[c.Config]) -> st.SearchStrategy[Any]:
    """Valid configs of this class; of a union, of any of its members."""
    if issubclass(cls, c.Variant) and cls.is_union():
        return st.deferred(lambda: st.one_of([configs(member) for member in cls.members]))
    fields = {name: _values(field.annotation, field.metadata) for name, field in cls.model_fields.items()}
    repair = REPAIRS.get(cls, lambda drawn: {})
    return st.fixed_dictionaries(fields).map(lambda drawn: cls(**drawn | repair(drawn)))


def _values(annotation: Any, metadata: Any = ()) -> st.SearchStrategy[Any]:
    """What a field of this type may hold."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], arguments[1:])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of([_values(argument) for argument in arguments])
    if origin is tuple:
        return st.lists(_values(arguments[0]), min_size=1, max_size=3).map(tuple)
    if annotation in (int, float):
        return _numbers(annotation, metadata)
    return st.from_type(annotation) if annotation in (bool, NoneType) else configs(annotation)


def _numbers(kind: type, metadata: Any) -> st.SearchStrategy[Any]:
    bounds = [bound for item in metadata for bound in (item.metadata if isinstance(item, FieldInfo) else [item])]
    above = next((b.gt for b in bounds if isinstance(b, Gt)), None)
    least = next((b.ge for b in bounds if isinstance(b, Ge)), above)
    below = next((b.lt for b in bounds if isinstance(b, Lt)), None)
    most = next((b.le for b in bounds if isinstance(b, Le)), below)
    if kind is int:
        return st.integers(least, least + 7)
    # The repairs double some numbers: above 1e300 that would overflow, and infinity is no value of a config.
    return st.floats(least, most or 1e300, exclude_min=above is not None, exclude_max=below is not None)


def turning(positions: c.Positions, width: int) -> c.Positions:
    """The scheme, made to fit heads of this width, or none if it is no scheme of attention."""
    if "attention" not in positions.places:
        return c.NoPositions()
    if not isinstance(positions, c.Rotary):
        return positions
    scaling = positions.scaling
    if isinstance(scaling, c.LongRopeScaling):
        factors = scaling.short_factor[:1] * (width // 2)
        scaling = replaced(scaling, short_factor=factors, long_factor=factors[::-1])
    return replaced(positions, fraction=1.0, scaling=scaling)


def _multi_head(drawn: Fields) -> Fields:
    positions = turning(drawn["positions"], WIDTH)
    pattern = c.Causal() if isinstance(positions, c.TransformerXL) else drawn["pattern"]
    fits = drawn["n_kv_heads"] is None or drawn["n_heads"] % drawn["n_kv_heads"] == 0
    return {
        "head_dim": WIDTH,
        "positions": positions,
        "pattern": pattern,
        "n_kv_heads": drawn["n_kv_heads"] if fits else 1,
        "global_projections": drawn["global_projections"] and "is_global" in pattern.fields,
        "log_n": None if drawn["log_n"] == 1 else drawn["log_n"],
    }


def _latent(drawn: Fields) -> Fields:
    positions = drawn["positions"] if isinstance(drawn["positions"], c.Rotary) else c.Rotary()
    return {"rope_dim": WIDTH, "positions": turning(positions, WIDTH)}


def _experts(drawn: Fields) -> Fields:
    groups, chosen = drawn["n_groups"], min(drawn["top_groups"], drawn["n_groups"])
    each = drawn["n_experts"] + 1
    return {"n_experts": groups * each, "top_groups": chosen, "top_k": min(drawn["top_k"], each * chosen)}


def _long_rope(drawn: Fields) -> Fields:
    pairs = min(len(drawn["short_factor"]), len(drawn["long_factor"]))
    return {
        "short_factor": drawn["short_factor"][:pairs],
        "long_factor": drawn["long_factor"][:pairs],
        "factor": drawn["factor"] + 1,
        "original_max_seq_len": drawn["original_max_seq_len"] + 1,
    }


def _cutoffs(drawn: Fields) -> Fields:
    return {"cutoffs": tuple(sorted(set(drawn["cutoffs"])))}


def _adaptive(drawn: Fields) -> Fields:
    """As many ties as clusters; without projections, clusters as wide as the model, and none tied."""
    cutoffs = _cutoffs(drawn)
    if not drawn["projected"]:
        return cutoffs | {"divisor": 1, "tied_projections": ()}
    return cutoffs | {"tied_projections": drawn["tied_projections"][: len(set(drawn["cutoffs"])) + 1]}


def _block(drawn: Fields) -> Fields:
    if drawn["cross_attention"] is None:
        return {}
    parallel = isinstance(drawn["residual"], c.Parallel)
    return {"cross_attention": SOURCE, "residual": c.PreNorm() if parallel else drawn["residual"]}


SOURCE = c.MultiHead(n_heads=2, head_dim=4, pattern=c.Bidirectional(), softcap=0.1)
"""An attention that may look at a source."""

REPAIRS: dict[type[c.Config], Callable[[Fields], Fields]] = {
    c.MultiHead: _multi_head,
    c.Latent: _latent,
    c.MixtureOfExperts: _experts,
    c.LongRopeScaling: _long_rope,
    c.YarnScaling: lambda drawn: {"beta_fast": 2 * drawn["beta_slow"]},
    c.Llama3Scaling: lambda drawn: {"high_freq_factor": 2 * drawn["low_freq_factor"]},
    c.T5Buckets: lambda drawn: {
        "n_buckets": 4 * drawn["n_buckets"],
        "max_distance": 2 * drawn["n_buckets"] + drawn["max_distance"],
    },
    c.Longformer: lambda drawn: {"window": 2 * drawn["window"]},
    c.AdaptiveTable: _cutoffs,
    c.AdaptiveSoftmax: _adaptive,
    c.Embedding: lambda drawn: {
        "positions": drawn["positions"] if "embedding" in drawn["positions"].places else c.NoPositions()
    },
    c.Block: _block,
    c.Stack: lambda drawn: {"n_layers": drawn["n_layers"] + len(drawn["first"])},
}


@st.composite
def models(draw: st.DrawFn) -> c.ModelConfig:
    """Whole models: any head, over stacks that it can read, with an embedding that has what it ties to."""
    head, embedding = draw(configs(c.Head)), draw(configs(c.Embedding))
    if isinstance(embedding.tokens, c.AdaptiveTable):
        embedding = replaced(embedding, tokens=replaced(embedding.tokens, divisor=2))
    if isinstance(head, c.AdaptiveSoftmax):
        head = replaced(head, divisor=2, projected=True)
        embedding = replaced(embedding, tokens=head.table)
    elif isinstance(head, c.LanguageModel | c.MaskedLanguageModel) and head.tied:
        embedding = replaced(embedding, tokens=c.FullTable())
    names = {"past": ["decoder", "both"], "both sides": ["encoder"]}.get(head.reads, ["encoder", "decoder", "both"])
    stacks = draw(st.sampled_from(names))
    fields: Fields = {}
    if stacks in ("encoder", "both"):
        fields["encoder"] = draw(_stacks(causal=False, cross=False))
    if stacks in ("decoder", "both"):
        fields["decoder"] = draw(_stacks(causal=head.reads == "past", cross=stacks == "both"))
    return c.ModelConfig(
        vocab_size=draw(st.integers(9, 40)),
        d_model=8 * draw(st.integers(1, 4)),
        max_seq_len=draw(st.integers(1, 40)),
        embedding=embedding,
        sharing=draw(st.sampled_from(["all", "tokens", "none"])) if stacks == "both" else "all",
        head=head,
        init=draw(configs(c.Init)),
        **fields,
    )


@st.composite
def _stacks(draw: st.DrawFn, *, causal: bool, cross: bool) -> c.Stack:
    def fitted(block: c.Block) -> c.Block:
        attention = block.attention
        if causal and not attention.pattern.causal:
            own = {"global_projections": False} if isinstance(attention, c.MultiHead) else {}
            attention = replaced(attention, pattern=c.Causal(), **own)
        residual = c.PreNorm() if cross and isinstance(block.residual, c.Parallel) else block.residual
        return replaced(block, attention=attention, residual=residual, cross_attention=SOURCE if cross else None)

    stack = draw(configs(c.Stack))
    layers, first = tuple(map(fitted, stack.layers)), tuple(map(fitted, stack.first))
    if any(block.attention.positions.shared for block in (*layers, *first)):
        layers, first = layers[:1], layers[:1]  # layers that share a table need equal heads
    return replaced(stack, layers=layers, first=first)
