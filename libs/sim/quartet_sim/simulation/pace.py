"""How long a stretch of decode steps takes, in closed form.

While the same sequences decode, the mean context grows by one token a step, and a step's time is piecewise linear in
it (``quartet_core.profile``). So a stretch is a few arithmetic series, one for each piece of the profile's table.
"""

import math

from quartet_core.profile import Profile


class Pace:
    """Steps of ``batch`` sequences with ``context_tokens`` in all before the first, each ``scale`` times its profile.

    Pieces are (steps, ms of the first, ms by which each next one is longer); the last has no end.
    """

    __slots__ = ("_pieces",)

    def __init__(self, profile: Profile, batch: int, context_tokens: int, scale: float, most: int) -> None:
        """``most`` is how many steps will be asked for at most."""
        mean = context_tokens / batch
        pieces: list[tuple[int, float, float]] = []
        contexts = profile.contexts
        left = most
        for border in contexts[1:-1]:
            if mean >= border:
                continue
            steps = math.ceil(border - mean)
            if steps >= left:
                break
            pieces.append(_piece(profile, batch, mean, scale, steps))
            mean += steps
            left -= steps
        pieces.append(_piece(profile, batch, mean, scale, left))
        self._pieces = pieces

    def ms(self, steps: int) -> float:
        """What the first ``steps`` steps take."""
        total = 0.0
        for length, first, growth in self._pieces:
            taken = min(steps, length)
            total += taken * first + growth * (taken * (taken - 1) // 2)
            steps -= taken
            if not steps:
                break
        return total

    def steps(self, ms: float) -> int:
        """The fewest steps, at least one, that take ``ms`` or longer."""
        before = 0
        for length, first, growth in self._pieces:
            whole = length * first + growth * (length * (length - 1) // 2)
            if whole >= ms:
                found = before + _fewest(first, growth, ms)
                break
            ms -= whole
            before += length
        else:
            return max(before, 1)
        return max(found, 1)


def _piece(profile: Profile, batch: int, mean: float, scale: float, steps: int) -> tuple[int, float, float]:
    first = profile.step_ms_at(batch, mean)
    # Within a piece a step's time is linear: its slope shows over any part of it.
    growth = profile.step_ms_at(batch, mean + 1.0) - first if steps == 1 else (
        (profile.step_ms_at(batch, mean + steps - 1) - first) / (steps - 1)
    )  # fmt: skip
    return steps, first * scale, growth * scale


def _fewest(first: float, growth: float, ms: float) -> int:
    """The least n with n·first + growth·n(n − 1)/2 ≥ ms."""
    if ms <= 0.0:
        return 0
    linear = first - 0.5 * growth
    if growth <= 1e-12 * first:
        guess = ms / first
    else:
        guess = (math.sqrt(linear * linear + 2.0 * growth * ms) - linear) / growth
    found = max(math.ceil(guess) - 1, 0)
    while found * first + growth * (found * (found - 1) // 2) < ms:
        found += 1
    return found
