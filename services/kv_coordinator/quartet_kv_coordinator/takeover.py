"""What a new active coordinator finds out: which leases the agents hold, and what became of plans it only watched."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from quartet_bus.messages import KvCommand, KvLease, KvVerb, TransferPlan
from quartet_core.transfer import Adopt, State
from quartet_kv_coordinator.commands import Commands

MAX_WATCHED = 4096
"""Plans a standby remembers; the oldest are forgotten first. What it forgot it finds again as leases without a plan."""


@dataclass(slots=True, frozen=True)
class Watched:
    """A plan that somebody else carries, or nobody yet."""

    plan: TransferPlan
    heard_ns: int


class Watch:
    """The plans heard on the bus whose outcome was not heard yet."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, Watched] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._plans

    def keep(self, plan: TransferPlan, heard_ns: int) -> None:
        """Remember ``plan``; hearing it again changes nothing."""
        self._plans.setdefault(plan.transfer, Watched(plan, heard_ns))
        while len(self._plans) > MAX_WATCHED:
            self._plans.popitem(last=False)

    def over(self, transfer: str) -> None:
        """Its outcome was announced."""
        self._plans.pop(transfer, None)

    def take(self, before_ns: int) -> list[Watched]:
        """Those heard before ``before_ns``, oldest first; they are watched no longer."""
        taken = [watched for watched in self._plans.values() if watched.heard_ns < before_ns]
        for watched in taken:
            del self._plans[watched.plan.transfer]
        return taken


class Survey:
    """Asks agents what they hold, under one term."""

    def __init__(self, commands: Commands, term: int, coordinator: str) -> None:
        self._commands = commands
        self._term = term
        self._coordinator = coordinator

    async def leases(self, nodes: list[str]) -> dict[str, list[tuple[str, KvLease]]]:
        """Transfer → its (node, lease) on all ``nodes``. A node that does not answer is left to its leases' expiry."""
        answers = await asyncio.gather(*(self._leases_of(node) for node in nodes))
        found: dict[str, list[tuple[str, KvLease]]] = {}
        for node, leases in zip(nodes, answers, strict=True):
            for lease in leases:
                found.setdefault(lease.transfer, []).append((node, lease))
        return found

    async def fate(self, plan: TransferPlan, node: str | None, leases: list[tuple[str, KvLease]]) -> Adopt:
        """What became of ``plan`` on its target, which runs on ``node``."""
        for _, lease in leases:
            if (lease.worker, lease.incarnation) == (plan.target, plan.target_incarnation):
                return Adopt(True, lease.state == State.COMMITTED, lease.epoch)
        if node is None:
            return Adopt(False)
        # No lease: never granted, over, or handed to the request that reads the blocks. An agent remembers the epoch
        # of the last kind, and names it in its answer to a COMMIT that cannot be right.
        probe = KvCommand(
            KvVerb.COMMIT, plan.transfer, self._term, self._coordinator, plan.target, plan.target_incarnation
        )
        reply = await self._commands.put(node, probe, lambda: True)
        if reply is None or reply.epoch <= 0:
            return Adopt(False)
        return Adopt(False, True, reply.epoch)

    async def free(self, node: str, lease: KvLease) -> None:
        """Give back a lease that no transfer stands for."""
        command = KvCommand(
            KvVerb.RELEASE,
            lease.transfer,
            self._term,
            self._coordinator,
            lease.worker,
            lease.incarnation,
            epoch=lease.epoch,
        )
        await self._commands.put(node, command, lambda: True)

    async def _leases_of(self, node: str) -> tuple[KvLease, ...]:
        reply = await self._commands.put(
            node, KvCommand(KvVerb.LEASES, "", self._term, self._coordinator), lambda: True
        )
        return reply.leases if reply is not None and reply.ok else ()


def orphaned(leases: list[tuple[str, KvLease]]) -> list[tuple[str, KvLease]]:
    """Those of a transfer's leases that nobody will end: committed blocks belong to their request already."""
    return [(node, lease) for node, lease in leases if lease.state != State.COMMITTED]
