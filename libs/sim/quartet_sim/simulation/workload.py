"""Requests from traces: which part of a trace, how fast, for which models, under which targets.

``Workload`` says what is wanted; ``requests`` makes it. Same workload and seed, same requests.

Three things no trace says are drawn here, by the seed: which model a conversation asks (by ``Part.models``; requests
that share two blocks ask the same), which SLO class a request is of, and what the client allows the answer at most
(``max_tokens``): 4,096 for three of ten, else the next power of two above 1.2 times the answer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import Final

from msgspec import Struct, structs

from quartet_sim import servegen, sessions, traces
from quartet_sim.simulation.spec import INTERACTIVE, RELAXED, Request, Slo
from quartet_sim.traces import MOONCAKE_BLOCK_TOKENS, WrongTrace

THINK_CAP_S: Final = 60.0
"""Nobody waits longer between two requests of a session here: half an hour's pause is another day's load."""

_ALLOWED: Final = 4096
_SHIPPED: Final = ("azure-conv", "azure-code", "mooncake", "sessions", "servegen:SERVICE")
_FILES: Final = ("azure:FILE", "mooncake:FILE", "sessions:FILE", "servegen:SERVICE:RATES:LENGTHS")


class Part(Struct, frozen=True, kw_only=True):
    """One trace's part in a workload.

    ``trace`` names a trace that comes with Quartet (``azure-conv``, ``azure-code``, ``mooncake``, ``sessions``,
    ``servegen:m-mid`` and its like) or a file (``azure:FILE``, ``mooncake:FILE``, ``sessions:FILE``,
    ``servegen:SERVICE:RATES:LENGTHS``). The trace's seconds ``[start_s, start_s + length_s)`` are taken and played
    ``speed`` times as fast, or, with ``rate_per_s``, as fast as gives that mean rate (ServeGen's clients are not played
    faster but scaled, and need a rate). Sessions are started at ``rate_per_s`` sessions a second for ``length_s`` (at
    0.1 without), and every later request of one comes when the one before has ended and its pause is over.
    ``models`` are who is asked, with weights. Requests of more than ``most_tokens`` in all are left out. All of it
    begins ``after_s`` into the workload.
    """

    trace: str
    start_s: float = 0.0
    length_s: float = 600.0
    speed: float = 1.0
    rate_per_s: float = 0.0
    models: tuple[tuple[str, float], ...] = (("llama-3.1-8b", 1.0),)
    most_tokens: int = 131_072
    after_s: float = 0.0


class Workload(Struct, frozen=True, kw_only=True):
    """Parts that are played together, and the SLO classes that are drawn for their requests by ``share``."""

    parts: tuple[Part, ...]
    slos: tuple[Slo, ...] = (INTERACTIVE, RELAXED)

    def faster(self, factor: float) -> "Workload":
        """The same, ``factor`` times as many requests a second."""
        return structs.replace(
            self,
            parts=tuple(
                structs.replace(part, rate_per_s=part.rate_per_s * factor)
                if part.rate_per_s
                else structs.replace(part, speed=part.speed * factor)
                for part in self.parts
            ),
        )


class _Raw(Struct, frozen=True):
    """A request before anything is drawn for it. ``kin`` is equal for requests that must ask the same model."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    kin: int
    tenant: str
    units: tuple[int, ...] = ()
    unit_tokens: int = MOONCAKE_BLOCK_TOKENS
    session: int = -1
    number: int = -1
    follows: int = -1
    think_ms: float = 0.0


def requests(workload: Workload, seed: int) -> list[Request]:
    """The requests of ``workload``, in order of arrival, numbered from 0. Raises ``WrongTrace``."""
    if not workload.parts:
        raise WrongTrace("none", f"a workload has at least one trace: {', '.join((*_SHIPPED, *_FILES))}")
    drawn: list[tuple[float, int, _Raw, str, Slo, int]] = []
    for place, part in enumerate(workload.parts):
        random = Random(f"{seed} {place} {part.trace}")
        chosen: dict[int, tuple[str, Slo]] = {}
        left_out: set[int] = set()
        for raw in _raw(part, place, seed):
            if raw.prompt_tokens + raw.output_tokens > part.most_tokens or raw.follows in left_out:
                if raw.number >= 0:
                    left_out.add(raw.number)  # and what follows it: the session ends here
                continue
            model, slo = chosen.get(raw.kin) or (_weighted(random, part.models), _of_share(random, workload.slos))
            if raw.session >= 0 or raw.units:
                known = chosen.setdefault(raw.kin, (model, slo))
                model = known[0]
                slo = known[1] if raw.session >= 0 else _of_share(random, workload.slos)
            drawn.append((part.after_s * 1e3 + raw.at_ms, place, raw, model, slo, _allowed(random, raw.output_tokens)))
    drawn.sort(key=lambda each: each[0])
    numbers = {(place, raw.number): number for number, (_, place, raw, *_) in enumerate(drawn) if raw.number >= 0}
    made = []
    for number, (at_ms, place, raw, model, slo, allowed) in enumerate(drawn):
        follows = numbers.get((place, raw.follows), -1)
        made.append(
            Request(
                number=number,
                at_ms=at_ms,
                model=model,
                prompt_tokens=raw.prompt_tokens,
                output_tokens=raw.output_tokens,
                slo=slo,
                max_tokens=allowed,
                tenant=raw.tenant,
                units=raw.units,
                unit_tokens=raw.unit_tokens,
                follows=follows,
                think_ms=raw.think_ms,
                session=raw.session,
            )
        )
    if not made:
        raise WrongTrace(workload.parts[0].trace, "no requests in the part that was asked for")
    return made


