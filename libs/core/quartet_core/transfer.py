"""One KV transfer as a state machine: events and the time in, actions out.

::

    planned ─► reserving ─► reserved ─► moving ─► committing ─► committed ─► released
        └──────────┴────────────┴─────────┴───────────┴─► aborted

A coordinator holds one `Transfer` per plan, carries its actions to the agents and their answers back. The machine
promises, whatever is lost, doubled or late, and whoever dies:

- exactly one `Announce`, done or failed, for every transfer that was started;
- each side is given back exactly once: by one `Release`, by its death, or (the target) by the commit, which hands the
  blocks to the request that will read them;
- an event of an earlier epoch, or one that comes when the machine is past it, changes nothing.

What it expects of an agent: commands to one agent arrive in order; RESERVE, MOVE, COMMIT and RELEASE may be repeated
and are then answered as the first time; a lease that is not renewed expires by itself; a write or a commit under
another epoch than the lease's is refused. So blocks come back even when every RELEASE is lost.

A source may send while it still computes: it says so (`Begun`), may be told to move from then on, and only sends what
is computed. It reports `Moved` when everything was, and has arrived; so nothing else about the way is different.

Times are monotonic nanoseconds of the holder's clock.
"""

from enum import StrEnum

from quartet_core.transfer_words import (
    Action,
    Adopt,
    Announce,
    Begun,
    Cancelled,
    Commit,
    Committed,
    Died,
    Event,
    Failure,
    Freed,
    Go,
    Move,
    Moved,
    MoveFailed,
    MoveTaken,
    Moving,
    Ready,
    Refused,
    Reject,
    Release,
    Renew,
    Renewed,
    RenewRefused,
    Reserve,
    Reserved,
    Side,
    Start,
    State,
    Step,
    Tick,
    Unanswered,
)

__all__ = [
    "RENEWALS_PER_LEASE",
    "Action",
    "Adopt",
    "Announce",
    "Begun",
    "Cancelled",
    "Commit",
    "Committed",
    "Died",
    "Event",
    "Failure",
    "Freed",
    "Go",
    "Hold",
    "Move",
    "MoveFailed",
    "MoveTaken",
    "Moved",
    "Moving",
    "Ready",
    "Refused",
    "Reject",
    "Release",
    "Renew",
    "RenewRefused",
    "Renewed",
    "Reserve",
    "Reserved",
    "Side",
    "Start",
    "State",
    "Step",
    "Tick",
    "Transfer",
    "Unanswered",
]

RENEWALS_PER_LEASE = 3
"""Renewals that fit into one lease: two in a row may be lost without losing the lease."""


class Hold(StrEnum):
    """What one side keeps for a transfer, as far as its coordinator knows."""

    NOTHING = "nothing"
    HELD = "held"
    RELEASING = "releasing"


