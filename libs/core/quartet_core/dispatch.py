"""Dispatch: one request's way from a router to its end, over as many tries as it takes.

Rules: a try is acked within ``ack_ms`` or cancelled and tried elsewhere; a refusal goes elsewhere; whoever was silent,
refused, failed or was lost is not tried again. Who only had its part in a try that failed may be: a transfer that does
not arrive is the fault of neither end. Before the first token a lost worker or transfer means another try, after it an
error, so that nothing ever runs twice unseen. Tries are bounded, and each request hears exactly one outcome.
"""

from enum import StrEnum

from msgspec import Struct

from quartet_core import openai
from quartet_core.openai import Refused
from quartet_core.plan import Plan
from quartet_core.transfer_words import KvLost

_KV_LOST = frozenset(reason.value for reason in KvLost)


class Stage(StrEnum):
    """Where a request is, seen from its router."""

    NEW = "new"
    HELD = "held"
    SENT = "sent"
    ACCEPTED = "accepted"
    STREAMING = "streaming"
    OVER = "over"


class Half(Struct):
    """One worker's part in a try."""

    slot: int
    worker: str
    incarnation: int
    acked: bool = False
    ended: bool = False


class Send(Struct, frozen=True):
    """Decide anew and send to workers outside ``excluded``; ``why`` the last try failed."""

    excluded: tuple[str, ...]
    why: str


class Cancel(Struct, frozen=True):
    """Tell these workers to end try ``try_``."""

    try_: int
    halves: tuple[Half, ...]
    reason: str


class Fail(Struct, frozen=True):
    """Tell the client."""

    error: Refused


class Close(Struct, frozen=True):
    """The request is over: forget it."""


Action = Send | Cancel | Fail | Close


