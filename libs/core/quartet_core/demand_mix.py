"""One probability out of several opinions, and how good it turned out to be.

The members of a mix each say how likely an event is; once it is known what happened, a member's weight is multiplied
by the probability that it gave to this outcome (raised to ``LEARNING``, because outcomes that overlap in time are not
independent), and a small share is spread evenly so that no member is ever out for good. That is Bayesian averaging
with a fixed share: over time the mix loses hardly more than its best member, in log loss, and may change its mind.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import Final

from msgspec import Struct

LEARNING: Final = 0.25
_SHARE: Final = 0.0005
_LEAST: Final = 1e-4
_HALF_LIFE_SCORED: Final = 5_000


def clamped(probability: float) -> float:
    """``probability`` kept off 0 and 1: nothing is certain, and a certain error would cost infinitely much."""
    return min(1.0 - _LEAST, max(_LEAST, probability))


class Score(Struct):
    """How good forecasts were: exponentially weighted means over what was scored. Lower is better; losses in nats.

    ``base_*`` is what saying each model's own base rate so far would have scored: a forecast must beat that.
    """

    scored: int = 0
    brier: float = 0.0
    log_loss: float = 0.0
    base_brier: float = 0.0
    base_log_loss: float = 0.0

    def add(self, probability: float, happened: bool, base: float) -> None:
        """A forecast met its outcome; ``base`` is the base rate that was known by then."""
        self.scored += 1
        weight = max(1.0 / self.scored, math.log(2) / _HALF_LIFE_SCORED)
        self.brier += weight * ((probability - happened) ** 2 - self.brier)
        self.log_loss += weight * (loss(probability, happened) - self.log_loss)
        self.base_brier += weight * ((base - happened) ** 2 - self.base_brier)
        self.base_log_loss += weight * (loss(base, happened) - self.base_log_loss)


def loss(probability: float, happened: bool) -> float:
    """The log loss of one forecast, in nats."""
    return -math.log(clamped(probability if happened else 1.0 - probability))


class Mix:
    """The weights of one horizon's members."""

    def __init__(self, members: Sequence[str]) -> None:
        self.members = tuple(members)
        self.weights = [1.0 / len(self.members)] * len(self.members)
        self.score = Score()

    def blend(self, opinions: Sequence[float]) -> float:
        """The mix's probability for one event, given its members' in their order."""
        return clamped(sum(map(mul, self.weights, opinions)))

    def learn(self, opinions: Sequence[float], happened: bool) -> None:
        """An event that the members had these opinions of has (or has not) happened."""
        raised = [
            weight * clamped(opinion if happened else 1.0 - opinion) ** LEARNING
            for weight, opinion in zip(self.weights, opinions, strict=True)
        ]
        total = sum(raised)
        even = _SHARE / len(raised)
        self.weights = [(1.0 - _SHARE) * weight / total + even for weight in raised]
