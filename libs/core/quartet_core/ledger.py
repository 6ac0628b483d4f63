"""The ledger: what routers sent to each worker and has not ended yet, and what that makes of the worker's last word.

A word is already old when it is read. The ledger closes the gap: an entry that the last beat cannot include yet is
added to it, one that ended after it is taken off. Without that credit, state of 100 ms age costs half of the goodput;
with it, at most 1 % (objective study, 4 H100 + 12 L40S).

Entries are leases: each ends exactly once, by the worker's own events, by fencing, or by its expiry. Their key holds
the worker's incarnation, so that events of a worker's former life never touch its new one.
"""

import math
from collections.abc import Iterator

from msgspec import Struct

from quartet_core import word as w

Key = tuple[str, str, int, int, str, int]
"""(tenant, request id, attempt, try, worker, incarnation): a worker may have a part in more than one try."""

PHI_WINDOW_MS = 2000.0
"""Over how long the share of busy time spent in prefill is taken; 0.5 to 30 s differ by 1 % of goodput at most."""

PHI_MAX = 0.9
_EXPIRY_FACTOR = 3.0
_EXPIRY_MS = 5000.0


class Entry(Struct):
    """Predicted work of one request on one worker.

    ``accepted_beat`` and ``ended_beat`` are the first beats that include acceptance and end (0: not yet);
    ``prefilled_beat`` likewise for the first token, after which only decode work is left.
    """

    key: Key
    slot: int
    prefill_ms: float
    tokens: int
    decodes: bool
    urgency: float
    expires_ms: float
    reserved: bool = False
    long: bool = False
    accepted_beat: int = 0
    prefilled_beat: int = 0
    ended_beat: int = 0


class Belief(Struct):
    """What a worker carries, as well as it can be known: ``queue_ms`` of prefill, ``batch`` sequences of mean context
    ``context`` tokens, ``urgency`` = mean of 1/TPOT target in 1/ms, ``phi`` = share of busy time spent in prefill,
    ``reserved_ms`` of prefill that is held for it elsewhere."""

    queue_ms: float
    batch: float
    context: float
    urgency: float
    phi: float
    reserved_ms: float


class _Account:
    """One worker's entries. ``settled`` are those that the last beat includes; ``open`` the others."""

    __slots__ = ("beat", "count", "long", "open", "phi_at_ms", "phi_work_ms", "prefill_ms", "queued", "reserved_ms",
                 "running", "settled", "tokens", "urgency")  # fmt: skip

    def __init__(self) -> None:
        self.beat = 0
        self.settled: dict[Key, Entry] = {}
        self.open: dict[Key, Entry] = {}
        self.prefill_ms = 0.0  # of settled entries without a first token
        self.queued = 0  # settled entries that will decode
        self.running = 0  # settled entries that decode
        self.reserved_ms = 0.0
        self.long = 0  # entries whose long prefill is still ahead
        self.count = 0
        self.tokens = 0
        self.urgency = 0.0
        self.phi_work_ms = 0.0
        self.phi_at_ms = 0.0


