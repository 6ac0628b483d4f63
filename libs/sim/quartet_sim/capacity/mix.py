"""The cheapest mix, as a mixed-integer linear program, solved to optimality by HiGHS (through SciPy).

Unknown are the workers of each option (whole numbers) and the share of each bucket that each option serves. Every
bucket is served; no worker is asked for more time or KV than its margin leaves; enough requests of every model go where
they can be in time; stock and budget are kept.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from quartet_core.catalogue import Catalogue
from quartet_sim.capacity.carrying import Carried, Margins, Option, carried
from quartet_sim.capacity.demand import Demand

_TIME_LIMIT_S = 60.0
_PREFER_FEWER = 1e-5
"""USD per hour of a worker, and of each second of work a second: of mixes for one price, the one with fewer workers and
the less to do is taken."""


class Limits(Struct, frozen=True, kw_only=True):
    """What may be bought: cards of each class, and USD per hour (None: whatever it takes).

    ``goal`` is the share of each model's requests that must be able to be in time."""

    stock: dict[str, int]
    budget_per_hour: float | None = None
    goal: float = 0.9


class Team(Struct, frozen=True, kw_only=True):
    """``count`` workers of one option, the share of their margin in use at peak, and what of each bucket they serve."""

    option: Option
    count: int
    used: float
    serves: dict[str, float]


class Mix(Struct, frozen=True, kw_only=True):
    """Workers that do, and what they cost."""

    teams: tuple[Team, ...]
    price_per_hour: float

    @property
    def text(self) -> str:
        """For people."""
        return ", ".join(f"{team.count} {team.option.name}" for team in self.teams)

    @property
    def cards(self) -> dict[str, int]:
        """Cards of each class."""
        found: dict[str, int] = {}
        for team in self.teams:
            found[team.option.hardware] = found.get(team.option.hardware, 0) + team.count * team.option.tp
        return found


