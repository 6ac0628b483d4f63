"""Output lengths: how many tokens an answer will probably have, learned per tenant and model."""

from collections import OrderedDict

_WEIGHT = 0.05
_LEAST = 1.0
_MOST = 32_768.0


class OutputLengths:
    """A decayed mean for each (tenant, model), and for each model over all tenants.

    A mean is enough: knowing each length exactly gained nothing in the objective study. Bounded to ``most`` pairs, of
    which the least recently seen is forgotten; what is learned is clamped to 1..32,768 tokens.
    """

    def __init__(self, *, default: float = 256.0, most: int = 10_000) -> None:
        self._default = default
        self._most = most
        self._means: OrderedDict[tuple[str, str], float] = OrderedDict()

    def observe(self, tenant: str, model: str, tokens: int) -> None:
        """An answer of ``tokens`` tokens ended by itself."""
        for key in ((tenant, model), ("", model)):
            mean = self._means.get(key, self._default)
            self._means[key] = min(_MOST, max(_LEAST, mean + _WEIGHT * (tokens - mean)))
            self._means.move_to_end(key)
        while len(self._means) > self._most:
            self._means.popitem(last=False)

    def expect(self, tenant: str, model: str, max_tokens: int | None) -> float:
        """What to expect of the next answer: the learned mean, at most ``max_tokens``."""
        mean = self._means.get((tenant, model)) or self._means.get(("", model)) or self._default
        return mean if max_tokens is None else max(_LEAST, min(mean, float(max_tokens)))
