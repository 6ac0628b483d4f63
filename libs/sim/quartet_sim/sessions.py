"""Agentic coding sessions: long conversations with tools, whose every turn resends all that came before.

Source and what was changed: ``data/traces/ATTRIBUTION.md``. The trace knows no absolute start of a session, and block
ids mean nothing outside of their own; both are made here:

- ``overlay`` starts the sessions in a seeded Poisson process.
- Prompts begin with the tools' descriptions, then the system prompt. Agents whose tools have equally many tokens are
  taken to have the same tools, and if their system prompts are as long as each other's too, the same of those. Whole
  blocks within these parts get the ids of the first agent that has them, model by model. Everything else is private.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Final

import msgspec
from msgspec import Struct, field

from quartet_sim.traces import WrongTrace, file_lines, shipped

SESSION_BLOCK_TOKENS: Final = 64

_Label = tuple[str, int, int, int, int]
"""(model, session or −1, tool tokens, system tokens, block): a block by what makes it different from all others."""


class SessionRequest(Struct, frozen=True):
    """One request of a session, or of an agent that it started.

    ``at_s`` counts from the session's start until ``overlay`` makes it absolute. ``blocks`` are ids of the prompt's
    whole 64-token blocks: an equal id is an equal prefix of the same model up to and including that block. The first
    ``shared_blocks`` are tools and system prompt, which other sessions may have too. ``follows`` is the number of the
    request before it of the same agent (of a nested agent's first one, of the agent that started it), −1 for a
    session's first; ``think_s`` is how long after that one's end it came: tools ran, or a person read.
    """

    number: int
    session: int
    model: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: "array[int]"
    shared_blocks: int
    follows: int = -1
    think_s: float = 0.0


class _Row(Struct):
    """A request, or with ``requests`` a nested agent, whose times count from its own ``t``."""

    t: float
    type: str
    model: str = ""
    prompt_tokens: int = field(default=0, name="in")
    output_tokens: int = field(default=0, name="out")
    hash_ids: tuple[int, ...] = ()
    requests: "tuple[_Row, ...]" = ()
    tool_tokens: int = 0
    system_tokens: int = 0
    think_time: float = 0.0


class _Session(Struct):
    tool_tokens: int
    system_tokens: int
    requests: tuple[_Row, ...]


def agentic_sessions() -> list[list[SessionRequest]]:
    """96 sessions of 6,588 requests in all, each in order of arrival, in times from its own start."""
    name = "agentic_claude_code_sessions.jsonl.gz"
    return _read(shipped(name), name)


def session_file(path: str) -> list[list[SessionRequest]]:
    """Sessions of a file as kv-cache-tester's, one JSON object a line. Raises ``WrongTrace``."""
    return _read(file_lines(path), path)


def _read(lines: Iterable[bytes], where: str) -> list[list[SessionRequest]]:
    decoder = msgspec.json.Decoder(_Session)
    numbers, ids = count(), _Ids()
    sessions: list[list[SessionRequest]] = []
    for number, line in enumerate(lines, 1):
        try:
            session = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise WrongTrace(f"{where}, line {number}", str(error)) from None
        requests = _requests(
            len(sessions), 0.0, session.tool_tokens, session.system_tokens, session.requests, ids, numbers
        )
        sessions.append(sorted(requests, key=lambda request: request.at_s))
    return sessions


def overlay(sessions: Iterable[Sequence[SessionRequest]], seed: int, *, mean_gap_s: float) -> list[SessionRequest]:
    """All requests in order of arrival, the sessions started one after another in an order and at times by ``seed``.

    Gaps between starts are exponential: a Poisson process. Raises ``ValueError`` for a gap that is not positive.
    """
    if not mean_gap_s > 0:
        raise ValueError("the mean gap between sessions must be positive")
    random = Random(seed)
    order = list(sessions)
    random.shuffle(order)
    start_s = 0.0
    requests: list[SessionRequest] = []
    for session in order:
        requests += [msgspec.structs.replace(request, at_s=start_s + request.at_s) for request in session]
        start_s += random.expovariate(1.0 / mean_gap_s)
    return sorted(requests, key=lambda request: (request.at_s, request.number))


class _Ids:
    """Gives every label a number, the same one each time."""

    def __init__(self) -> None:
        self._ids: dict[_Label, int] = {}

    def of(self, label: _Label) -> int:
        return self._ids.setdefault(label, len(self._ids))


def _requests(
    session: int,
    start_s: float,
    tool_tokens: int,
    system_tokens: int,
    rows: Sequence[_Row],
    ids: _Ids,
    numbers: Iterator[int],
    follows: int = -1,
) -> Iterator[SessionRequest]:
    """The requests of one agent and of those it started. Its main prompts begin with its tools and system prompt: they
    are the ones whose first block is that of its first request; others (titles, summaries) have prompts of their own.
    """
    first_block = next((row.hash_ids[0] for row in rows if row.hash_ids), None)
    of_tools = tool_tokens // SESSION_BLOCK_TOKENS
    of_both = (tool_tokens + system_tokens) // SESSION_BLOCK_TOKENS
    known: dict[str, dict[int, int]] = {}  # model → the trace's id → ours, in this agent
    for row in rows:
        at_s = start_s + row.t
        if row.requests:
            yield from _requests(session, at_s, row.tool_tokens, row.system_tokens, row.requests, ids, numbers, follows)
            continue
        local = row.hash_ids
        shared = min(of_both, len(local)) if local and local[0] == first_block else 0
        ours = known.setdefault(row.model, {})
        # A block that is known follows none that is not: only the turn's own end is new.
        known_blocks = bisect_left(local, True, key=lambda block: block not in ours)
        for place, block in enumerate(local[known_blocks:], known_blocks):
            if place < shared:
                label = (row.model, -1, tool_tokens, system_tokens if place >= of_tools else -1, place)
            else:
                label = (row.model, session, 0, 0, block)
            ours[block] = ids.of(label)
        number = next(numbers)
        yield SessionRequest(
            number=number,
            session=session,
            model=row.model,
            at_s=at_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            blocks=array("I", map(ours.__getitem__, local)),
            shared_blocks=shared,
            follows=follows,
            think_s=max(row.think_time, 0.0),
        )
        follows = number
