"""What a coordinator asks of this node's KV, and the answers."""

from collections.abc import Callable, Mapping
from functools import partial

from quartet_agent.kv.arrivals import Arrivals
from quartet_agent.kv.departures import Departures
from quartet_agent.kv.pages import Pages, manifest_of
from quartet_agent.kv.terms import Terms
from quartet_agent.kv.wire import SECRET_BYTES
from quartet_agent.worker import HostedWorker
from quartet_bus.messages import KvCommand, KvReply, KvVerb, TransferReason


class KvCommands:
    """Answers ``kv.cmd.<node>``. Without ``pages`` nothing is paged out of or into this node."""

    def __init__(
        self,
        workers: Mapping[str, HostedWorker],
        arrivals: Arrivals,
        departures: Departures,
        pages: Pages | None = None,
    ) -> None:
        self._workers = workers
        self._arrivals = arrivals
        self._departures = departures
        self._pages = pages
        self._terms = Terms()

    def answer(self, command: KvCommand) -> KvReply:
        """Do what ``command`` says and answer; a replaced coordinator is told ``old_term`` and which is."""
        transfer = command.transfer
        if not self._terms.admit(command.term, command.coordinator):
            return KvReply(False, transfer, "old_term", term=self._terms.highest)
        match command.verb:
            case KvVerb.RESERVE:
                return self._reserve(command)
            case KvVerb.MOVE:
                return self._move(command)
            case KvVerb.COMMIT:
                return self._arrivals.commit(command)
            case KvVerb.RENEW:
                return self._renew(command)
            case KvVerb.RELEASE:
                return self._release(command)
            case KvVerb.LEASES:
                leases = (*self._arrivals.leases(), *self._departures.leases())
                return KvReply(True, transfer, leases=leases)
            case KvVerb.PAGE:
                return self._page(command)
            case KvVerb.HELD:
                return self._held(command)

    def _reserve(self, command: KvCommand) -> KvReply:
        worker = self._workers.get(command.worker)
        if worker is None or worker.incarnation != command.incarnation:
            return KvReply(False, command.transfer, "fenced")
        if worker.adapter.kv is None:
            return KvReply(False, command.transfer, "not_capable")
        keep: Callable[[], bool] | None = None
        if command.reason is TransferReason.PAGE_OUT:
            if self._pages is None or worker.adapter.pages is None:
                return KvReply(False, command.transfer, "not_capable")
            manifest = manifest_of(command)
            if manifest is None:
                return KvReply(False, command.transfer, "manifest")
            keep = partial(self._pages.keep, worker, command.transfer, manifest)
        return self._arrivals.reserve(command, worker.id, worker.incarnation, worker.adapter.kv, SECRET_BYTES, keep)

    def _page(self, command: KvCommand) -> KvReply:
        worker = self._workers.get(command.worker)
        if worker is None or worker.incarnation != command.incarnation:
            return KvReply(False, command.transfer, "fenced")
        if self._pages is None:
            return KvReply(False, command.transfer, "not_capable")
        return self._pages.page(command, worker)

    def _held(self, command: KvCommand) -> KvReply:
        worker = self._workers.get(command.worker)
        if worker is None or worker.incarnation != command.incarnation:
            return KvReply(False, command.transfer, "fenced")
        manifest = manifest_of(command)
        if self._pages is None or worker.adapter.pages is None or manifest is None:
            return KvReply(False, command.transfer, "not_capable")
        return KvReply(True, command.transfer, tokens=worker.adapter.pages.held(manifest))

    def _move(self, command: KvCommand) -> KvReply:
        worker = self._workers.get(command.worker)
        if worker is None or worker.incarnation != command.incarnation:
            return KvReply(False, command.transfer, "fenced")
        if worker.adapter.kv is None:
            return KvReply(False, command.transfer, "not_capable")
        reason = self._departures.move(command, worker.id, worker.incarnation)
        return KvReply(not reason, command.transfer, reason, command.epoch)

    def _renew(self, command: KvCommand) -> KvReply:
        # One agent may hold both sides, when a transfer stays within the node: the command's worker tells which.
        arrivals, departures = self._arrivals, self._departures
        if arrivals.holds(command.worker, command.transfer):
            known = arrivals.renew(command)
        elif departures.holds(command.worker, command.transfer):
            known = departures.renew(command)
        else:
            known = False
        return KvReply(known, command.transfer, "" if known else "lease_lost", command.epoch)

    def _release(self, command: KvCommand) -> KvReply:
        if self._arrivals.holds(command.worker, command.transfer):
            self._arrivals.release(command.transfer, command.epoch)
        if self._departures.holds(command.worker, command.transfer):
            if command.committed and self._pages is not None:
                self._pages.arrived_elsewhere(command.transfer)
            self._departures.release(command.transfer)
        return KvReply(True, command.transfer, "", command.epoch)