def _raw(part: Part, place: int, seed: int) -> Iterable[_Raw]:
    if part.length_s <= 0 or part.speed <= 0 or part.rate_per_s < 0:
        raise WrongTrace(
            part.trace,
            f"length {part.length_s:g} s, speed {part.speed:g}, rate {part.rate_per_s:g}/s; all are positive",
        )
    kind, _, rest = part.trace.partition(":")
    if kind == "servegen":
        return _of_clients(part, rest, seed)
    if kind == "sessions":
        return _of_sessions(part, place, rest, seed)
    return _of_trace(part, place, _reader(part.trace, kind, rest), seed)


def _reader(trace: str, kind: str, path: str) -> Callable[[int], Sequence[traces.TraceRequest]]:
    if kind in ("azure-conv", "azure-code", "mooncake") and not path:
        return lambda seed: _shipped(kind, seed if kind == "mooncake" else 0)
    if kind == "azure" and path:
        return lambda seed: traces.azure(path)
    if kind == "mooncake":
        return lambda seed: traces.mooncake(path, seed)
    raise WrongTrace(trace, f"no such trace; there are: {', '.join((*_SHIPPED, *_FILES))}")


@lru_cache(maxsize=8)
def _shipped(kind: str, seed: int) -> Sequence[traces.TraceRequest]:
    if kind == "mooncake":
        return traces.mooncake_conversation(seed)
    return traces.azure_conversation() if kind == "azure-conv" else traces.azure_code()


def _of_trace(
    part: Part, place: int, read: Callable[[int], Sequence[traces.TraceRequest]], seed: int
) -> Iterator[_Raw]:
    rows = [row for row in read(seed) if part.start_s <= row.at_s < part.start_s + part.length_s]
    if not rows:
        raise WrongTrace(part.trace, f"no request from {part.start_s:g} to {part.start_s + part.length_s:g} s")
    speed = part.rate_per_s * part.length_s / len(rows) if part.rate_per_s else part.speed
    base = place << 48  # ids of two parts never meet
    for row in rows:
        blocks = row.blocks or ()
        # The last block is not whole, and nobody else's.
        units = tuple(base + block for block in blocks[: row.prompt_tokens // MOONCAKE_BLOCK_TOKENS])
        yield _Raw(
            at_ms=(row.at_s - part.start_s) * 1e3 / speed,
            prompt_tokens=row.prompt_tokens,
            output_tokens=max(row.output_tokens, 1),
            # In Mooncake's trace everybody's first block is the same: conversations differ from the second on.
            kin=blocks[min(1, len(blocks) - 1)] if blocks else -1 - row.number,
            tenant=part.trace,
            units=units,
        )


def _of_clients(part: Part, rest: str, seed: int) -> Iterator[_Raw]:
    service, _, files = rest.partition(":")
    rates, _, lengths = files.partition(":")
    if not service:
        raise WrongTrace(part.trace, "name a service: servegen:m-small, m-mid, m-large, deepseek-r1 or mm-image")
    made = servegen.requests(
        service, seed, start_s=part.start_s, length_s=part.length_s, rate_per_s=part.rate_per_s or 1.0,
        rates=rates, lengths=lengths,
    )  # fmt: skip
    for row in made:
        yield _Raw(
            at_ms=row.at_s * 1e3 / part.speed,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            kin=-1 - row.number,
            tenant=f"{service}-{row.client}",
        )


def _of_sessions(part: Part, place: int, path: str, seed: int) -> Iterator[_Raw]:
    """Sessions, started in a Poisson process for ``length_s``. A session is played from its ``start_s`` on."""
    read = sessions.session_file(path) if path else sessions.agentic_sessions()
    random = Random(f"{seed} {place} sessions")
    random.shuffle(read)
    base, rate = place << 48, part.rate_per_s or 0.1
    start_s, turn = 0.0, 0
    while (start_s := start_s + random.expovariate(rate)) < part.length_s:
        session = read[turn % len(read)]
        again = turn // len(read)  # the same session once more is another conversation
        turn += 1
        first = True
        for row in session:
            if row.at_s < part.start_s:
                continue
            shared = row.shared_blocks
            private = base + (again << 40)
            yield _Raw(
                at_ms=start_s * 1e3 / part.speed + (row.at_s - part.start_s) / 1e3,
                prompt_tokens=row.prompt_tokens,
                output_tokens=max(row.output_tokens, 1),
                kin=turn,
                tenant="sessions",
                units=(
                    *(base + block for block in row.blocks[:shared]),
                    *(private + block for block in row.blocks[shared:]),
                ),
                unit_tokens=sessions.SESSION_BLOCK_TOKENS,
                session=turn,
                number=(again << 32) + row.number,
                follows=-1 if first else (again << 32) + row.follows,
                think_ms=min(row.think_s, THINK_CAP_S) * 1e3,
            )
            first = False


def _weighted(random: Random, models: tuple[tuple[str, float], ...]) -> str:
    if len(models) == 1:
        return models[0][0]
    return random.choices([name for name, _ in models], [weight for _, weight in models])[0]


def _of_share(random: Random, slos: tuple[Slo, ...]) -> Slo:
    return slos[0] if len(slos) == 1 else random.choices(slos, [slo.share for slo in slos])[0]


def _allowed(random: Random, output_tokens: int) -> int:
    if random.random() < 0.3:
        return max(_ALLOWED, output_tokens)
    return 1 << max(0, int(1.2 * output_tokens)).bit_length()