class Ledger:
    """Entries of all routers, by worker slot. Times are milliseconds of the router's own clock.

    A prefill of more than ``long_prefill_ms`` is a long one.
    """

    def __init__(
        self, *, max_entries: int = 200_000, typical_context: float = 2048.0, urgency: float = 0.01,
        long_prefill_ms: float = math.inf,
    ) -> None:  # fmt: skip
        self._entries: dict[Key, Entry] = {}
        self._accounts: dict[int, _Account] = {}
        self._max_entries = max_entries
        self._typical_context = typical_context
        self._typical_urgency = urgency
        self._long_prefill_ms = long_prefill_ms
        self.long = 0
        """The plane of workers that have a long prefill ahead of them, or one that is held for them."""
        self.refused = 0
        """Entries that found no room."""
        self.expired = 0
        """Entries that no event ended."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """The entry with ``key``."""
        return self._entries.get(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def open(
        self, key: Key, slot: int, *, prefill_ms: float, tokens: int, decodes: bool, tpot_ms: float, total_ms: float,
        now_ms: float, reserved_for_ms: float = 0.0,
    ) -> bool:  # fmt: skip
        """Put predicted work on a worker; return whether it is new.

        ``reserved_for_ms`` > 0 makes it a reservation, which a later ``open`` with the same key turns into work.
        A second ``open`` of the same work does nothing: routers hear their own notes.
        """
        before = self._entries.get(key)
        if before is not None:
            if not before.reserved or reserved_for_ms > 0.0:
                return False
            self._remove(before)
        elif len(self._entries) >= self._max_entries:
            self.refused += 1
            return False
        entry = Entry(
            key=key,
            slot=slot,
            prefill_ms=prefill_ms,
            tokens=tokens,
            decodes=decodes,
            urgency=1.0 / tpot_ms if tpot_ms > 0.0 else self._typical_urgency,
            expires_ms=now_ms + (reserved_for_ms + 100.0 if reserved_for_ms > 0.0
                                 else _EXPIRY_FACTOR * total_ms + _EXPIRY_MS),
            reserved=reserved_for_ms > 0.0,
            long=prefill_ms > self._long_prefill_ms,
        )  # fmt: skip
        account = self._account(slot)
        if entry.long:
            account.long += 1
            self.long |= 1 << slot
        self._entries[key] = entry
        account.open[key] = entry
        account.count += 1
        account.tokens += tokens
        account.urgency += entry.urgency
        if entry.reserved:
            account.reserved_ms += prefill_ms
        else:
            self._note_phi(account, prefill_ms, now_ms)
        return True

    def accepted(self, key: Key, beat: int) -> int | None:
        """The worker took the request, as beats from ``beat`` on include; return the slot if the entry is known."""
        entry = self._entries.get(key)
        if entry is None or entry.accepted_beat:
            return None
        entry.accepted_beat = max(beat, 1)
        self._settle(entry)
        return entry.slot

    def prefilled(self, key: Key, beat: int) -> int | None:
        """The first token is out (or, of a split's first half, the KV is complete): prefill credit ends."""
        entry = self._entries.get(key)
        if entry is None or entry.prefilled_beat:
            return None
        if not entry.decodes:
            return self.ended(key, beat)
        account = self._accounts[entry.slot]
        self._computed(account, entry)
        if key in account.settled:
            self._unsettle(account, entry)
        entry.accepted_beat = entry.accepted_beat or max(beat, 1)
        entry.prefilled_beat = max(beat, 1)
        self._settle(entry)
        return entry.slot

    def ended(self, key: Key, beat: int) -> int | None:
        """The request left the worker, as beats from ``beat`` on include. ``beat`` 0: it never got there."""
        entry = self._entries.get(key)
        if entry is None or entry.ended_beat:
            return None
        account = self._accounts[entry.slot]
        if beat <= account.beat or not entry.accepted_beat or entry.accepted_beat > account.beat:
            self._remove(entry)
        else:
            # The last word still counts it: keep it, to be taken off, until a beat shows that it is gone.
            self._computed(account, entry)
            if key in account.settled:
                self._unsettle(account, entry)
            entry.ended_beat = beat
        return entry.slot

    def heard(self, slot: int, beat: int) -> None:
        """A new word of the worker in ``slot`` arrived, said by ``beat``."""
        account = self._accounts.get(slot)
        if account is None or beat <= account.beat:
            return
        account.beat = beat
        if account.open:
            for entry in [e for e in account.open.values() if e.accepted_beat and e.accepted_beat <= beat]:
                self._settle(entry)

    def fence(self, slot: int) -> list[Key]:
        """The worker died or was replaced: all of its entries end now. Return their keys."""
        account = self._accounts.pop(slot, None)
        if account is None:
            return []
        if account.long:
            self.long ^= 1 << slot
        keys = [*account.settled, *account.open]
        for key in keys:
            del self._entries[key]
        return keys

    def expire(self, now_ms: float) -> list[int]:
        """End what no event ended in time; return the slots concerned. Call it about once a second."""
        late = [entry for entry in self._entries.values() if entry.expires_ms <= now_ms]
        for entry in late:
            self.expired += not entry.reserved and not entry.ended_beat
            self._remove(entry)
        return [entry.slot for entry in late]

    def belief(self, slot: int, word: int, now_ms: float) -> Belief:
        """What the worker in ``slot`` carries, from its last word and the entries around it."""
        queue_level = w.QUEUE.of(word)
        batch_level = w.BATCH.of(word)
        account = self._accounts.get(slot)
        if account is None:
            return Belief(
                w.queue_ms(queue_level), float(w.batch_size(batch_level)), self._typical_context,
                self._typical_urgency, 0.0, 0.0,
            )  # fmt: skip
        # What the word says, what it should say by the entries that it includes, and what has changed since.
        prefill_ms, running, queued = account.prefill_ms, account.running, account.queued
        more_ms, more_running = 0.0, 0
        beat = account.beat
        for entry in account.open.values():
            if entry.reserved:
                continue
            told = 0 < entry.accepted_beat <= beat
            told_running = told and 0 < entry.prefilled_beat <= beat
            waits = not entry.prefilled_beat and not entry.ended_beat
            runs = entry.decodes and entry.prefilled_beat > 0 and not entry.ended_beat
            if told and not told_running:
                prefill_ms += entry.prefill_ms
                more_ms -= 0.0 if waits else entry.prefill_ms
            elif waits:
                more_ms += entry.prefill_ms
            running += told_running and entry.decodes
            more_running += runs - (told_running and entry.decodes)
            queued += waits and entry.decodes
        # Our own sum is finer than the level, and the level bounds it.
        low, high = w.queue_bounds_ms(queue_level)
        queue_ms = min(max(prefill_ms, low), high) + more_ms
        few, many = w.batch_bounds(batch_level)
        batch = min(max(running, few), (many or math.inf) - 1) + more_running + queued
        # Sequences of which only the word tells (this router is new, or a note was lost) are taken for typical ones: a
        # worker must not seem lighter than its equals because one short request on it is known.
        strangers = max(batch - account.count, 0.0)
        sequences = (account.count + strangers) or 1.0
        if not account.count:
            strangers = sequences
        return Belief(
            max(queue_ms, 0.0),
            float(max(batch, 0)),
            (account.tokens + strangers * self._typical_context) / sequences,
            (account.urgency + strangers * self._typical_urgency) / sequences,
            self._phi(account, now_ms),
            account.reserved_ms,
        )

    def entries(self, slot: int) -> Iterator[Entry]:
        """All entries on a worker."""
        account = self._accounts.get(slot)
        if account is not None:
            yield from account.settled.values()
            yield from account.open.values()

    def _account(self, slot: int) -> _Account:
        account = self._accounts.get(slot)
        if account is None:
            account = self._accounts[slot] = _Account()
        return account

    def _settle(self, entry: Entry) -> None:
        account = self._accounts[entry.slot]
        beat = account.beat
        if entry.ended_beat:
            if entry.ended_beat <= beat:
                self._remove(entry)
            return
        if entry.accepted_beat > beat or (entry.prefilled_beat and entry.prefilled_beat > beat):
            return
        if account.open.pop(entry.key, None) is None:
            return
        account.settled[entry.key] = entry
        if entry.prefilled_beat:
            account.running += entry.decodes
        else:
            account.prefill_ms += entry.prefill_ms
            account.queued += entry.decodes

    def _unsettle(self, account: _Account, entry: Entry) -> None:
        del account.settled[entry.key]
        account.open[entry.key] = entry
        if entry.prefilled_beat:
            account.running -= entry.decodes
        else:
            account.prefill_ms = max(0.0, account.prefill_ms - entry.prefill_ms)
            account.queued -= entry.decodes

    def _remove(self, entry: Entry) -> None:
        account = self._accounts[entry.slot]
        self._computed(account, entry)
        del self._entries[entry.key]
        if entry.key in account.settled:
            self._unsettle(account, entry)
        del account.open[entry.key]
        account.count -= 1
        account.tokens -= entry.tokens
        account.urgency -= entry.urgency
        if entry.reserved:
            account.reserved_ms -= entry.prefill_ms
        if not account.count:
            account.urgency = account.reserved_ms = account.prefill_ms = 0.0

    def _computed(self, account: _Account, entry: Entry) -> None:
        """No long prefill of ``entry`` is ahead any more, if one was."""
        if entry.long:
            entry.long = False
            account.long -= 1
            if not account.long:
                self.long ^= 1 << entry.slot

    def _note_phi(self, account: _Account, prefill_ms: float, now_ms: float) -> None:
        account.phi_work_ms = self._decayed(account, now_ms) + prefill_ms
        account.phi_at_ms = now_ms

    @staticmethod
    def _decayed(account: _Account, now_ms: float) -> float:
        return account.phi_work_ms * math.exp((account.phi_at_ms - now_ms) / PHI_WINDOW_MS)

    def _phi(self, account: _Account, now_ms: float) -> float:
        return min(PHI_MAX, self._decayed(account, now_ms) / PHI_WINDOW_MS)
