"""Pages on this node: idle prefixes that leave a worker's cache for another one, and those that come.

A page that leaves is a departure whose owner is nobody's request: ready at once, its pin ends with it. A page that came
is put into the prefix cache at COMMIT, where no request waits for it.
"""

from collections.abc import Callable

import msgspec

from quartet_agent.engines.pools import BlocksFenced, PagePool
from quartet_agent.kv.departures import DepartureEnd, Departures
from quartet_agent.worker import HostedWorker
from quartet_bus.messages import KvCommand, KvReply, PageManifest, StreamId
from quartet_bus.service import UNREADABLE

_manifest = msgspec.msgpack.Decoder(PageManifest).decode


class Leaving:
    """A page that is pinned for its transfer; the owner of its departure."""

    __slots__ = ("_over", "manifest", "pages", "tokens", "transfer", "worker")

    def __init__(
        self, transfer: str, worker: str, pages: PagePool, manifest: PageManifest, tokens: int,
        over: Callable[["Leaving"], None],
    ) -> None:  # fmt: skip
        self.transfer = transfer
        self.worker = worker
        self.pages = pages
        self.manifest = manifest
        self.tokens = tokens
        self._over = over

    def departed(self, end: DepartureEnd) -> None:
        """As ``DepartureOwner.departed``: its pin went with the departure."""
        self._over(self)


class Pages:
    """All pages of one agent that leave, and what is done with those that come. ``came(worker, transfer)`` is told when
    one is in a worker's cache, ``left`` when one is no longer held for leaving."""

    def __init__(
        self,
        departures: Departures,
        came: Callable[[str, str], None],
        left: Callable[[str], None],
    ) -> None:
        self._departures = departures
        self._came = came
        self._left = left
        self._leaving: dict[str, Leaving] = {}

    def __len__(self) -> int:
        return len(self._leaving)

    def page(self, command: KvCommand, worker: HostedWorker) -> KvReply:
        """PAGE: pin what is asked for. Asked again, the answer is the same."""
        transfer = command.transfer
        leaving = self._leaving.get(transfer)
        if leaving is None:
            pool, pages = worker.adapter.kv, worker.adapter.pages
            if pool is None or pages is None:
                return KvReply(False, transfer, "not_capable")
            if self._departures.holds("", transfer):
                return KvReply(False, transfer, "fenced")
            manifest = pages.pin_pages(transfer, command.prefix)
            if manifest is None:
                return KvReply(False, transfer, "in_use")
            tokens = len(manifest.contents) * pool.block_tokens
            leaving = Leaving(transfer, worker.id, pages, manifest, tokens, self._forget)
            self._leaving[transfer] = leaving
            self._departures.expect(transfer, worker.id, worker.incarnation, StreamId(""), tokens, pool, leaving)
            self._departures.pinned(transfer)
        elif leaving.worker != worker.id or leaving.manifest.contents[-1] != command.prefix:
            return KvReply(False, transfer, "fenced")
        packed = msgspec.msgpack.encode(leaving.manifest)
        return KvReply(True, transfer, tokens=leaving.tokens, manifest=packed)

    def arrived_elsewhere(self, transfer: str) -> None:
        """Its target has committed it: what nobody used since need not be here any more. Before its RELEASE."""
        leaving = self._leaving.get(transfer)
        if leaving is not None:
            leaving.pages.drop_pages(transfer)

    def keep(self, worker: HostedWorker, transfer: str, manifest: PageManifest) -> bool:
        """A page that came to ``worker`` is committed: cache it. False when its blocks are not what was leased."""
        assert worker.adapter.pages is not None  # looked at when it was leased
        try:
            worker.adapter.pages.keep_pages(transfer, manifest)
        except BlocksFenced:
            return False
        self._came(worker.id, transfer)
        return True

    def _forget(self, leaving: Leaving) -> None:
        self._leaving.pop(leaving.transfer, None)
        self._left(leaving.worker)


def manifest_of(command: KvCommand) -> PageManifest | None:
    """What comes with a page's RESERVE; None when it cannot be read, or its blocks are not as many or not named."""
    try:
        manifest = _manifest(command.manifest)
    except UNREADABLE:
        return None
    blocks = len(manifest.contents)
    right = (
        blocks > 0
        and command.tokens % blocks == 0
        and all(index < blocks for index, _ in manifest.rungs)
        and all(0 < content < 1 << 64 for content in manifest.contents)
    )
    return manifest if right else None
