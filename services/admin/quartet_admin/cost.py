"""What ended requests cost: tokens, GPU time, money and energy, per model, tenant and hardware class.

The sums are a replay of the kept log of request ends, and then of what ends live; an event that comes both ways counts
once. A split request has two halves on two classes: each half's GPU time stands on its own class's line, the request
and its tokens stand where it decoded.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from quartet_bus.messages import Phase, RequestEvent, Role

MAX_LINES = 10_000
OTHER = "(other)"
"""The line on which everything is summed once there are ``MAX_LINES`` lines."""

_WINDOW = 65_536
_MS_PER_HOUR = 3_600_000.0

_Key = tuple[str, int, int, Role]


class Column(StrEnum):
    """What sums can be grouped by."""

    MODEL = "model"
    TENANT = "tenant"
    HARDWARE = "hardware"


class Line(Struct):
    """Sums of one group; a column that is not grouped by is "". GPU time is of all GPUs of a worker together."""

    model: str = ""
    tenant: str = ""
    hardware: str = ""
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_ms: float = 0.0
    dollars: float = 0.0
    joules: float = 0.0

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """Per million tokens, prompt and output together; None while there are none."""
        tokens = self.prompt_tokens + self.output_tokens
        return self.dollars / tokens * 1e6 if tokens else None

    def take(self, other: "Line") -> None:
        """Add ``other``'s sums to these."""
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.gpu_ms += other.gpu_ms
        self.dollars += other.dollars
        self.joules += other.joules


class _Window:
    """The last 65,536 keys."""

    def __init__(self) -> None:
        self._order: deque[_Key] = deque()
        self._keys: set[_Key] = set()

    def __contains__(self, key: _Key) -> bool:
        return key in self._keys

    def add(self, key: _Key) -> None:
        self._keys.add(key)
        self._order.append(key)
        if len(self._order) > _WINDOW:
            self._keys.discard(self._order.popleft())


class CostLedger:
    """Sums over request ends. ``price_per_hour`` is in dollars per GPU of each hardware class."""

    def __init__(self, price_per_hour: Mapping[str, float]) -> None:
        self.unpriced = 0
        """Events on a class without a price: their GPU time and energy count, their money cannot."""
        self._prices = dict(price_per_hour)
        self._lines: dict[tuple[str, str, str], Line] = {}
        # one window each: a long replay must not push out the live keys that it will meet at its end
        self._heard = _Window()
        self._replayed = _Window()

    def heard(self, event: RequestEvent) -> bool:
        """An event came live; False if it counts for nothing, or was counted before."""
        return self._take(event, self._heard)

    def replayed(self, event: RequestEvent) -> bool:
        """An event came out of the log; False as in ``heard``."""
        return self._take(event, self._replayed)

    def sums(self, by: Iterable[Column] = ()) -> list[Line]:
        """The sums grouped by these columns (none: by all three), the most GPU time first."""
        columns: Sequence[Column] = list(by) or list(Column)
        grouped: dict[tuple[str, ...], Line] = {}
        for line in self._lines.values():
            names = {column.value: getattr(line, column.value) for column in columns}
            grouped.setdefault(tuple(names.values()), Line(**names)).take(line)
        return sorted(grouped.values(), key=lambda line: (-line.gpu_ms, line.model, line.tenant, line.hardware))

    def _take(self, event: RequestEvent, window: _Window) -> bool:
        if event.phase is not Phase.END:
            return False
        key = (event.stream.id, event.stream.attempt, event.stream.try_, event.role)
        if key in self._heard or key in self._replayed:
            return False
        window.add(key)
        price = self._prices.get(event.hardware)
        if price is None:
            self.unpriced += 1
        line = Line(
            gpu_ms=event.gpu_ms,
            dollars=event.gpu_ms / _MS_PER_HOUR * (price or 0.0),
            joules=event.joules,
        )
        if event.role is not Role.PREFILL:  # the decode half says what the request was
            line.requests = 1
            line.failed = int(event.status == "error")
            line.prompt_tokens = event.prompt_tokens
            line.cached_tokens = event.cached_tokens
            line.output_tokens = event.output_tokens
        self._line(event.model, event.tenant, event.hardware).take(line)
        return True

    def _line(self, model: str, tenant: str, hardware: str) -> Line:
        key = (model, tenant, hardware)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= MAX_LINES:
                key = (OTHER, OTHER, OTHER)
            line = self._lines.setdefault(key, Line(*key))
        return line
