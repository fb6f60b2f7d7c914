"""Decoding configs: they round-trip, refuse what means nothing, and say what each field is."""

import math
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config.decoding import Beam, Decoding, Greedy, Sampling
from qkv.errors import ConfigError

finite = st.floats(-1e6, 1e6)
share = st.floats(0, 1, exclude_min=True)
shaping = {
    "repetition_penalty": st.floats(0, 10, exclude_min=True),
    "frequency_penalty": finite,
    "presence_penalty": finite,
    "penalty_scope": st.sampled_from(["all", "generated"]),
    "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), finite, max_size=4),
    "min_new_tokens": st.integers(0, 10**9),
    "ignore_eos": st.booleans(),
}
filters = {
    "temperature": st.floats(0, 1e300, exclude_min=True),
    "top_p": share,
    "min_p": st.floats(0, 1),
    "typical_p": share,
    "seed": st.integers(0, 2**64 - 1),
}


@st.composite
def beams(draw: st.DrawFn) -> Beam:
    groups = draw(st.integers(1, 4))
    return Beam(
        width=groups * draw(st.integers(1, 4)),
        length_penalty=draw(st.floats(0, 5)),
        early_stopping=draw(st.booleans()),
        groups=groups,
        diversity=draw(st.floats(0, 5)) if groups > 1 else 0.0,
    )


decodings = st.one_of(
    st.builds(Greedy, **shaping),
    st.builds(Sampling, **shaping, **filters),
    st.builds(Sampling, top_k=st.integers(1, 10**6)),
    beams(),
)


@given(config=decodings)
def test_json_toml_dict_and_pickle_give_the_same_config_back(config: Decoding) -> None:
    member = type(config)
    for again in (
        member.from_json(config.to_json()),
        Decoding.from_json(config.to_json()),
        Decoding.from_toml(config.to_toml()),
        Decoding.from_dict(config.to_dict()),
        member(**dict(config)),
        pickle.loads(pickle.dumps(config)),
    ):
        assert type(again) is member
        assert again == config
        assert hash(again) == hash(config)
        assert again.to_json() == config.to_json()


def test_the_kinds_and_what_they_are_without_a_word() -> None:
    assert {kind: member.__name__ for kind, member in Decoding.kinds().items()} == {
        "greedy": "Greedy",
        "sampling": "Sampling",
        "beam": "Beam",
    }
    off = {
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "penalty_scope": "all",
        "logit_bias": [],
        "min_new_tokens": 0,
        "ignore_eos": False,
    }
    assert Greedy().to_dict() == {"kind": "greedy"} | off
    filters = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "seed": 0}
    assert Sampling().to_dict() == {"kind": "sampling"} | off | filters
    beam = {"width": 4, "length_penalty": 0.6, "early_stopping": False, "groups": 1, "diversity": 0.0}
    assert Beam().to_dict() == {"kind": "beam"} | beam
    with pytest.raises(ConfigError, match="Decoding is a union"):
        Decoding()


@pytest.mark.parametrize(
    "written",
    [
        {7: 1.5, 3: -2.0},
        {"7": 1.5, "3": -2.0},
        [(7, 1.5), (3, -2)],
        ([3, -2.0], [7, 1.5]),
    ],
)
def test_biases_are_sorted_pairs_however_they_are_written(written: Any) -> None:
    config = Sampling(logit_bias=written)
    assert config.logit_bias == ((3, -2.0), (7, 1.5))
    assert config == Sampling(logit_bias=((7, 1.5), (3, -2.0)))


def test_a_toml_table_of_biases() -> None:
    text = 'kind = "greedy"\n[logit_bias]\n7 = 1.5\n3 = -2\n'
    assert Decoding.from_toml(text) == Greedy(logit_bias={3: -2.0, 7: 1.5})


NUMBER, WHOLE = "expected a number", "expected a whole number"
WARM = "temperature: expected a number above 0 (for the limit at 0 use Greedy), got"


