"""What is told of a cut besides itself: limits that bind it, and what other choices would give."""

from msgspec import Struct


class Binding(Struct, frozen=True, kw_only=True):
    """A limit, and how much higher the rate would be without it. ``feasible`` says that nothing fits with it."""

    limit: str
    gain_pct: float
    text: str
    feasible: bool = True


class Alternative(Struct, frozen=True, kw_only=True):
    """What another choice would give. ``rate_per_s`` 0: nothing fits."""

    choice: str
    rate_per_s: float
    tpot_ms: float
    ttft_ms: float
    loss_hundredths: float
    stages: int
