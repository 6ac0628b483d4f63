"""The simulated engine against measured serving: closed loops on H100 (``data/hardware/h100_measured_serving.csv``).

Every measured row (vLLM, a model and precision we have a profile for) is played: so many clients, prompts and answers
of the same length for all, each client sending its next request when its answer is complete. The first round, in which
all come at once, is not counted. The profiles' engine overhead was fitted to the time per token of rows with up to 16
clients (``quartet_sim.fit``); everything else here, all times to first token among it, was not.
"""

from heapq import heapify, heappop, heappush
from statistics import fmean, median

from msgspec import Struct

from quartet_core.catalogue import Catalogue, ProfileKey, builtin
from quartet_sim.measured import ServedRow, served_rows
from quartet_sim.simulation.engine import SkippingEngine
from quartet_sim.simulation.work import FINISHED, FIRST, Work

_ROUNDS = 6
_BANDS = ((1, 8), (9, 32), (33, 128), (129, 100_000))


class Error(Struct, frozen=True):
    """One measured row and what the simulated engine makes of it."""

    key: ProfileKey
    row: ServedRow
    ttft_ms: float
    tpot_ms: float

    @property
    def ttft_error(self) -> float:
        """Simulated over measured, less one."""
        return self.ttft_ms / self.row.ttft_ms - 1.0

    @property
    def tpot_error(self) -> float:
        """Simulated over measured, less one."""
        return self.tpot_ms / self.row.tpot_ms - 1.0


def errors(catalogue: Catalogue | None = None) -> list[Error]:
    """All measured rows, by profile and concurrency."""
    catalogue = catalogue or builtin()
    found = []
    for key, rows in sorted(served_rows().items()):
        if key not in catalogue.profiles:
            continue
        for row in rows:
            ttft_ms, tpot_ms = closed_loop(catalogue, key, row)
            found.append(Error(key, row, ttft_ms, tpot_ms))
    return found


def closed_loop(catalogue: Catalogue, key: ProfileKey, row: ServedRow) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) that the clients of ``row`` see of one engine, in ms."""
    engine = SkippingEngine(
        catalogue.profile(*key), kv_tokens=catalogue.kv_capacity_tokens(*key), max_batch=max(256, row.concurrency)
    )
    engine_clock_ms = 0.0
    arrivals = [(0.0, client, 0) for client in range(row.concurrency)]
    heapify(arrivals)
    firsts: dict[int, float] = {}
    sent: dict[int, tuple[float, int, int]] = {}
    ttft: list[float] = []
    tpot: list[float] = []
    keys = 0
    while arrivals or engine.next_ms < float("inf"):
        if arrivals and arrivals[0][0] <= engine.next_ms:
            at_ms, client, round_ = heappop(arrivals)
            keys += 1
            sent[keys] = (at_ms, client, round_)
            engine.submit(Work(keys, row.prompt_tokens, row.output_tokens), at_ms)
            continue
        engine_clock_ms = engine.next_ms
        for what, work in engine.advance():
            at_ms, client, round_ = sent[work.key]
            if what == FIRST:
                firsts[work.key] = engine_clock_ms
            elif what == FINISHED:
                first_ms = firsts.pop(work.key)
                if round_:
                    ttft.append(first_ms - at_ms)
                    tpot.append((engine_clock_ms - first_ms) / max(row.output_tokens - 1, 1))
                if round_ + 1 < _ROUNDS:
                    heappush(arrivals, (engine_clock_ms, client, round_ + 1))
    return fmean(ttft), fmean(tpot)


def report(found: list[Error]) -> str:
    """The table of errors, by profile and number of clients: the median of simulated over measured less one, and the
    median and 90th percentile of how large that is."""
    lines = [
        "simulated engine against measured vLLM on H100, closed loop; errors in %, simulated over measured",
        f"{'profile':<34} {'clients':>9} {'rows':>5} {'TTFT bias':>10} {'median':>7} {'p90':>6}"
        f" {'TPOT bias':>10} {'median':>7} {'p90':>6}",
    ]
    keys = sorted({error.key for error in found})
    for key in keys:
        for low, high in _BANDS:
            these = [e for e in found if e.key == key and low <= e.row.concurrency <= high]
            if these:
                clients = f"{low} to {high}" if high < 100_000 else f"over {low - 1}"
                lines.append(_line(f"{'/'.join(key[:3])}/tp{key[3]}", clients, these))
    lines.append(_line("all", "", found))
    return "\n".join(lines)


def _line(name: str, clients: str, errors: list[Error]) -> str:
    ttft = sorted(abs(error.ttft_error) for error in errors)
    tpot = sorted(abs(error.tpot_error) for error in errors)
    high = min(len(errors) - 1, int(0.9 * len(errors)))
    return (
        f"{name:<34} {clients:>9} {len(errors):>5}"
        f" {100 * median(e.ttft_error for e in errors):>+10.0f} {100 * median(ttft):>7.0f} {100 * ttft[high]:>6.0f}"
        f" {100 * median(e.tpot_error for e in errors):>+10.0f} {100 * median(tpot):>7.0f} {100 * tpot[high]:>6.0f}"
    )
