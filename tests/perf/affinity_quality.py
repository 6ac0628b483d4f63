"""What quantizing affinity costs: ladder and Bloom filter against an exact block index, on real traces.

    python tests/perf/affinity_quality.py [--seeds N | --ladders]

prints the tables of ``docs/affinity.md``; ``make bench ONLY=affinity_quality`` the same as JSON lines.

Two comparisons. *Replayed*: the whole trace, once routed by the table and once by the index. One other choice changes
all that follow, so two such runs differ by chance, too: by 1 to 3 % of the hit rate, and by a tenth of the mean time to
first token where single misses take seconds. *Decided*: at each request of the run that the index routes, the table is
asked as well, and what would have come of its choice is read off the true caches. There chance has no part.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from hashlib import shake_128
from typing import Any

import fleets
from affinity_index import ExactIndex, RoundedIndex, WatchedTable, Workload
from affinity_replay import Outcome, RivalOf, replay

from quartet_core.ladder import BLOCK_TOKENS, MAX_BLOCKS, rungs_within, sketch_tokens
from quartet_sim.prompts import prompt_ids
from quartet_sim.sessions import SESSION_BLOCK_TOKENS, agentic_sessions, overlay
from quartet_sim.traces import MOONCAKE_BLOCK_TOKENS, azure_conversation, mooncake_conversation, sped_up

SIZES = (8, 16, 32, 256)
SEEDS = {"mooncake": 3, "sessions": 1}
SESSION_GAP_S = 4_800.0
"""Mean time between two sessions' starts, times the number of workers: more workers, more sessions at once."""
MOST_TOKENS = 400_000
"""Longer prompts (35 of 6,588) fit into no card's memory."""
ENGINE_BLOCK_TOKENS = 16
SHARED_TOKENS = 1_536

Arrivals = list[tuple[float, int]]
ArrivalsOf = Callable[[int, int], Arrivals]
"""When prompts arrive, by seed and size of the fleet."""
Trace = tuple[Workload, ArrivalsOf]
EVERY_PROBE = {"max_probes": 1 << 20, "grain": 0}


def mooncake(count: int | None = None) -> Trace:
    """The conversation trace (its first ``count`` requests), at its own pace."""
    workload = Workload("mooncake")
    requests = mooncake_conversation()[:count]
    for each in requests:
        rungs = sketch_tokens(prompt_ids(each)).rungs
        blocks = each.blocks or ()
        workload.add(each.number, each.prompt_tokens, rungs, blocks, MOONCAKE_BLOCK_TOKENS, each.output_tokens)

    def at(seed: int, _workers: int) -> Arrivals:
        return [(each.at_s * 1000.0, each.number) for each in mooncake_conversation(seed)[: len(requests)]]

    return workload, at


def sessions() -> Trace:
    """The agentic sessions, started in a Poisson process."""
    workload = Workload("sessions")
    all_sessions = agentic_sessions()
    for session in all_sessions:
        noise: dict[int, bytes] = {}
        for each in session:
            if each.prompt_tokens > MOST_TOKENS:
                continue
            for block in each.blocks:
                if block not in noise:
                    noise[block] = shake_128(block.to_bytes(4, "little")).digest(SESSION_BLOCK_TOKENS * 4)
            rungs = sketch_tokens(b"".join(map(noise.__getitem__, each.blocks))).rungs
            blocks = each.blocks
            workload.add(each.number, each.prompt_tokens, rungs, blocks, SESSION_BLOCK_TOKENS, each.output_tokens)

    def at(seed: int, workers: int) -> Arrivals:
        requests = overlay(all_sessions, seed, mean_gap_s=SESSION_GAP_S / workers)
        return [(each.at_s * 1000.0, each.number) for each in requests if each.number in workload.prompts]

    return workload, at


def shared_prompt(speed: float, shared_tokens: int, count: int | None = None) -> tuple[Workload, Arrivals]:
    """Azure's conversations, each behind one system prompt of ``shared_tokens`` tokens or, where that is 0, behind one
    of the same length that nobody else has."""
    rng = random.Random(1)
    workload = Workload("shared prompt")
    requests = sped_up(azure_conversation()[:count], speed)
    shared_rungs = tuple(rng.getrandbits(64) for _ in range(rungs_within(shared_tokens)))
    shared_blocks = shared_tokens // SESSION_BLOCK_TOKENS
    fresh = shared_blocks
    for each in requests:
        tokens = SHARED_TOKENS + each.prompt_tokens
        rungs = shared_rungs + tuple(rng.getrandbits(64) for _ in range(rungs_within(tokens) - len(shared_rungs)))
        own = tokens // SESSION_BLOCK_TOKENS - shared_blocks
        blocks = [*range(shared_blocks), *range(fresh, fresh + own)]
        fresh += own
        workload.add(each.number, tokens, rungs, blocks, SESSION_BLOCK_TOKENS, each.output_tokens)
    return workload, [(each.at_s * 1000.0, each.number) for each in requests]