class Transfer:
    """The machine of one transfer.

    ``deadline_ns`` is when its bytes must have arrived, ``lease_ns`` how long a lease lasts unrenewed; ``ready`` says
    that the source has the KV already (a split's source computes it first). The source counts as held from the
    beginning: whoever planned the transfer had the KV pinned there. The target is held from the moment it is asked,
    because a lost answer may hide a granted lease.
    """

    __slots__ = (
        "_address",
        "_asked_ns",
        "_holds",
        "_renewed_ns",
        "_secret",
        "begun",
        "deadline_ns",
        "epoch",
        "failure",
        "lease_ns",
        "moving",
        "ready",
        "state",
        "taken",
    )

    def __init__(self, *, deadline_ns: int, lease_ns: int, ready: bool = False) -> None:
        if lease_ns <= 0:
            raise ValueError("lease_ns must be positive")
        self.state = State.PLANNED
        self.failure: Failure | None = None
        self.deadline_ns = deadline_ns
        self.lease_ns = lease_ns
        self.epoch = 0
        self.ready = ready
        self.begun = ready
        self.taken = False
        self.moving = False
        self._address = ""
        self._secret = b""
        self._holds = {Side.SOURCE: Hold.HELD, Side.TARGET: Hold.NOTHING}
        # sides whose lease runs: when a renewal was last asked for, and when the last granted one had been asked for
        self._asked_ns: dict[Side, int] = {}
        self._renewed_ns: dict[Side, int] = {}

    def hold(self, side: Side) -> Hold:
        """What ``side`` keeps for it."""
        return self._holds[side]

    @property
    def announced(self) -> bool:
        """Whether the outcome was announced."""
        return self.state in (State.COMMITTED, State.RELEASED, State.ABORTED)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do: announced, and no release is outstanding."""
        return self.announced and Hold.RELEASING not in self._holds.values()

    @property
    def trickles(self) -> bool:
        """Whether it sends what its source computes, as that comes to be: the link is its own only now and then."""
        return self.state is State.MOVING and self.moving and not self.ready

    @property
    def on_the_wire(self) -> bool:
        """Whether its bytes use the link: told to move, with something to send, and not known to have arrived."""
        return self.state is State.MOVING and (self.ready or self.moving)

    def wants(self, action: Action) -> bool:
        """Whether ``action`` is still worth repeating, because nothing that happened since has replaced it."""
        match action:
            case Reserve():
                return self.state is State.RESERVING
            case Move():
                return self.state is State.MOVING and not self.taken and not self.moving
            case Commit():
                return self.state is State.COMMITTING
            case Renew(side=side):
                return not self.announced and self._holds[side] is Hold.HELD
            case Release(side=side):
                return self._holds[side] is Hold.RELEASING
            case Announce():
                return False

    def on(self, event: Event, now_ns: int) -> list[Action]:
        """Take ``event`` at ``now_ns``; return what is to be done, in this order."""
        match event:
            case Freed(side=side):
                return self._freed(side)
            case Died(side=side):
                return self._died(side)
        if self.announced:
            return []
        match event:
            case Tick():
                return self._tick(now_ns)
            case Cancelled(failure=failure, detail=detail):
                return self._abort(failure, detail)
            case MoveFailed(epoch=epoch, detail=detail):
                return self._move_failed(epoch, detail)
            case Begun():
                self.begun = True
            case Ready():
                self.begun = self.ready = True
                self._lease_runs(Side.SOURCE, now_ns)
            case Renewed(side=side, epoch=epoch):
                if epoch == self.epoch and side in self._asked_ns:
                    self._renewed_ns[side] = self._asked_ns[side]
            case RenewRefused(side=side, epoch=epoch, detail=detail):
                return self._lease_lost(side, detail) if epoch == self.epoch else []
            case Refused(step=step, detail=detail):
                return self._refused(step, detail)
            case Unanswered(step=step):
                return self._unanswered(step)
            case _:
                return self._advance(event, now_ns)
        return []

    def _advance(self, event: Event, now_ns: int) -> list[Action]:
        """The way forward. An event means something in one state only; in any other it is late, and nothing happens."""
        match self.state, event:
            case State.PLANNED, Start():
                self.state = State.RESERVING
                self._holds[Side.TARGET] = Hold.HELD
                self._lease_runs(Side.TARGET, now_ns)
                return [Reserve()]
            case State.PLANNED, Reject(failure=failure, detail=detail):
                return self._abort(failure, detail)
            case State.PLANNED, Adopt(leased=leased, committed=committed, epoch=epoch):
                return self._adopted(leased, committed, epoch)
            case State.RESERVING, Reserved(epoch=epoch, address=address, secret=secret) if epoch > 0:
                self.state = State.RESERVED
                self.epoch, self._address, self._secret = epoch, address, secret
            case State.RESERVED, Go():
                self.state = State.MOVING
                return [Move(self.epoch, self._address, self._secret)]
            case State.MOVING, MoveTaken():
                self.taken = True
            case State.MOVING, Moving(epoch=epoch, more=more) if epoch == self.epoch:
                self.begun = self.moving = True
                self.ready = self.ready or not more
                self._lease_runs(Side.SOURCE, now_ns)
            case State.MOVING, Moved(epoch=epoch) if epoch == self.epoch:
                self.state = State.COMMITTING
                return [Commit(epoch)]
            case State.COMMITTING, Committed(epoch=epoch) if epoch == self.epoch:
                return self._committed()
        return []

    def _committed(self) -> list[Action]:
        self._holds[Side.TARGET] = Hold.NOTHING  # the request that reads the blocks owns them now
        actions: list[Action] = [Announce(), *self._release(Side.SOURCE)]
        self.state = State.COMMITTED if len(actions) > 1 else State.RELEASED
        return actions

    def _adopted(self, leased: bool, committed: bool, epoch: int) -> list[Action]:
        self.epoch = epoch
        if committed:
            return self._committed()
        if leased:
            self._holds[Side.TARGET] = Hold.HELD
        return self._abort(Failure.COORDINATOR_LOST, "")

    def _abort(self, failure: Failure, detail: str) -> list[Action]:
        self.state = State.ABORTED
        self.failure = failure
        return [*self._release(Side.TARGET), *self._release(Side.SOURCE), Announce(failure, detail)]

    def _release(self, side: Side) -> list[Action]:
        """Its release if it holds something: the only place where one is made, so there is never a second."""
        if self._holds[side] is not Hold.HELD:
            return []
        self._holds[side] = Hold.RELEASING
        return [Release(side, self.epoch)]

    def _freed(self, side: Side) -> list[Action]:
        if self._holds[side] is Hold.RELEASING:
            self._holds[side] = Hold.NOTHING
            if self.state is State.COMMITTED:
                self.state = State.RELEASED
        return []

    def _died(self, side: Side) -> list[Action]:
        if self._holds[side] is Hold.HELD:
            self._holds[side] = Hold.NOTHING
        if self.announced:
            return []
        if side is Side.SOURCE and self.state is State.COMMITTING:
            return []  # everything has arrived: the target can do without it
        return self._abort(Failure.DEAD, side)

    def _move_failed(self, epoch: int, detail: str) -> list[Action]:
        # epoch 0: the source never heard of the target's lease, its prefill failed
        if self.state is State.COMMITTING or epoch not in (0, self.epoch):
            return []
        return self._abort(Failure.MOVE_FAILED, detail)

    def _refused(self, step: Step, detail: str) -> list[Action]:
        if not self._awaits(step):
            return []
        if step is Step.RESERVE:
            self._holds[Side.TARGET] = Hold.NOTHING
        return self._abort(Failure.REFUSED, f"{step}: {detail}")

    def _unanswered(self, step: Step) -> list[Action]:
        return self._abort(Failure.UNANSWERED, step) if self._awaits(step) else []

    def _awaits(self, step: Step) -> bool:
        match step:
            case Step.RESERVE:
                return self.state is State.RESERVING
            case Step.MOVE:
                return self.state is State.MOVING and not self.taken and not self.moving
            case Step.COMMIT:
                return self.state is State.COMMITTING

    def _lease_runs(self, side: Side, now_ns: int) -> None:
        """The lease of ``side`` starts now, unless it runs already."""
        self._asked_ns.setdefault(side, now_ns)
        self._renewed_ns.setdefault(side, now_ns)

    def _lease_lost(self, side: Side, detail: str) -> list[Action]:
        if side not in self._renewed_ns or (side is Side.SOURCE and self.state is State.COMMITTING):
            return []
        return self._abort(Failure.LEASE_LOST, f"{side}: {detail}")

    def _tick(self, now_ns: int) -> list[Action]:
        if now_ns >= self.deadline_ns and self.state is not State.COMMITTING:
            return self._abort(Failure.DEADLINE, self.state)
        for side, renewed_ns in self._renewed_ns.items():
            if now_ns - renewed_ns >= self.lease_ns:
                lost = self._lease_lost(side, "not renewed in time")
                if lost:
                    return lost
        if self.state not in (State.RESERVED, State.MOVING, State.COMMITTING):
            return []
        due: list[Action] = []
        for side, asked_ns in self._asked_ns.items():
            if self._holds[side] is Hold.HELD and now_ns - asked_ns >= self.lease_ns // RENEWALS_PER_LEASE:
                self._asked_ns[side] = now_ns
                due.append(Renew(side, self.epoch))
        return due