class Dispatch:
    """The state machine of one (request, attempt). Methods take an event and return what to do, in order."""

    __slots__ = (
        "decode", "excluded", "lender", "max_tries", "plan", "prefill", "stage", "transfers_failed", "tried", "try_",
    )  # fmt: skip

    def __init__(self, max_tries: int) -> None:
        self.max_tries = max_tries
        self.stage = Stage.NEW
        self.try_ = 0
        self.tried: tuple[str, ...] = ()
        """Every worker that had a part in any try."""
        self.excluded: tuple[str, ...] = ()
        """Workers that failed this request, and are not asked again."""
        self.transfers_failed = 0
        self.plan: Plan | None = None
        self.prefill: Half | None = None
        self.decode: Half | None = None
        self.lender: Half | None = None
        """Who lends a cached prefix to the current try. Whatever becomes of it changes nothing: the other computes."""

    @property
    def halves(self) -> tuple[Half, ...]:
        """The workers that the current try needs: one, or prefill and decode."""
        return tuple(half for half in (self.prefill, self.decode) if half is not None)

    @property
    def involved(self) -> tuple[Half, ...]:
        """All workers of the current try, the lender among them."""
        return self.halves if self.lender is None else (*self.halves, self.lender)

    def held(self) -> None:
        """The request waits at the router."""
        self.stage = Stage.HELD

    def sent(self, plan: Plan, decode: Half, prefill: Half | None, lender: Half | None = None) -> int:
        """A try goes out; return its number. ``prefill`` is None unless the plan is split, ``lender`` unless it
        fetches.
        """
        self.try_ += 1
        self.stage = Stage.SENT
        self.plan = plan
        self.decode, self.prefill, self.lender = decode, prefill, lender
        self.tried += tuple(half.worker for half in self.involved)
        return self.try_

    def accepted(self, worker: str, try_: int) -> list[Action]:
        """A worker acked its half."""
        half = self._half(worker, try_)
        if half is not None:
            half.acked = True
            if self.stage is Stage.SENT and all(part.acked for part in self.halves):
                self.stage = Stage.ACCEPTED
        return []

    def refused(self, worker: str, try_: int, reason: str) -> list[Action]:
        """A worker does not take its half."""
        half = self._half(worker, try_)
        if half is None:
            return []
        half.ended = True
        if half is self.lender:
            self._exclude(half)
            return []
        if reason in _KV_LOST:
            return self._again_without_kv(reason)
        return self._again(f"worker {worker} refused: {reason}", "refused", half)

    def awaits_ack(self, try_: int) -> bool:
        """Whether try ``try_`` is out and not acked by all of its workers."""
        return try_ == self.try_ and self.stage is Stage.SENT

    def ack_due(self, try_: int) -> list[Action]:
        """Try ``try_`` had its time to be acked."""
        if try_ != self.try_ or self.stage is not Stage.SENT:
            return []
        silent = [half for half in self.halves if not half.acked]
        return self._again(f"no answer from {', '.join(half.worker for half in silent)}", "ack_timeout", *silent)

    def first_token_due(self, try_: int) -> list[Action]:
        """Try ``try_``, a trial of a resting worker, had the time it was given for its first token."""
        if try_ != self.try_ or self.stage not in (Stage.SENT, Stage.ACCEPTED):
            return []
        return self._again("no first token from a worker on trial", "trial_failed", *self.halves)

    def first_token(self, try_: int) -> list[Action]:
        """The client hears tokens of try ``try_``: from now on nothing is retried."""
        if try_ == self.try_ and self.stage in (Stage.SENT, Stage.ACCEPTED):
            self.stage = Stage.STREAMING
        return []

    def ended(self, worker: str, try_: int, failure: str = "") -> list[Action]:
        """A worker is done with its half: it has told the client how, if that was for it to tell. ``failure`` is why
        it could not do it.
        """
        half = self._half(worker, try_)
        if half is None:
            return []
        half.ended = True
        if failure and failure not in _KV_LOST:
            self._exclude(half)
        if half is not self.decode:
            return []
        return self._over([Cancel(self.try_, self._live(), "peer_ended")] if self._live() else [])

    def transfer_failed(self, try_: int, detail: str) -> list[Action]:
        """KV did not arrive. A split cannot go on without it; a run that fetches a prefix computes it instead.

        Once there are tokens it did arrive, whatever its coordinator could find out: the worker that decodes says how
        that ends.
        """
        if try_ != self.try_ or self.stage in (Stage.OVER, Stage.HELD, Stage.STREAMING) or self.lender is not None:
            return []
        return self._again_without_kv(detail)

    def worker_lost(self, worker: str) -> list[Action]:
        """A worker died or was replaced."""
        half = self._half(worker, self.try_)
        if half is None or half.ended:
            return []
        half.ended = True
        self._exclude(half)
        if half is self.lender or (self.stage is Stage.STREAMING and half is self.prefill):
            return []
        return self._again(f"worker {worker} was lost", "worker_lost")

    def cancelled(self) -> list[Action]:
        """The client wants no answer any more."""
        if self.stage is Stage.OVER:
            return []
        return self._over([Cancel(self.try_, self._live(), "client")] if self._live() else [])

    def failed(self, error: Refused) -> list[Action]:
        """The router itself gives up: tell the client, end what runs."""
        if self.stage is Stage.OVER:
            return []
        ends: list[Action] = [Cancel(self.try_, self._live(), "failed")] if self._live() else []
        return self._over([*ends, Fail(error)])

    def _exclude(self, half: Half) -> None:
        if half.worker not in self.excluded:
            self.excluded += (half.worker,)

    def _again_without_kv(self, detail: str) -> list[Action]:
        self.transfers_failed += 1
        return self._again(f"KV transfer failed: {detail}", "transfer_failed")

    def _again(self, why: str, code: str, *at_fault: Half) -> list[Action]:
        if self.stage is Stage.OVER:
            return []
        for half in at_fault:
            self._exclude(half)
        ends: list[Action] = [Cancel(self.try_, self._live(), code)] if self._live() else []
        if self.stage is Stage.STREAMING:
            return self._over([*ends, Fail(openai.upstream(f"The answer was cut off: {why}.", code))])
        if self.try_ >= self.max_tries:
            return self._over([*ends, Fail(openai.upstream(f"Gave up after {self.try_} tries: {why}.", code))])
        self.prefill = self.decode = self.lender = None
        self.stage = Stage.NEW
        return [*ends, Send(self.excluded, why)]

    def _over(self, actions: list[Action]) -> list[Action]:
        self.stage = Stage.OVER
        return [*actions, Close()]

    def _half(self, worker: str, try_: int) -> Half | None:
        if try_ != self.try_ or self.stage in (Stage.OVER, Stage.HELD):
            return None
        for half in self.involved:
            if half.worker == worker:
                return half
        return None

    def _live(self) -> tuple[Half, ...]:
        return tuple(half for half in self.involved if not half.ended)
