"""What the agent has in the arena: chains that it pinned, and those that it wants saved or dropped in the next step."""

from collections.abc import Callable, Sequence

from quartet_connector.arena import Arena, Page
from quartet_connector.engine import EngineBlocks
from quartet_connector.known import Known
from quartet_connector.saving import StepCopies
from quartet_connector.words import Drop, Dropped, EngineWord, NotPinned, Pin, Pinned


class _Pinned:
    """What a ``Pin`` keeps. ``waiting`` are ids of pages that are not ready yet."""

    __slots__ = ("pages", "since_ms", "waiting")

    def __init__(self, kept: list[Page], waiting: set[int], since_ms: float) -> None:
        self.pages = kept
        self.waiting = waiting
        self.since_ms = since_ms


class Pins:
    """Of one agent, in one arena. ``say`` takes what it shall hear."""

    def __init__(
        self,
        arena: Arena,
        known: Known,
        engine: EngineBlocks,
        copies: StepCopies,
        now_ms: Callable[[], float],
        say: Callable[[Sequence[EngineWord]], None],
    ) -> None:
        self._arena = arena
        self._known = known
        self._engine = engine
        self._copies = copies
        self._now_ms = now_ms
        self._say = say
        self._pins: dict[str, _Pinned] = {}
        self._queued: list[Pin | Drop] = []
        self.dropped = 0
        """Blocks that were dropped from the engine's cache."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def wanted(self) -> bool:
        """Whether anything waits for a step."""
        return bool(self._queued)

    def pin(self, word: Pin) -> None:
        """At once, when all of it is in the arena; else in the next step."""
        if word.transfer in self._pins:
            return
        found = [page for id_ in word.ids if (page := self._arena.get(id_)) is not None and page.ready]
        if found and len(found) == len(word.ids) and not word.idle:
            self._keep(word, found, set())
        else:
            self._queued.append(word)

    def drop(self, word: Drop) -> None:
        """In the next step."""
        self._queued.append(word)

    def release(self, transfer: str) -> None:
        """The agent needs it no more."""
        self._queued = [other for other in self._queued if other.transfer != transfer]
        self._unpin(transfer)

    def step(self, off: str) -> None:
        """Do what waits for a step; ``off``: why no pin can be had any more."""
        queued, self._queued = self._queued, []
        for word in queued:
            if isinstance(word, Drop):
                self._drop(word)
            elif off:
                self._say([NotPinned(word.transfer, off)])
            else:
                self._pin(word)

    def ready(self, id_: int) -> None:
        """A page can be read now."""
        for transfer, pinned in self._pins.items():
            if id_ in pinned.waiting:
                pinned.waiting.remove(id_)
                if not pinned.waiting:
                    self._say([Pinned(transfer, [page.slot for page in pinned.pages])])

    def fail(self, id_: int, reason: str) -> None:
        """A page will never be."""
        for transfer in [transfer for transfer, pinned in self._pins.items() if id_ in pinned.waiting]:
            self._unpin(transfer)
            self._say([NotPinned(transfer, reason)])

    def end(self) -> None:
        """The agent is gone."""
        for transfer in list(self._pins):
            self._unpin(transfer)
        self._queued.clear()

    # Inside

    def _keep(self, word: Pin, found: list[Page], waiting: set[int]) -> None:
        self._arena.pin(found)
        self._pins[word.transfer] = _Pinned(found, waiting, self._now_ms())
        if not waiting:
            self._say([Pinned(word.transfer, [page.slot for page in found])])

    def _unpin(self, transfer: str) -> _Pinned | None:
        pinned = self._pins.pop(transfer, None)
        if pinned is not None:
            self._arena.unpin(pinned.pages)
        return pinned

    def _pin(self, word: Pin) -> None:
        found: list[Page] = []
        reason = self._gather(word, found)
        self._arena.unpin(found)
        if reason:
            # what was claimed for it is saved all the same: it is on its way
            self._say([NotPinned(word.transfer, reason)])
        else:
            self._keep(word, found, {page.id for page in found if not page.ready})

    def _gather(self, word: Pin, found: list[Page]) -> str:
        """The pages of a chain into ``found``, pinned, saved as far as they are not there; or why that cannot be."""
        if not word.ids:
            return "nothing asked for"
        number: int | None = None
        for index, id_ in enumerate(word.ids):
            block = self._known.get(id_)
            number = self._engine.find(block.hash) if block is not None else None
            page = self._arena.get(id_)
            if page is None:
                if block is None or number is None:
                    return f"block {index} of {len(word.ids)} is not cached"
                page = self._copies.save(block, number)
                if page is None:
                    return "the arena has no room"
            if found and page.parent != found[-1].id:
                return f"block {index} is not behind the one before it"
            self._arena.pin([page])
            found.append(page)
        return "in use" if word.idle and number is not None and not self._copies.unused(number) else ""

    def _drop(self, word: Drop) -> None:
        pinned = self._unpin(word.transfer)
        if pinned is None:
            self._say([Dropped(word.transfer, 0, 0)])
            return
        dropped = 0
        for page in reversed(pinned.pages):
            block = self._known.get(page.id)
            if block is None:
                continue
            number = self._engine.find(block.hash)
            if block.children or block.used_ms > pinned.since_ms or not (number is None or self._copies.unused(number)):
                break
            if number is not None:
                self._engine.evict(number)
                dropped += 1
            self._known.forget(block)
        self.dropped += dropped
        self._say([Dropped(word.transfer, dropped, self._arena.drop(pinned.pages))])
