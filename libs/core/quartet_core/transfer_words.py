"""What a KV transfer may be told, and what it may ask for: the words of the machine in ``quartet_core.transfer``."""

from enum import StrEnum

from msgspec import Struct


class State(StrEnum):
    """Where a transfer is. Agents report ``COMPUTING`` (a first part could be sent, and the rest is being computed),
    ``MOVING`` and ``MOVED``; on ``MOVED`` the machine commits at once."""

    PLANNED = "planned"
    COMPUTING = "computing"
    RESERVING = "reserving"
    RESERVED = "reserved"
    MOVING = "moving"
    MOVED = "moved"
    COMMITTING = "committing"
    COMMITTED = "committed"
    RELEASED = "released"
    ABORTED = "aborted"


class Side(StrEnum):
    """The two ends of a transfer."""

    SOURCE = "source"
    TARGET = "target"


class Step(StrEnum):
    """The commands whose answer decides how a transfer goes on."""

    RESERVE = "reserve"
    MOVE = "move"
    COMMIT = "commit"


class Failure(StrEnum):
    """Why a transfer was refused at planning or aborted later: a closed set, fit for a metric's label."""

    UNKNOWN_WORKER = "unknown_worker"
    FENCED = "fenced"
    CAPABILITY = "capability"
    LAYOUT = "layout"
    WOULD_MISS_DEADLINE = "would_miss_deadline"
    OVERLOADED = "overloaded"
    REFUSED = "refused"
    UNANSWERED = "unanswered"
    MOVE_FAILED = "move_failed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    ENDED = "ended"
    DEADLINE = "deadline"
    LEASE_LOST = "lease_lost"
    COORDINATOR_LOST = "coordinator_lost"


class KvLost(StrEnum):
    """Why an agent ends its half of a split although its worker could have done it: the KV did not get across.

    Reasons of REFUSED and END events. None of them is a fault of the worker that says it.
    """

    RELEASED = "kv_released"
    """Whoever coordinates the transfer gave up, and with it the blocks that were leased."""
    EXPIRED = "kv_expired"
    FENCED = "kv_fenced"
    MISMATCH = "kv_mismatch"
    """What came was not the prompt's KV."""
    FAILED = "kv_failed"
    """The source could not send."""


# Events --------------------------------------------------------------------------------------------------------------


class Start(Struct, frozen=True):
    """The plan passed its checks."""


class Reject(Struct, frozen=True):
    """The plan did not pass: nothing is reserved."""

    failure: Failure
    detail: str = ""


class Adopt(Struct, frozen=True):
    """A new coordinator found this transfer under way. ``committed`` is what the target's own lease says.

    ``leased`` says whether the target still holds blocks for it, under ``epoch``.
    """

    leased: bool
    committed: bool = False
    epoch: int = 0


class Reserved(Struct, frozen=True):
    """The target promised blocks under ``epoch``; whoever writes must show ``secret`` at ``address``."""

    epoch: int
    address: str = ""
    secret: bytes = b""


class Ready(Struct, frozen=True):
    """The source has computed what is to be moved."""


class Begun(Struct, frozen=True):
    """The source has computed a first part of what is to be moved, and goes on: it could send that meanwhile."""


class Go(Struct, frozen=True):
    """The link has room: bytes may move."""


class MoveTaken(Struct, frozen=True):
    """The source took the order to move."""


class Moving(Struct, frozen=True):
    """The source sends. With ``more`` it still computes a part of what is to be moved; without, it has all of it."""

    epoch: int
    more: bool = False


class Moved(Struct, frozen=True):
    """The source sent everything and the target's mover has it."""

    epoch: int


class MoveFailed(Struct, frozen=True):
    """The source cannot send, or failed while sending. ``epoch`` 0: it failed before it was told to move."""

    epoch: int
    detail: str = ""


class Committed(Struct, frozen=True):
    """The blocks are readable on the target."""

    epoch: int


class Refused(Struct, frozen=True):
    """An agent said no."""

    step: Step
    detail: str = ""


class Unanswered(Struct, frozen=True):
    """An agent said nothing, however often it was asked: the step may have been done or not."""

    step: Step


class Renewed(Struct, frozen=True):
    """A side prolonged its lease by a whole lease from when it was asked."""

    side: Side
    epoch: int


class RenewRefused(Struct, frozen=True):
    """A side no longer knows the lease."""

    side: Side
    epoch: int
    detail: str = ""


class Freed(Struct, frozen=True):
    """A side answered RELEASE, or was asked as often as it will be: its lease's expiry does the rest."""

    side: Side


class Died(Struct, frozen=True):
    """A side's worker is dead or runs under another incarnation; what it held is gone."""

    side: Side


class Cancelled(Struct, frozen=True):
    """Nobody wants the result any more."""

    failure: Failure = Failure.CANCELLED
    detail: str = ""


class Tick(Struct, frozen=True):
    """Time passed. To be given a few times per ``lease_ns / RENEWALS_PER_LEASE``."""


Event = (
    Start
    | Reject
    | Adopt
    | Reserved
    | Ready
    | Begun
    | Go
    | MoveTaken
    | Moving
    | Moved
    | MoveFailed
    | Committed
    | Refused
    | Unanswered
    | Renewed
    | RenewRefused
    | Freed
    | Died
    | Cancelled
    | Tick
)


# Actions -------------------------------------------------------------------------------------------------------------


class Reserve(Struct, frozen=True):
    """Ask the target for blocks; answer with `Reserved`, `Refused` or `Unanswered`."""


class Move(Struct, frozen=True):
    """Tell the source to send; answer with `MoveTaken`, `Refused` or `Unanswered`."""

    epoch: int
    address: str
    secret: bytes


class Commit(Struct, frozen=True):
    """Ask the target to make the blocks readable; answer with `Committed`, `Refused` or `Unanswered`."""

    epoch: int


class Renew(Struct, frozen=True):
    """Prolong a side's lease; answer with `Renewed` or `RenewRefused`, or not at all."""

    side: Side
    epoch: int


class Release(Struct, frozen=True):
    """Free a side; answer with `Freed`, also when giving up. ``epoch`` 0 frees whatever the transfer has there."""

    side: Side
    epoch: int


class Announce(Struct, frozen=True):
    """Tell everybody how it ended. ``failure`` is None when the transfer is done."""

    failure: Failure | None = None
    detail: str = ""


Action = Reserve | Move | Commit | Renew | Release | Announce
