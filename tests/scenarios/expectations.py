"""What a story expects, checked against what was heard, told to clients, and kept by the services."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from scenarios.sent import Sent
from scenarios.story import Expect
from scenarios.world import World

from quartet_bus.messages import Phase, Prefill, Role
from quartet_core.word import FREE_KV, free_kv_fraction

_MIB = 1024 * 1024


def unmet(world: World, expect: Expect, fresh: list[Sent]) -> list[str]:
    """What of ``expect`` does not hold now, each as one sentence; ``fresh`` are the requests of this step."""
    about = world.named(expect.of) if expect.of else fresh or world.sent
    found = [*_of_places(world, expect, about), *_of_ways(world, expect, about)]
    found += [*_of_outcomes(expect, about), *_of_predictions(world, expect, about)]
    return [*found, *_of_services(world, expect), *_of_operators(world, expect), *_of_transfers(world, expect)]


def _of_places(world: World, expect: Expect, about: list[Sent]) -> Iterator[str]:
    last = [runs[-1].worker for sent in about if (runs := world.witness.runs(sent.id))]
    counts = Counter(last)
    among = Counter({worker: 0 for router in world.routers[:1] for worker in _workers(router)})
    among.update(counts)
    told = dict(counts.most_common(8))
    if isinstance(expect.on, str):
        wrong = [worker for worker in last if not fnmatchcase(worker, expect.on)]
        if wrong or len(last) < len(about):
            yield f"all {len(about)} should be on {expect.on}; they are on {told}"
    elif expect.on is not None:
        for pattern, number in expect.on.items():
            there = sum(count for worker, count in counts.items() if fnmatchcase(worker, pattern))
            least, most = (number, number) if isinstance(number, int) else number
            if not least <= there <= most:
                yield f"{number} should be on {pattern}, not {there}: {told}"
    if expect.never_on is not None:
        there = [run.worker for sent in about for run in world.witness.runs(sent.id)]
        if any(fnmatchcase(worker, expect.never_on) for worker in there):
            yield f"none should be on {expect.never_on}: {told}"
    if expect.most_on_one is not None and max(among.values(), default=0) > expect.most_on_one:
        yield f"at most {expect.most_on_one} should be on any worker: {told}"
    if expect.least_on_one is not None and min(among.values(), default=0) < expect.least_on_one:
        yield f"at least {expect.least_on_one} should be on every worker: {dict(among)}"


def _of_ways(world: World, expect: Expect, about: list[Sent]) -> Iterator[str]:
    witness = world.witness
    tries = {sent.id: [run.worker for run in witness.runs(sent.id)] for sent in about}
    if expect.tries is not None and any(len(workers) != expect.tries for workers in tries.values()):
        yield f"each should have been tried {expect.tries} times: {tries}"
    if expect.retried_elsewhere is not None:
        again = [id for id, workers in tries.items() if len(set(workers)) < len(workers)]
        if again:
            yield f"no worker should be tried twice: {[tries[id] for id in again]}"
    if expect.sent is not None:
        number = sum(bool(workers) for workers in tries.values())
        if number != expect.sent:
            yield f"{expect.sent} should have been dispatched, not {number}"
    if expect.order is not None:
        names = [run.stream.id for run in witness.dispatches if not isinstance(run, Prefill)]
        names = [name for name in names if name in expect.order]
        if names != expect.order:
            yield f"they should leave in the order {expect.order}, not {names}"
    if expect.was_held is not None:
        number = sum(bool(witness.said(sent.id, Phase.HELD)) for sent in about)
        if number != expect.was_held:
            yield f"{expect.was_held} should have been held, not {number}"
    if expect.split is not None:
        split = [bool(runs := witness.runs(sent.id)) and runs[-1].split is not None for sent in about]
        if any(each != expect.split for each in split):
            yield f"split should be {expect.split}: {split}"
    if expect.cancelled_on is not None:
        ids = {sent.id for sent in about}
        told = sorted({worker for worker, cancel in witness.cancels if cancel.id in ids})
        if told != sorted(expect.cancelled_on):
            yield f"cancels should reach {expect.cancelled_on}, and reached {told}"


def _of_outcomes(expect: Expect, about: list[Sent]) -> Iterator[str]:
    statuses = Counter("open" if sent.status is None else str(sent.status) for sent in about)
    codes = Counter(sent.code for sent in about if sent.code)
    if expect.answers is not None and dict(statuses) != expect.answers:
        yield f"answers should be {expect.answers}, not {dict(statuses)} ({dict(codes)})"
    if expect.code is not None and set(codes) != {expect.code}:
        yield f"the error should be {expect.code}, not {dict(codes)}"
    if expect.param is not None and any(sent.param != expect.param for sent in about):
        yield f"the error should name {expect.param}, not {[sent.param for sent in about]}"
    if expect.retry_after is not None and any((sent.retry_after_s > 0) != expect.retry_after for sent in about):
        yield f"whether to retry should be said: {expect.retry_after}"
    if expect.ends_with is not None and any(sent.last != expect.ends_with for sent in about):
        yield f"the stream should end with {expect.ends_with}, not {[sent.last for sent in about]}"
    if expect.within_ms is not None:
        late = [sent.id for sent in about if sent.end_ms is None or sent.end_ms > expect.within_ms]
        if late:
            yield f"all should be over within {expect.within_ms} ms; late: {late[:8]} of {len(late)}"
    times = [math.inf if sent.first_token_ms is None else sent.first_token_ms for sent in about]
    if expect.first_token_ms is not None:
        least, most = expect.first_token_ms
        if not all(least <= time <= most for time in times):
            yield f"first tokens should come after {least} to {most} ms: {[round(time, 2) for time in times]}"
    if expect.slowest_first_token_ms is not None and max(times) > expect.slowest_first_token_ms:
        yield f"no first token should take more than {expect.slowest_first_token_ms} ms; one took {max(times):.0f}"


def _of_predictions(world: World, expect: Expect, about: list[Sent]) -> Iterator[str]:
    witness = world.witness
    for wanted, phase, what in (
        (expect.believed_cached, Phase.DISPATCHED, "believed"),
        (expect.really_cached, Phase.END, "found by the engine"),
    ):
        if wanted is None:
            continue
        events = [
            said[-1]
            for sent in about
            if (said := [e for e in witness.said(sent.id, phase) if e.role is not Role.DECODE])
        ]
        cached = [event.cached_tokens for event in events]
        if len(cached) < len(about) or not all(wanted[0] <= tokens <= wanted[1] for tokens in cached):
            yield f"cached tokens {what} should be {wanted}: {cached}"


def _of_services(world: World, expect: Expect) -> Iterator[str]:
    routers = world.routers
    for name, wanted, numbers in (
        ("ledger entries", expect.ledger, [len(router.routing.ledger) for router in routers]),
        ("flights", expect.flights, [len(router._flights) for router in routers]),
        ("held requests", expect.held, [len(router._desk.holds) for router in routers]),
    ):
        if wanted is not None and sum(numbers) != wanted:
            yield f"there should be {wanted} {name}: {numbers}"
    for what, wanted, there in (
        ("run on engines", expect.on_engines, sum(engine.running for engine in world.engines)),
        ("be aborted on engines", expect.aborted, sum(len(engine.aborted) for engine in world.engines)),
    ):
        if wanted is not None and wanted != there:
            yield f"{wanted} requests should {what}: {there}"
    if expect.running is not None:
        numbers = _running(world)
        if sum(numbers.values()) != expect.running:
            yield f"agents should run {expect.running} requests: {numbers}"
    for pattern, (least, most) in (expect.batch or {}).items():
        routing = routers[0].routing
        for worker in _workers(routers[0]):
            if fnmatchcase(worker, pattern):
                batch = routing.board.loads[routing.fleet.slot_of(worker)].batch
                if not least <= batch <= most:
                    yield f"the batch of {worker} should be believed to be {least} to {most}, not {batch}"
    for pattern, (least, most) in (expect.free_kv or {}).items():
        fleet = routers[0].routing.fleet
        for worker in _workers(routers[0]):
            if fnmatchcase(worker, pattern):
                free = free_kv_fraction(FREE_KV.of(fleet.planes.word(fleet.slot_of(worker)) or 0))
                if not least <= free <= most:
                    yield f"the free KV of {worker} should be believed to be {least} to {most}, not {free:.3f}"
    for name, wanted in (expect.metrics or {}).items():
        value = _metric(world, name)
        holds = value > float(wanted.removeprefix("> ")) if isinstance(wanted, str) else value == wanted
        if not holds:
            yield f"{name} should be {wanted}, not {value}"
    for name, ready in (expect.ready or {}).items():
        reason = world.services()[name].not_ready()
        if (reason is None) != ready:
            yield f"{name} should be {'ready' if ready else 'not ready'}; it says {reason!r}"
    if expect.affinity_mib is not None:
        used = sum(map(sys.getsizeof, world.routers[0].routing.affinity._planes)) / _MIB
        if used > expect.affinity_mib:
            yield f"affinity should take at most {expect.affinity_mib} MiB, not {used:.1f}"


def _of_operators(world: World, expect: Expect) -> Iterator[str]:
    alarms = [call.args[0] for call in world.agents_log.calls if call.method_name == "error"]
    if expect.alarms is not None and len(alarms) != expect.alarms:
        yield f"there should have been {expect.alarms} alarms: {alarms}"
    if expect.degraded is not None:
        workers = [worker for agent in world.agents() for worker in agent.workers.values()]
        seen = {worker.id: worker.adapter.diagnose() for worker in workers}
        degraded = {name: f"{told.metrics}: {', '.join(told.degraded)}" for name, told in seen.items() if told.degraded}
        if degraded != expect.degraded:
            yield f"degraded should be {expect.degraded}, not {degraded}"


def _of_transfers(world: World, expect: Expect) -> Iterator[str]:
    moved = dict(Counter(report.link for report in world.witness.moved))
    if expect.moved_over is not None and moved != expect.moved_over:
        yield f"KV should have been moved over {expect.moved_over}, not {moved}"
    reasons = dict(Counter(report.detail.partition(":")[0] for report in world.witness.not_moved))
    if expect.not_moved is not None and reasons != expect.not_moved:
        yield f"transfers should have failed for {expect.not_moved}, not {reasons}"
    if expect.leased is not None:
        assert world.real is not None, "played agents lease nothing"
        held = {
            name: len(each.arrivals) + len(each.departures)
            for name, each in world.real.services.items()
            if hasattr(each, "arrivals")
        }
        if sum(held.values()) != expect.leased:
            yield f"{expect.leased} leases should be held: {held}"


def _workers(router) -> list[str]:
    return [worker.id for worker in router.routing.fleet.workers if worker is not None]


def _running(world: World) -> dict[str, int]:
    if world.real is not None:
        return {name: each.streams.running for name, each in world.real.services.items() if hasattr(each, "streams")}
    assert world.players is not None
    return {name: len(played.runs) for name, played in world.players.workers.items()}


def _metric(world: World, name: str) -> float:
    """Summed over routers and gateway; a metric that is not there is 0, and one that cannot be there an error."""
    family = name.partition("{")[0].removesuffix("_total")
    lines = [line for each in world.metrics() for line in each.splitlines()]
    if not any(line.startswith(f"# HELP {family}") for line in lines):
        raise AssertionError(f"no service has a metric {name}")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)
