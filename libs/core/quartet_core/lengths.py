"""Output lengths: how many tokens an answer will probably have, learned per tenant and model."""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate
from typing import Final

_BOUNDS: Final = tuple(sorted({round(2 ** (step / 4)) for step in range(61)}))
"""Upper bounds of the histogram's buckets, in tokens: four to the octave, 1 to 32,768."""

_DECAY: Final = 0.98
"""What one answer leaves of the weight of all before it: some fifty answers are remembered."""

_TRUST: Final = 5.0
"""Answers' weight from which a pair's own lengths are believed instead of its model's."""


class _Lengths:
    """A decayed histogram of lengths, and their decayed mean."""

    __slots__ = ("mean", "weight", "weights")

    def __init__(self) -> None:
        self.weights = array("f", bytes(4 * len(_BOUNDS)))
        self.weight = 0.0
        self.mean = 0.0

    def add(self, tokens: int) -> None:
        for index, weight in enumerate(self.weights):
            if weight:
                self.weights[index] = weight * _DECAY
        self.weights[min(bisect_left(_BOUNDS, tokens), len(_BOUNDS) - 1)] += 1.0
        before = self.weight * _DECAY
        self.weight = before + 1.0
        self.mean += (tokens - self.mean) / self.weight

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket in which the quantile lies: rounded up, by a fifth at most."""
        wanted = share * sum(self.weights)
        for bound, seen in zip(_BOUNDS, accumulate(self.weights), strict=True):
            if seen >= wanted:
                return float(bound)
        return float(_BOUNDS[-1])


class OutputLengths:
    """Decayed lengths for each (tenant, model), and for each model over all tenants, which stands in for a tenant of
    which little is known.

    The objective takes the mean: knowing each length exactly gained nothing in the objective study. Memory is planned
    by a quantile, because running out of it costs more than leaving some. Lengths are clamped to 1..32,768 tokens;
    of more than ``most`` pairs the least recently seen is forgotten.
    """

    def __init__(self, *, default: float = 256.0, most: int = 10_000) -> None:
        self._default = default
        self._most = most
        self._pairs: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pairs)

    def observe(self, tenant: str, model: str, tokens: int) -> None:
        """An answer of ``tokens`` tokens ended by itself."""
        tokens = min(max(tokens, 1), _BOUNDS[-1])
        for key in ((tenant, model), ("", model)):
            lengths = self._pairs.get(key)
            if lengths is None:
                lengths = self._pairs[key] = _Lengths()
            lengths.add(tokens)
            self._pairs.move_to_end(key)
        while len(self._pairs) > self._most:
            self._pairs.popitem(last=False)

    def expect(self, tenant: str, model: str, max_tokens: int | None) -> float:
        """The mean length to expect of the next answer, at most ``max_tokens``."""
        known = self._known(tenant, model)
        return _capped(self._default if known is None else known.mean, max_tokens)

    def quantile(self, tenant: str, model: str, share: float, max_tokens: int | None) -> float:
        """The length that a ``share`` of answers does not exceed, at most ``max_tokens``; without any answer yet,
        ``max_tokens`` itself, or the default."""
        known = self._known(tenant, model)
        if known is None:
            return self._default if max_tokens is None else float(max_tokens)
        return _capped(known.quantile(share), max_tokens)

    def _known(self, tenant: str, model: str) -> _Lengths | None:
        own = self._pairs.get((tenant, model))
        if own is not None and own.weight >= _TRUST:
            return own
        return self._pairs.get(("", model)) or own


def _capped(tokens: float, max_tokens: int | None) -> float:
    return max(1.0, tokens if max_tokens is None else min(tokens, float(max_tokens)))