@pytest.mark.parametrize(
    ("member", "field", "value", "message"),
    [
        (Sampling, "temperature", 0, f"{WARM} 0"),
        (Sampling, "temperature", -1.0, f"{WARM} -1.0"),
        (Sampling, "temperature", math.inf, f"{WARM} inf"),
        (Sampling, "top_k", 0, "top_k: expected a whole number of 1 or more (leave it out for no limit), got 0"),
        (Sampling, "top_k", 2.0, "top_k: expected a whole number of 1 or more (leave it out for no limit), got 2.0"),
        (Sampling, "top_p", 0, "top_p: must be > 0.0, got 0"),
        (Sampling, "top_p", 1.5, "top_p: must be <= 1.0, got 1.5"),
        (Sampling, "typical_p", 0.0, "typical_p: must be > 0.0, got 0.0"),
        (Sampling, "min_p", -0.5, "min_p: must be >= 0.0, got -0.5"),
        (Sampling, "min_p", 2, "min_p: must be <= 1.0, got 2"),
        (Sampling, "seed", -1, "seed: must be >= 0, got -1"),
        (Sampling, "seed", 2**64, f"seed: must be < {2**64}, got {2**64}"),
        (Sampling, "seed", 1.0, f"seed: {WHOLE}, got 1.0"),
        (Sampling, "tempreature", 1.0, "tempreature: unknown field; did you mean 'temperature'?"),
        (Greedy, "temperature", 1.0, "temperature: unknown field; "),
        (Greedy, "repetition_penalty", 0, "repetition_penalty: must be > 0.0, got 0"),
        (Greedy, "frequency_penalty", math.nan, "frequency_penalty: expected a finite number, got nan"),
        (Greedy, "presence_penalty", "1", f"presence_penalty: {NUMBER}, got '1'"),
        (Greedy, "penalty_scope", "promt", "penalty_scope: unknown value 'promt'; choose one of all, generated"),
        (Greedy, "min_new_tokens", -1, "min_new_tokens: must be >= 0, got -1"),
        (Greedy, "ignore_eos", 1, "ignore_eos: expected true or false, got 1"),
        (Greedy, "logit_bias", 5, "logit_bias: expected a list, got 5"),
        (Greedy, "logit_bias", {"a": 1}, f"logit_bias.0.0: {WHOLE}, got 'a'"),
        (Greedy, "logit_bias", {None: 1, 2: 3}, f"logit_bias.0.0: {WHOLE}, got None"),
        (Greedy, "logit_bias", {True: 1}, f"logit_bias.0.0: {WHOLE}, got True"),
        (Greedy, "logit_bias", {-3: 1}, "logit_bias.0.0: must be >= 0, got -3"),
        (Greedy, "logit_bias", {2**31: 1}, f"logit_bias.0.0: must be < {2**31}, got {2**31}"),
        (Greedy, "logit_bias", {3: True}, f"logit_bias.0.1: {NUMBER}, got True"),
        (Greedy, "logit_bias", {3: -math.inf}, "logit_bias.0.1: expected a finite number, got -inf"),
        (Greedy, "logit_bias", [(3,)], "logit_bias.0.1: required, but not given"),
        (Greedy, "logit_bias", {"3": 1, 3: 2}, "logit_bias: token 3 stands twice; give one bias, their sum"),
        (Greedy, "logit_bias", [(3, 1), (4, 0), (3, 1)], "logit_bias: token 3 stands twice; give one bias, their sum"),
        (Beam, "width", 0, "width: must be >= 1, got 0"),
        (Beam, "length_penalty", -0.1, "length_penalty: must be >= 0.0, got -0.1"),
        (Beam, "groups", 3, "groups: must divide width (4), got 3"),
        (Beam, "diversity", 0.5, "diversity: acts between groups, got 0.5 with groups = 1; set groups to 2 or more"),
        (Beam, "diversity", -0.5, "diversity: must be >= 0.0, got -0.5"),
        (Beam, "seed", 1, "seed: unknown field; "),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(member: type[Decoding], field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        member(**{field: value})


@pytest.mark.parametrize("member", Decoding.members, ids=lambda member: member.__name__)
def test_every_field_says_what_it_is(member: type[Decoding]) -> None:
    assert member.__doc__
    for name, field in member.model_fields.items():
        assert name == "kind" or field.description, name


@pytest.mark.parametrize(
    ("member", "field", "paper"),
    [
        (Sampling, "top_k", "Fan 2018"),
        (Sampling, "top_p", "Holtzman 2019"),
        (Sampling, "min_p", "Nguyen 2024"),
        (Sampling, "typical_p", "Meister 2022"),
        (Sampling, "repetition_penalty", "Keskar 2019"),
        (Greedy, "repetition_penalty", "Keskar 2019"),
        (Beam, "groups", "Vijayakumar 2016"),
    ],
)
def test_a_field_names_its_paper(member: type[Decoding], field: str, paper: str) -> None:
    assert paper in (member.model_fields[field].description or "")
