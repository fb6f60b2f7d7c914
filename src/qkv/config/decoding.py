"""Decoding: how a text is made from a model's logits. No part of the architecture; one choice per request.

    greedy     the most likely token, step by step
    sampling   a token drawn from the distribution, or from what filters leave of it
    beam       the best of the `width` texts that are followed at once

`Shaping` is what greedy and sampling do to the logits first. The order of all steps is in `Sampling`'s docstring.
`qkv.generate.sampling` and `qkv.generate.beam` carry it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from qkv.config.base import Config, NonNegative, Positive, PositiveFloat, Problem, Tuple, Variant, expecting

Share = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]


class Decoding(Variant):
    """The union of ways to choose the tokens of a text."""


def _pairs(value: Any) -> Any:
    """A table from token to bias as pairs; tables of JSON and TOML have strings as keys."""
    if not isinstance(value, Mapping):
        return value
    return [(int(key) if isinstance(key, str) and key.isdecimal() else key, bias) for key, bias in value.items()]


def _sorted(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(pairs))  # what means the same is equal


Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[tuple[Token, float], Field(strict=False)]
Biases = Annotated[Tuple[Bias], BeforeValidator(_pairs), AfterValidator(_sorted)]


class Shaping(Config):
    """What is done to the logits before a token is chosen."""

    repetition_penalty: PositiveFloat = 1.0
    """Positive logits of tokens seen before are divided by it, negative ones multiplied, once however often the token
    was seen (Keskar 2019, arXiv 1909.05858, section 4.1; the paper divides both, which would favour negative ones).
    Above 1 discourages, 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was seen (OpenAI's API); negative encourages."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token seen (OpenAI's API)."""
    penalty_scope: Literal["all", "generated"] = "all"
    """Which tokens count as seen by the three penalties: prompt and generated, or the generated alone."""
    logit_bias: Biases = ()
    """Pairs of a token and what is added to its logit; a table {token: bias} is turned into pairs. -1e9 forbids it."""
    min_new_tokens: NonNegative = 0
    """Tokens that end the text are forbidden until this many were generated."""
    ignore_eos: bool = False
    """Whether a token that ends texts is a token like others: the text goes on to its full length."""

    def problems(self) -> Iterator[Problem]:
        tokens = [token for token, _ in self.logit_bias]
        for token in sorted({token for token in tokens if tokens.count(token) > 1}):
            yield "logit_bias", f"token {token} stands twice; give one bias, their sum"


class Greedy(Shaping, Decoding):
    """The token with the largest logit after shaping; the lowest id among equals."""

    kind: Literal["greedy"] = "greedy"


class Sampling(Shaping, Decoding):
    """A token drawn from the model's distribution, or from what filters leave of it.

    The steps, in this order:

    1. repetition, then frequency and presence penalty;
    2. logit bias;
    3. forbidden tokens become impossible: those outside a constraint, and ends before `min_new_tokens`;
    4. logits divided by `temperature`, and softmax;
    5. `top_k`, `top_p`, `min_p`, `typical_p`: each sees the survivors of the one before, renormalised to 1. So with
       top_k = 2 and top_p = 0.9, the 0.9 is a share of the mass of the two.

    Filters that count or add up (`top_k`, `top_p`, `typical_p`) take equal tokens by ascending id and stop when they
    have enough; `min_p` compares values, so equal tokens stay or go together.
    """

    kind: Literal["sampling"] = "sampling"
    temperature: Annotated[float, Field(gt=0), expecting("a number above 0 (for the limit at 0 use Greedy)")] = 1.0
    """Divides the logits (Ackley 1985): below 1 sharpens the distribution, above 1 flattens it."""
    top_k: Annotated[Positive, expecting("a whole number of 1 or more (leave it out for no limit)")] | None = None
    """Keep this many of the most likely tokens (Fan 2018, arXiv 1805.04833, section 5.4); None: no limit."""
    top_p: Share = 1.0
    """Keep the fewest most likely tokens that together have this share (nucleus; Holtzman 2019, arXiv 1904.09751)."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keep the tokens at least this many times as likely as the most likely one (Nguyen 2024, arXiv 2407.01082)."""
    typical_p: Share = 1.0
    """Keep the fewest tokens with this share whose -log p lies nearest to the entropy (locally typical sampling;
    Meister 2022, arXiv 2202.00666)."""
    seed: Seed = 0
    """With the number of the sample and the position, all that the draws depend on."""


class Beam(Decoding):
    """The best texts among `width` that are followed at once, by log-probability over a length penalty.

    A text of n tokens, its end included, scores log p / ((5 + n) / 6)^length_penalty (Wu 2016, arXiv 1609.08144,
    equation 14, without the coverage term).
    """

    kind: Literal["beam"] = "beam"
    width: Positive = 4
    """How many texts are followed, and how many are given back."""
    length_penalty: Annotated[float, Field(ge=0)] = 0.6
    """The exponent: 0 compares plain log-probabilities, which favours short texts; larger favours long ones."""
    early_stopping: bool = False
    """Whether to stop once `width` texts have ended; otherwise the search goes on until no open text can win."""
    groups: Positive = 1
    """The beam is searched as this many groups one after another (diverse beam; Vijayakumar 2016, arXiv 1610.02424)."""
    diversity: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from a token's log-probability for each time an earlier group chose it in the same step (the Hamming
    diversity of Vijayakumar 2016)."""

    def problems(self) -> Iterator[Problem]:
        if self.width % self.groups:
            yield "groups", f"must divide width ({self.width}), got {self.groups}"
        if self.diversity and self.groups == 1:
            yield "diversity", f"acts between groups, got {self.diversity} with groups = 1; set groups to 2 or more"


Decoding.members = (Greedy, Sampling, Beam)