class NotSolved(RuntimeError):
    """The solver stopped without an answer: ``message`` is its own."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the solver gave up: {message}")


class Program:
    """The program of one demand: built once, solved under several limits and margins."""

    def __init__(self, demand: Demand, options: Sequence[Option], catalogue: Catalogue) -> None:
        """``options`` are of ``catalogue``."""
        self.demand = demand
        self.options = list(options)
        self.catalogue = catalogue

    def of(self, demand: Demand) -> "Program":
        """The same for another demand."""
        return Program(demand, self.options, self.catalogue)

    def table(self, margins: Mapping[str, Margins]) -> dict[tuple[int, int], Carried]:
        """What each option takes of each bucket of its model, by (bucket, option)."""
        return {
            (k, o): carried(option, self.catalogue.profile(*option.key), bucket, margins[bucket.model])
            for k, bucket in enumerate(self.demand.buckets)
            for o, option in enumerate(self.options)
            if option.model == bucket.model
        }

    def solve(
        self, limits: Limits, margins: Mapping[str, Margins], *, unlike: Sequence[Mapping[str, int]] = ()
    ) -> Mix | None:
        """The cheapest mix, or None when there is none. ``unlike`` are cards by class: than each of them, the mix has
        fewer of at least one class. Raises `NotSolved`."""
        return _Solving(self, limits, margins, unlike).solve()


class _Solving:
    """One solve: columns are workers by option, shares by (bucket, option), a switch by (mix to be unlike, class)."""

    def __init__(
        self, program: Program, limits: Limits, margins: Mapping[str, Margins], unlike: Sequence[Mapping[str, int]]
    ) -> None:
        self._demand, self._options = program.demand, program.options
        self._limits = limits
        self._margins = margins
        self._unlike = unlike
        self._table = program.table(margins)
        self._shares = {pair: len(self._options) + i for i, pair in enumerate(self._table)}
        first = len(self._options) + len(self._shares)
        self._classes = sorted({option.hardware for option in self._options})
        self._switches = {
            (i, name): first + i * len(self._classes) + j
            for i in range(len(unlike))
            for j, name in enumerate(self._classes)
        }
        self._columns = first + len(self._switches)
        self._rows: list[dict[int, float]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def solve(self) -> Mix | None:
        if not self._options or not self._columns:
            return None
        self._serve_all()
        self._keep_margins()
        self._be_in_time()
        self._keep_limits()
        self._be_unlike()
        cost = np.zeros(self._columns)
        integral = np.zeros(self._columns)
        for o, option in enumerate(self._options):
            cost[o] = option.price_per_hour + _PREFER_FEWER
            integral[o] = 1
        for (k, o), each in self._table.items():
            cost[self._shares[k, o]] = _PREFER_FEWER * self._demand.buckets[k].rate_per_s * each.seconds
        upper = np.ones(self._columns)
        for o, option in enumerate(self._options):
            upper[o] = self._limits.stock.get(option.hardware, 0) // option.tp
        for switch in self._switches.values():
            integral[switch] = 1
        found = milp(
            cost,
            integrality=integral,
            bounds=Bounds(np.zeros(self._columns), upper),
            constraints=LinearConstraint(self._matrix(), np.array(self._low), np.array(self._high)),
            options={"mip_rel_gap": 0.0, "time_limit": _TIME_LIMIT_S},
        )
        if found.status == 2:
            return None
        if found.status != 0 or found.x is None:
            raise NotSolved(str(found.message))
        return self._mix(np.asarray(found.x, dtype=np.float64))

    def _row(self, columns: dict[int, float], low: float, high: float) -> None:
        self._rows.append(columns)
        self._low.append(low)
        self._high.append(high)

    def _matrix(self) -> coo_array:
        rows = [r for r, columns in enumerate(self._rows) for _ in columns]
        columns = [c for each in self._rows for c in each]
        values = [value for each in self._rows for value in each.values()]
        return coo_array((values, (rows, columns)), shape=(len(self._rows), self._columns))

    def _serve_all(self) -> None:
        for k in range(len(self._demand.buckets)):
            self._row({self._shares[pair]: 1.0 for pair in self._table if pair[0] == k}, 1.0, 1.0)

    def _keep_margins(self) -> None:
        for o, option in enumerate(self._options):
            share = self._margins[option.model].utilisation
            time: dict[int, float] = {o: -share}
            kv: dict[int, float] = {o: -share}
            for (k, other), each in self._table.items():
                if other == o:
                    rate = self._demand.buckets[k].rate_per_s
                    time[self._shares[k, o]] = rate * each.seconds
                    kv[self._shares[k, o]] = rate * each.kv_token_seconds / option.kv_tokens
            self._row(time, -np.inf, 0.0)
            self._row(kv, -np.inf, 0.0)

    def _be_in_time(self) -> None:
        for model in {bucket.model for bucket in self._demand.buckets}:
            rates = {k: bucket.rate_per_s for k, bucket in enumerate(self._demand.buckets) if bucket.model == model}
            row = {self._shares[k, o]: rates[k] * each.within for (k, o), each in self._table.items() if k in rates}
            self._row(row, self._limits.goal * sum(rates.values()), np.inf)

    def _keep_limits(self) -> None:
        for name in self._classes:
            self._row(self._cards(name), 0.0, float(self._limits.stock.get(name, 0)))
        if self._limits.budget_per_hour is not None:
            prices = {o: option.price_per_hour for o, option in enumerate(self._options)}
            self._row(prices, 0.0, self._limits.budget_per_hour)

    def _be_unlike(self) -> None:
        for i, cards in enumerate(self._unlike):
            for name in self._classes:
                stock = float(self._limits.stock.get(name, 0))
                fewer = cards.get(name, 0) - 1
                if fewer < 0:
                    self._row({self._switches[i, name]: 1.0}, 0.0, 0.0)
                    continue
                # switched on, cards <= fewer; off, cards <= stock
                self._row({**self._cards(name), self._switches[i, name]: stock - fewer}, 0.0, max(stock, float(fewer)))
            self._row({self._switches[i, name]: 1.0 for name in self._classes}, 1.0, np.inf)

    def _cards(self, name: str) -> dict[int, float]:
        return {o: float(option.tp) for o, option in enumerate(self._options) if option.hardware == name}

    def _mix(self, x: NDArray[np.float64]) -> Mix:
        teams: list[Team] = []
        for o, option in enumerate(self._options):
            count = round(float(x[o]))
            if not count:
                continue
            busy = 0.0
            kv = 0.0
            serves: dict[str, float] = {}
            for (k, other), each in self._table.items():
                share = float(x[self._shares[k, o]]) if other == o else 0.0
                if share > 1e-9:
                    bucket = self._demand.buckets[k]
                    busy += share * bucket.rate_per_s * each.seconds
                    kv += share * bucket.rate_per_s * each.kv_token_seconds / option.kv_tokens
                    serves[bucket.name] = share
            teams.append(Team(option=option, count=count, used=max(busy, kv) / count, serves=serves))
        return Mix(teams=tuple(teams), price_per_hour=sum(team.count * team.option.price_per_hour for team in teams))