def fleet(workers: int) -> list[str]:
    """Hardware classes: one H100 to three L40S."""
    return [fleets.CLASSES[i % len(fleets.CLASSES)] for i in range(workers)]


def _every_probe(table: Any, index: ExactIndex) -> WatchedTable:
    return WatchedTable(table, index, EVERY_PROBE)


def _as_routed(table: Any, index: ExactIndex) -> WatchedTable:
    return WatchedTable(table, index, {})


def _rounded(depths: list[int]) -> RivalOf:
    return lambda _table, index: RoundedIndex(index, depths)


def octaves(rungs: int, step_tokens: int = MAX_BLOCKS * BLOCK_TOKENS) -> RivalOf:
    """The exact index, rounded to a ladder of ``rungs`` rungs to the octave and no step above ``step_tokens``."""
    blocks = [1]
    while blocks[-1] < MAX_BLOCKS:
        last = blocks[-1]
        blocks.append(min(max(last + 1, int(last * 2 ** (1 / rungs))), last + step_tokens // BLOCK_TOKENS))
    return _rounded([BLOCK_TOKENS * each for each in blocks])


RIVALS: dict[str, RivalOf] = {
    "table": _as_routed, "every probe": _every_probe, "steps uncapped": octaves(8),
}  # fmt: skip


LADDERS: dict[str, RivalOf] = {
    "table": _as_routed, "8 to the octave, uncapped": octaves(8), "16 to the octave, uncapped": octaves(16),
    "32 to the octave, uncapped": octaves(32), "steps of at most 8,192": octaves(8, 8_192),
    "steps of at most 4,096": octaves(8, 4_096), "steps of at most 2,048": octaves(8, 2_048),
    "steps of at most 1,024": octaves(8, 1_024),
}  # fmt: skip


def _pct(value: float, of: float) -> float:
    return round(100.0 * (value / of - 1.0), 3)


def _pairs(outcome: Outcome, rival: str) -> Iterator[tuple[int, int]]:
    return zip(outcome.chosen.slots, outcome.rivals[rival].slots, strict=True)


def _line(trace: str, workers: int, by_table: Sequence[Outcome], by_index: Sequence[Outcome]) -> dict[str, Any]:
    """One size's figures over all seeds."""

    def mean(outcomes: Sequence[Outcome], name: str) -> float:
        return float(sum(getattr(outcome, name) for outcome in outcomes) / len(outcomes))

    line: dict[str, Any] = {
        "bench": "affinity_quality",
        "config": {"part": "trace", "trace": trace, "workers": workers},
        "hit_rate": round(mean(by_table, "hit_rate"), 4),
        "exact_hit_rate": round(mean(by_index, "hit_rate"), 4),
        "mean_ttft_ms": round(mean(by_table, "mean_ttft_ms"), 1),
        "exact_mean_ttft_ms": round(mean(by_index, "mean_ttft_ms"), 1),
        "false_holders_per_lookup": round(mean(by_table, "false_holders") / mean(by_table, "lookups"), 6),
        "table_mb": round(mean(by_table, "table_bytes") / 2**20, 2),
        "index_mb": round(mean(by_index, "index_bytes") / 2**20, 2),
        "runs": len(by_table),
    }
    found = sum(outcome.chosen.found_tokens for outcome in by_index)
    ttft_ms = sum(outcome.chosen.ttft_ms for outcome in by_index)
    for name in RIVALS:
        key = name.replace(" ", "_").replace(",", "")
        rivals = [outcome.rivals[name] for outcome in by_index]
        slots = [(mine, its) for outcome in by_index for mine, its in _pairs(outcome, name)]
        line[f"{key}_decided_elsewhere_pct"] = round(100.0 * sum(a != b for a, b in slots) / len(slots), 2)
        line[f"{key}_decided_hit_pct"] = _pct(sum(rival.found_tokens for rival in rivals), found)
        line[f"{key}_decided_ttft_pct"] = _pct(sum(rival.ttft_ms for rival in rivals), ttft_ms)
    return line


def run_trace(trace: Trace, sizes: Sequence[int], seeds: int) -> Iterator[dict[str, Any]]:
    """One line a size."""
    workload, arrivals_of = trace
    block_tokens = next(iter(workload.prompts.values())).block_tokens
    for workers in sizes:
        by_table, by_index = [], []
        for seed in range(1, seeds + 1):
            arrivals = arrivals_of(seed, workers)
            by_table.append(replay(workload, arrivals, fleet(workers)))
            by_index.append(replay(workload, arrivals, fleet(workers), exact=True, rivals=RIVALS))
        line = _line(workload.name, workers, by_table, by_index)
        # An engine's own blocks are smaller than those that the trace tells: so many more entries in an index.
        line["index_of_engine_blocks_mb"] = round(line["index_mb"] * block_tokens / ENGINE_BLOCK_TOKENS, 1)
        yield line


def run_ladders(sizes: Sequence[int] = (8, 32)) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Other ladders on the session trace: for each, by size, what its choices change (hits %, TTFT %)."""
    workload, arrivals_of = sessions()
    outcomes = [replay(workload, arrivals_of(1, n), fleet(n), exact=True, rivals=LADDERS) for n in sizes]
    for name in LADDERS:
        rivals = [(outcome.rivals[name], outcome.chosen) for outcome in outcomes]
        yield (
            name,
            [
                (_pct(rival.found_tokens, chosen.found_tokens), _pct(rival.ttft_ms, chosen.ttft_ms))
                for rival, chosen in rivals
            ],
        )


def run_shared(speeds: Sequence[float] = (1.0, 4.0), workers: int = 16) -> Iterator[dict[str, Any]]:
    """How requests that share a system prompt spread over equal workers, beside the same ones that share none."""
    for speed in speeds:
        for shared_tokens in (0, SHARED_TOKENS):
            workload, arrivals = shared_prompt(speed, shared_tokens)
            outcome = replay(workload, arrivals, ["L40S_PCIE"] * workers)
            yield {
                "bench": "affinity_quality",
                "config": {"part": "shared", "workers": workers, "shared_tokens": shared_tokens, "speed": speed},
                "most_over_mean": round(max(outcome.requests) * workers / sum(outcome.requests), 3),
                "least_over_mean": round(min(outcome.requests) * workers / sum(outcome.requests), 3),
                "hit_rate": round(outcome.hit_rate, 4),
                "mean_ttft_ms": round(outcome.mean_ttft_ms, 1),
                "runs": 1,
            }


def run(seeds: int = 0) -> Iterator[dict[str, Any]]:
    """All lines; ``seeds`` 0 takes as many as fit into five minutes."""
    for trace in (mooncake, sessions):
        made = trace()
        yield from run_trace(made, SIZES, seeds or SEEDS[made[0].name])
    yield from run_shared()


def _print(line: dict[str, Any]) -> None:
    config = line["config"]
    if config["part"] == "shared":
        cells = [
            f"{config['speed']:g}x", f"{config['shared_tokens']:,}", f"{line['most_over_mean']:.2f}",
            f"{line['least_over_mean']:.2f}", f"{line['hit_rate']:.3f}", f"{line['mean_ttft_ms']:.0f}",
        ]  # fmt: skip
    else:
        cells = [
            config["trace"], f"{config['workers']}", f"{line['hit_rate']:.4f} / {line['exact_hit_rate']:.4f}",
            f"{line['mean_ttft_ms']:.0f} / {line['exact_mean_ttft_ms']:.0f}",
            f"{line['table_decided_elsewhere_pct']:.2f}",
            *(
                f"{line[key + '_decided_hit_pct']:+.2f} / {line[key + '_decided_ttft_pct']:+.2f}"
                for key in ("table", "every_probe", "steps_uncapped")
            ),
            f"{line['false_holders_per_lookup']:.5f}",
            f"{line['table_mb']:.1f} / {line['index_mb']:.1f} / {line['index_of_engine_blocks_mb']:.0f}",
        ]  # fmt: skip
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=0, help="replays of each trace and size")
    parser.add_argument("--ladders", action="store_true", help="compare other ladders instead")
    arguments = parser.parse_args()
    if arguments.ladders:
        for name, figures in run_ladders():
            print(f"| {name} | {' | '.join(f'{hits:+.2f} / {ttft:+.2f}' for hits, ttft in figures)} |")
    else:
        for each in run(arguments.seeds):
            _print(each)
