"""One token from the logits (V,) of a text's next position, on the host, in NumPy.

    p     = softmax(shaped logits / temperature), cut down by top-k, top-p, min-p, typical; zero elsewhere
    token = the first whose cumulative p exceeds u                    (greedy: the largest, the lowest id among equals)

`qkv.config.decoding` says what each step is and in which order they come. Probabilities are float64.

The random number u in [0, 1) is the upper 53 bits of the first 64-bit word that NumPy's Philox4x64-10 (Salmon 2011: a
counter in place of a state) gives for the key (seed, sample) and the counter (position, lane, 0, 0), where NumPy adds 1
to the counter before it computes a block. It depends on nothing else, so that a seed means the same however the tokens
before were computed: alone, in a batch, or resumed. Lane 0 draws tokens; other lanes are for who needs more numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qkv.config.decoding import Beam, Greedy, Sampling
from qkv.errors import GenerationError

Floats = npt.NDArray[np.floating]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

ROUNDING = 1e-9
"""A sum of probabilities reaches its share if it lacks less than this: eight times 0.1 is 0.8, not less. So all tokens
together, whatever their rounding, reach every share."""
_FEW = 256  # tokens that are simply sorted


class Choice(NamedTuple):
    """A chosen token."""

    token: int
    logprob: float
    """Its log-probability under the model itself: of softmax(logits), before any shaping, temperature or filter."""


class Chooser:
    """Chooses the tokens of one text; keeps nothing from one call to the next."""

    def __init__(
        self,
        decoding: Greedy | Sampling,
        prompt: Sequence[int],
        *,
        ends: frozenset[int] = frozenset(),
        sample: int = 0,
    ) -> None:
        if isinstance(decoding, Beam):
            raise GenerationError("decoding: Beam ranks whole texts and chooses no token; use Greedy or Sampling")
        if not 0 <= sample < 2**64:
            raise GenerationError(f"sample: must be 0 to 2^64 - 1, got {sample}")
        self.decoding = decoding
        self.sample = sample
        self._start = len(prompt)
        self._ends = np.array(sorted(ends), np.intp)
        self._bias = _columns(decoding.logit_bias)
        self._penalises = (
            decoding.repetition_penalty != 1 or decoding.frequency_penalty != 0 or decoding.presence_penalty != 0
        )
        counted = prompt if self._penalises and decoding.penalty_scope == "all" else ()
        self._prompt = np.unique(np.array(counted, np.intp), return_counts=True)

    def distribution(self, logits: Floats, generated: Sequence[int], allowed: Mask | None = None) -> Doubles:
        """The probabilities (V,) from which `choose` draws. `allowed` (V,): what a constraint lets come next."""
        ids, kept = self._survivors(logits, generated, allowed)
        whole = np.zeros(len(logits))
        whole[ids] = kept
        return whole

    def choose(self, logits: Floats, generated: Sequence[int], allowed: Mask | None = None) -> Choice:
        """The token that comes after the prompt and `generated`."""
        ids, kept = self._survivors(logits, generated, allowed)
        token = int(ids[0] if len(ids) == 1 else ids[chosen(kept.cumsum(), self.uniform(len(generated)))])
        return Choice(token, log_probability(logits, token))

    def uniform(self, n_generated: int, lane: int = 0) -> float:
        """The random number for the token after `n_generated` generated ones."""
        seed = self.decoding.seed if isinstance(self.decoding, Sampling) else 0
        return uniform(seed, self.sample, self._start + n_generated, lane)

    def _survivors(self, logits: Floats, generated: Sequence[int], allowed: Mask | None) -> tuple[Ids, Doubles]:
        """The tokens that may come, in ascending order, and their probabilities."""
        where = f"position {self._start + len(generated)}"
        check(logits, where)
        shaped = self._shaped(logits, generated, allowed, where)
        if isinstance(self.decoding, Sampling):
            return filtered(shaped, self.decoding)
        return np.array([shaped.argmax()], np.intp), np.ones(1)

    def _shaped(self, logits: Floats, generated: Sequence[int], allowed: Mask | None, where: str) -> Floats:
        """Penalties, bias, forbidden tokens: a new array, or the logits themselves where nothing is to do."""
        barred = self._barred(len(logits), len(generated))
        if not (self._penalises or len(self._bias[0]) or len(barred) or allowed is not None):
            return logits
        shaped = logits.astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found below
            if self._penalises:
                self._penalise(shaped, generated)
            _add("logit_bias", shaped, *self._bias)
        if not shaped.max() < np.inf:
            raise GenerationError(f"{where}: a penalty or bias makes a logit infinite; choose smaller ones")
        if allowed is not None:
            if allowed.shape != shaped.shape or allowed.dtype != np.bool_:
                got = f"{allowed.dtype} {allowed.shape}"
                raise GenerationError(f"allowed: must be one boolean per token, {shaped.shape}, got {got}")
            np.copyto(shaped, -np.inf, where=~allowed)
        before = shaped[barred]
        shaped[barred] = -np.inf
        if shaped.max() == -np.inf:
            raise GenerationError(f"{where}: {self._why_nothing_is_left(allowed, before)}")
        return shaped

    def _barred(self, vocab_size: int, n_generated: int) -> Ids:
        """The ends, while it is too early for them."""
        early = n_generated < self.decoding.min_new_tokens
        return self._ends[(self._ends >= 0) & (self._ends < vocab_size)] if early else self._ends[:0]

    def _penalise(self, logits: Doubles, generated: Sequence[int]) -> None:
        counts = np.zeros(len(logits), np.intp)
        _add("prompt", counts, *self._prompt)
        _add("generated", counts, *np.unique(np.array(generated, np.intp), return_counts=True))
        seen = np.flatnonzero(counts)
        values, choice = logits[seen], self.decoding
        factor = choice.repetition_penalty
        values = np.where(values > 0, values / factor, values * factor)
        logits[seen] = values - choice.frequency_penalty * counts[seen] - choice.presence_penalty

    def _why_nothing_is_left(self, allowed: Mask | None, barred: Doubles) -> str:
        if allowed is not None and not allowed.any():
            return "the constraint allows no token; give one that some text can satisfy"
        if len(barred) and barred.max() > -np.inf:
            least = self.decoding.min_new_tokens
            return f"only tokens that end the text could come, before min_new_tokens = {least}; lower min_new_tokens"
        return "the model gives every allowed token probability 0; loosen the constraint, or the penalties and biases"


# Steps


def check(logits: Floats, where: str) -> None:
    """Refuse logits from which no distribution follows, rather than choose by chance."""
    if logits.ndim != 1 or not len(logits):
        raise GenerationError(f"{where}: logits must be (V,), one per token, got shape {logits.shape}")
    top = logits.max()  # NaN if any is
    if np.isfinite(top):
        return
    if top == -np.inf:
        raise GenerationError(f"{where}: every logit is -inf; the model has no token to offer, check its weights")
    token = int(logits.argmax())  # the first NaN, if there is one
    remedy = "the model overflowed: check its weights, or run it in float32"
    raise GenerationError(f"{where}: the logit of token {token} is {logits[token]}; {remedy}")


def filtered(logits: Floats, sampling: Sampling) -> tuple[Ids, Doubles]:
    """Temperature, softmax and filters: the surviving tokens, ascending, and their probabilities."""
    ids = np.arange(len(logits))
    if sampling.top_k is not None and sampling.top_k < len(ids):
        ids = largest(logits, sampling.top_k)
        logits = logits[ids]
    kept = softmax(logits, sampling.temperature)
    if sampling.top_p < 1:
        ids, kept = _renormalised(ids, kept, nucleus(kept, sampling.top_p))
    if sampling.min_p > 0:
        ids, kept = _renormalised(ids, kept, np.flatnonzero(kept >= sampling.min_p * kept.max()))
    if sampling.typical_p < 1:
        ids, kept = _renormalised(ids, kept, typical(kept, sampling.typical_p))
    return ids, kept


def softmax(logits: Floats, temperature: float) -> Doubles:
    """softmax(logits / temperature); the largest logit must be finite."""
    scaled: Doubles = np.subtract(logits, logits.max(), dtype=np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, as it should be
        scaled /= temperature
    weights = np.exp(scaled, out=scaled)
    weights /= weights.sum()
    return weights


def largest(values: Floats, n: int) -> Ids:
    """The indices of the n largest, ascending; among equals the lowest."""
    least = np.partition(values, len(values) - n)[len(values) - n]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.sort(np.concatenate([above, equal[: n - len(above)]]))


def nucleus(probabilities: Doubles, share: float) -> Ids:
    """The fewest most likely tokens that have the share, ascending."""
    # Of V tokens, those below (1 - share) / V have less than 1 - share together: the rest suffices.
    likely = np.flatnonzero(probabilities >= (1 - share) / len(probabilities))
    return likely[shortest(-probabilities[likely], probabilities[likely], share)]


def typical(probabilities: Doubles, share: float) -> Ids:
    """The fewest tokens that have the share with -log p nearest to the entropy, ascending."""
    possible = np.flatnonzero(probabilities)
    p = probabilities[possible]
    surprise = -np.log(p)
    return possible[shortest(np.abs(surprise - p @ surprise), p, share)]


def shortest(keys: Doubles, probabilities: Doubles, share: float) -> Ids:
    """The indices, ascending, of the fewest tokens in ascending order of (key, index) that reach the share."""
    last, before = _last_key(keys, probabilities, share - ROUNDING)
    equal = np.flatnonzero(keys == last)
    enough = (before + probabilities[equal].cumsum()).searchsorted(share - ROUNDING) + 1
    return np.sort(np.concatenate([np.flatnonzero(keys < last), equal[:enough]]))


def _last_key(keys: Doubles, probabilities: Doubles, share: float) -> tuple[float, float]:
    """The key at which the probabilities, added up by ascending key, reach the share, and the sum of those below it."""
    before, pivot = 0.0, _FEW
    while len(keys) > _FEW:  # a weighted quickselect: sorting a whole vocabulary would cost more than the rest together
        low = keys <= np.partition(keys, pivot)[pivot]
        part = np.flatnonzero(low)
        if len(part) == len(keys):  # the pivot is the largest key, of many
            break
        mass = float(probabilities[part].sum())
        if before + mass < share:
            before += mass
            part = np.flatnonzero(~low)
        keys, probabilities = keys[part], probabilities[part]
        pivot = len(keys) // 2
    order = keys.argsort()
    sums = before + probabilities[order].cumsum()
    last = float(keys[order[sums.searchsorted(share)]])
    below = order[: int(keys[order].searchsorted(last))]
    return last, before + float(probabilities[below].sum())


def chosen(cumulative: Doubles, uniform: float) -> int:
    """The first token whose cumulative weight exceeds `uniform` (in [0, 1)) times the total: never one of weight 0."""
    total = cumulative[-1]
    place = min(uniform * total, np.nextafter(total, 0))  # the product may round up to the total
    return int(cumulative.searchsorted(place, side="right"))


def uniform(seed: int, sample: int, position: int, lane: int = 0) -> float:
    """The random number in [0, 1) that belongs to these four; see the module's docstring."""
    key, counter = np.array([seed, sample], np.uint64), np.array([position, lane, 0, 0], np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


def log_probability(logits: Floats, token: int) -> float:
    """log softmax(logits)[token]."""
    shifted = np.subtract(logits, logits.max(), dtype=np.float64)
    value = float(shifted[token])
    return value - float(np.log(np.exp(shifted, out=shifted).sum()))


def draw(logits: Floats, temperature: float, seed: int, position: int) -> int:
    """The token at `position`, drawn from softmax(logits / temperature); temperature 0 is greedy."""
    if temperature < 0:
        raise GenerationError(f"temperature: must be 0 (greedy) or more, got {temperature}")
    if not 0 <= seed < 2**64:
        raise GenerationError(f"seed: must be 0 to 2^64 - 1, got {seed}")
    check(logits, f"position {position}")
    if temperature == 0:
        return int(logits.argmax())
    return chosen(softmax(logits, temperature).cumsum(), uniform(seed, 0, position))


def _renormalised(ids: Ids, probabilities: Doubles, keep: Ids) -> tuple[Ids, Doubles]:
    kept = probabilities[keep]
    return ids[keep], kept / kept.sum()


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[Ids, Doubles]:
    return np.array([token for token, _ in pairs], np.intp), np.array([value for _, value in pairs], np.float64)


def _add(source: str, target: npt.NDArray[Any], tokens: Ids, values: npt.NDArray[Any]) -> None:
    """Add each token's value to its place in the vocabulary. The tokens differ."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(target):
        wrong = tokens[(tokens < 0) | (tokens >= len(target))][0]
        raise GenerationError(f"{source}: token {wrong} is not in the vocabulary, use 0 to {len(target) - 1}")
    target[tokens] += values
