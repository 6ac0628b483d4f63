"""The receiving side of transfers: leases on this node's KV, from RESERVE to the decode job that reads the blocks.

A lease ends exactly once: handed over to its job, released, or expired. Writers are let in once, by its secret, and
every write is checked against what the lease says.
"""

import hmac
from asyncio import AbstractEventLoop, TimerHandle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum

from quartet_agent.engines.pools import BlocksFenced, KvPool
from quartet_agent.kv.mover import Buffer, MoveError, MoveReason
from quartet_bus.messages import KvCommand, KvLease, KvReply
from quartet_core.transfer_words import KvLost, State

_REMEMBERED = 4096


class LeaseEnd(StrEnum):
    """Why a lease went without its blocks being used."""

    RELEASED = KvLost.RELEASED.value
    EXPIRED = KvLost.EXPIRED.value


class Lease:
    """Blocks promised to one transfer. ``pool`` is the worker's KV memory."""

    __slots__ = ("blocks", "epoch", "incarnation", "keep", "opened", "pool", "received", "secret", "state", "timer",
                 "tokens", "transfer", "worker")  # fmt: skip

    def __init__(
        self, transfer: str, worker: str, incarnation: int, tokens: int, epoch: int, secret: bytes, pool: KvPool
    ) -> None:
        self.transfer = transfer
        self.worker = worker
        self.incarnation = incarnation
        self.tokens = tokens
        self.blocks = -(-tokens // pool.block_tokens)
        self.epoch = epoch
        self.secret = secret
        self.pool = pool
        self.state = State.RESERVED
        self.opened = False
        self.received = 0
        self.keep: Callable[[], bool] | None = None
        """Of a page: takes the committed blocks at once, since no request waits for them; False when they are wrong."""
        self.timer: TimerHandle | None = None

    def take(self, first_block: int, blocks: Sequence[Buffer]) -> None:
        """As ``Intake.take``: the next blocks, in order, and none beyond what was leased."""
        if self.state is not State.MOVING:
            raise MoveError(MoveReason.FENCED, f"lease {self.transfer} is {self.state}")
        if first_block != self.received or first_block + len(blocks) > self.blocks:
            raise MoveError(
                MoveReason.RANGE,
                f"blocks {first_block}+{len(blocks)} where {self.received} of {self.blocks} had come",
            )
        try:
            self.pool.write(self.transfer, self.epoch, first_block, blocks)
        except BlocksFenced as error:
            raise MoveError(MoveReason.FENCED, error.reason) from error
        self.received += len(blocks)

    def complete(self) -> None:
        """As ``Intake.complete``."""
        if self.state is not State.MOVING:
            raise MoveError(MoveReason.FENCED, f"lease {self.transfer} is {self.state}")
        if self.received != self.blocks:
            raise MoveError(MoveReason.INCOMPLETE, f"{self.received} of {self.blocks} blocks came")
        self.state = State.MOVED


class Arrivals:
    """All leases of one agent; the ``Sink`` of its mover.

    ``on_committed(worker, transfer)`` and ``on_lost(worker, transfer, end)`` tell whoever waits for the blocks.
    ``token_bytes`` makes secrets: unpredictable in production, seeded in the virtual fleet.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        token_bytes: Callable[[int], bytes],
        on_committed: Callable[[str, str], None],
        on_lost: Callable[[str, str, LeaseEnd], None],
    ) -> None:
        self._loop = loop
        self._token_bytes = token_bytes
        self._on_committed = on_committed
        self._on_lost = on_lost
        self._leases: dict[str, Lease] = {}
        self._epoch = 0
        # Transfers that are over here. With their epoch, blocks that were handed over: a repeated COMMIT is answered as
        # the first was. With 0, what nobody waits for any more: its RESERVE may still be on its way.
        self._over: OrderedDict[str, int] = OrderedDict()
        self.address = ""
        """Where the mover listens; set once it does."""
        self.expired = 0
        """Leases that nobody renewed, released or used in time."""
        self.tokens_of: dict[str, int] = {}
        """Tokens whose KV came and was committed, by worker, since start."""

    def __len__(self) -> int:
        return len(self._leases)

    def reserve(
        self, command: KvCommand, worker: str, incarnation: int, pool: KvPool, secret_bytes: int,
        keep: Callable[[], bool] | None = None,
    ) -> KvReply:  # fmt: skip
        """RESERVE: lease blocks. Asked again, the answer is the same lease. ``keep`` as in ``Lease``."""
        lease = self._leases.get(command.transfer)
        if lease is None:
            if command.transfer in self._over:
                return KvReply(False, command.transfer, "fenced")
            self._epoch += 1
            if command.tokens <= 0 or not pool.reserve(command.transfer, command.tokens, self._epoch):
                return KvReply(False, command.transfer, "no_space")
            lease = Lease(
                command.transfer,
                worker,
                incarnation,
                command.tokens,
                self._epoch,
                self._token_bytes(secret_bytes),
                pool,
            )
            lease.keep = keep
            self._leases[command.transfer] = lease
            self._renew(lease, command.lease_ms)
        elif lease.worker != worker:
            return KvReply(False, command.transfer, "fenced")
        return KvReply(True, command.transfer, "", lease.epoch, self.address, lease.secret)

    def commit(self, command: KvCommand) -> KvReply:
        """COMMIT: the blocks become readable, and whoever waits for them is told. Refused unless all have come."""
        transfer = command.transfer
        lease = self._leases.get(transfer)
        if lease is None:
            epoch = self._over.get(transfer, 0)
            known = epoch > 0 and command.epoch == epoch
            return KvReply(known, transfer, "" if known else "fenced", epoch)
        if command.epoch != lease.epoch:
            return KvReply(False, transfer, "fenced")
        if lease.state is State.MOVED:
            lease.pool.commit(transfer, lease.epoch)
            lease.state = State.COMMITTED
            self.tokens_of[lease.worker] = self.tokens_of.get(lease.worker, 0) + lease.tokens
            if lease.keep is None:
                self._on_committed(lease.worker, transfer)
            elif lease.keep():
                self.hand_over(transfer)
            else:
                self._end(lease, LeaseEnd.RELEASED)
                return KvReply(False, transfer, "fenced")
        elif lease.state is not State.COMMITTED:
            return KvReply(False, transfer, "incomplete")
        return KvReply(True, transfer, "", command.epoch)

    def renew(self, command: KvCommand) -> bool:
        """RENEW: a whole lease from now; False when there is no such lease any more."""
        lease = self._leases.get(command.transfer)
        if lease is None or command.epoch not in (0, lease.epoch):
            return False
        self._renew(lease, command.lease_ms)
        return True

    def release(self, transfer: str, epoch: int = 0) -> None:
        """RELEASE: free the lease, if it is still one and (``epoch`` 0 or) of this epoch. Its waiting job is told."""
        lease = self._leases.get(transfer)
        if lease is not None and epoch in (0, lease.epoch):
            self._end(lease, LeaseEnd.RELEASED)

    def decline(self, transfer: str) -> None:
        """Nobody waits for ``transfer`` any more: free its lease, and grant it none from now on."""
        self.release(transfer)
        self._remember(transfer, self._over.get(transfer, 0))

    def committed(self, worker: str, transfer: str) -> bool:
        """Whether the blocks of ``transfer`` wait on ``worker`` for their job."""
        lease = self._leases.get(transfer)
        return lease is not None and lease.worker == worker and lease.state is State.COMMITTED

    def holds(self, worker: str, transfer: str) -> bool:
        """Whether ``transfer`` has a lease on ``worker``; worker "" stands for any."""
        lease = self._leases.get(transfer)
        return lease is not None and worker in ("", lease.worker)

    def hand_over(self, transfer: str) -> int:
        """The job that reads the blocks owns them from now on; returns the tokens received."""
        lease = self._leases.pop(transfer)
        self._stop_timer(lease)
        lease.state = State.RELEASED
        self._remember(transfer, lease.epoch)
        return lease.tokens

    def open(self, transfer: str, epoch: int, secret: bytes) -> Lease:
        """As ``Sink.open``: the one writer of a lease, by its secret. Raises ``MoveError``."""
        lease = self._leases.get(transfer)
        expected = lease.secret if lease is not None else bytes(len(secret))
        right = hmac.compare_digest(expected, secret)
        if lease is None or not right or lease.opened:
            raise MoveError(MoveReason.LEASE)
        if epoch != lease.epoch or lease.state is not State.RESERVED:
            raise MoveError(MoveReason.FENCED)
        lease.opened = True
        lease.state = State.MOVING
        return lease

    def leases(self) -> list[KvLease]:
        """What this side holds, for a coordinator that rebuilds itself."""
        now_s = self._loop.time()
        return [
            KvLease(
                lease.transfer,
                lease.worker,
                lease.incarnation,
                lease.epoch,
                lease.tokens,
                lease.state.value,
                max(0.0, (lease.timer.when() - now_s) * 1e3) if lease.timer is not None else 0.0,
            )
            for lease in self._leases.values()
        ]

    def close(self) -> None:
        """Free everything."""
        for lease in list(self._leases.values()):
            self._end(lease, LeaseEnd.RELEASED)

    def _remember(self, transfer: str, epoch: int) -> None:
        self._over[transfer] = epoch
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _renew(self, lease: Lease, lease_ms: float) -> None:
        self._stop_timer(lease)
        lease.timer = self._loop.call_later(lease_ms / 1e3, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        self.expired += 1
        self._end(lease, LeaseEnd.EXPIRED)

    def _end(self, lease: Lease, end: LeaseEnd) -> None:
        del self._leases[lease.transfer]
        self._stop_timer(lease)
        lease.state = State.RELEASED
        lease.pool.release(lease.transfer)
        self._on_lost(lease.worker, lease.transfer, end)

    @staticmethod
    def _stop_timer(lease: Lease) -> None:
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None
