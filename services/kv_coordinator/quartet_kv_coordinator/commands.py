"""Carries a machine's actions to the agents, and brings back the event that each answer is."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from quartet_bus import subjects
from quartet_bus.bus import BusError
from quartet_bus.messages import KvCommand, KvReply, KvVerb
from quartet_bus.subjects import Topic
from quartet_core.transfer import (
    Action,
    Commit,
    Committed,
    Event,
    Freed,
    Move,
    MoveTaken,
    Refused,
    Release,
    Renew,
    Renewed,
    RenewRefused,
    Reserve,
    Reserved,
    Side,
    State,
    Step,
    Unanswered,
)
from quartet_kv_coordinator.book import Entry

ATTEMPTS = 3
"""How often an agent is asked before its silence is an answer."""

TIMEOUT_S = 0.25
"""How long it has each time: agents answer from memory, within a millisecond."""

OLD_TERM = "old_term"
"""An agent's reason when it obeys a coordinator of a higher rank."""


class Ask(Protocol):
    """``Service.ask``."""

    def __call__(
        self, topic: Topic[KvCommand], message: KvCommand, kind: type[KvReply], *, timeout_s: float
    ) -> Awaitable[KvReply]: ...


class Commands:
    """Puts questions to agents, a bounded number of times. ``count(verb, result)`` is told how each ended.

    ``pause`` waits before an agent that is not there at all is asked again. ``fenced(sent, obeyed)`` is told the terms
    when an agent obeys a higher one, and returns the term under which to ask again, 0 for not at all.
    """

    def __init__(
        self,
        ask: Ask,
        pause: Callable[[float], Awaitable[None]],
        count: Callable[[str, str], None],
        fenced: Callable[[int, int], int],
    ) -> None:
        self._ask = ask
        self._pause = pause
        self._count = count
        self._fenced = fenced

    async def put(self, node: str, command: KvCommand, worth_asking: Callable[[], bool]) -> KvReply | None:
        """The agent's answer; None when it gave none, or when the question was no longer ``worth_asking``."""
        topic = subjects.kv_command(node)
        for attempt in range(ATTEMPTS):
            if not worth_asking():
                return None
            try:
                reply = await self._ask(topic, command, KvReply, timeout_s=TIMEOUT_S)
            except BusError as error:
                self._count(command.verb, type(error).__name__)
                if attempt + 1 < ATTEMPTS:
                    await self._pause(TIMEOUT_S / ATTEMPTS)
                continue
            self._count(command.verb, "ok" if reply.ok else "refused")
            if not reply.ok and reply.reason == OLD_TERM:
                term = self._fenced(command.term, reply.term)
                if term:
                    command.term = term
                    continue
            return reply
        return None


def command_of(entry: Entry, action: Action, *, term: int, coordinator: str, lease_ms: float) -> tuple[Side, KvCommand]:
    """Which side ``action`` goes to, and the command it is there. Raises ``TypeError`` for one that is no command."""
    match action:
        case Reserve():
            side, verb, epoch = Side.TARGET, KvVerb.RESERVE, 0
        case Move(epoch=epoch):
            side, verb = Side.SOURCE, KvVerb.MOVE
        case Commit(epoch=epoch):
            side, verb = Side.TARGET, KvVerb.COMMIT
        case Renew(side=side, epoch=epoch):
            verb = KvVerb.RENEW
        case Release(side=side, epoch=epoch):
            verb = KvVerb.RELEASE
        case _:
            raise TypeError(f"{action} is no command")
    plan = entry.plan
    worker, incarnation = entry.worker(side)
    command = KvCommand(
        verb,
        plan.transfer,
        term,
        coordinator,
        worker,
        incarnation,
        plan.stream,
        plan.reason,
        plan.tokens,
        plan.kv_bytes,
        epoch,
        lease_ms,
    )
    if isinstance(action, Move):
        command.address, command.secret = action.address, action.secret
    elif isinstance(action, Reserve):
        command.manifest = entry.manifest
    elif isinstance(action, Release):
        command.committed = entry.machine.state is State.COMMITTED
    return side, command


def event_of(action: Action, reply: KvReply | None) -> Event | None:
    """What an agent's answer (or silence) to ``action`` means to the machine; None when it means nothing."""
    match action:
        case Reserve():
            if reply is None:
                return Unanswered(Step.RESERVE)
            if not reply.ok:
                return Refused(Step.RESERVE, reply.reason)
            if reply.epoch <= 0:
                return Refused(Step.RESERVE, "a lease without an epoch cannot be fenced")
            return Reserved(reply.epoch, reply.address, reply.secret)
        case Move():
            if reply is None:
                return Unanswered(Step.MOVE)
            return MoveTaken() if reply.ok else Refused(Step.MOVE, reply.reason)
        case Commit(epoch=epoch):
            if reply is None:
                return Unanswered(Step.COMMIT)
            return Committed(epoch) if reply.ok else Refused(Step.COMMIT, reply.reason)
        case Renew(side=side, epoch=epoch):
            if reply is None:
                return None
            return Renewed(side, epoch) if reply.ok else RenewRefused(side, epoch, reply.reason)
        case Release(side=side):
            return Freed(side)
    return None
