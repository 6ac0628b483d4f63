"""The pages that an arena holds: which content is in which slot, what must stay, and what goes first. Pure.

Invariants: a page is there only with all pages before it in its chain; a page that is pinned, being filled, or has one
behind it is never evicted; a slot is free, granted to the agent, or one page's. Of the pages with none behind them the
one goes first that was unused longest.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from quartet_connector.contents import Root, next_id, root_id
from quartet_connector.words import Removed, Stored


class Page:
    """One page. ``kept``: it came from another engine, and was not used here yet. ``root`` only of a chain's first."""

    __slots__ = ("children", "id", "kept", "parent", "pins", "ready", "root", "slot", "tokens", "used")

    def __init__(self, id_: int, parent: int, tokens: bytes, root: Root | None, slot: int) -> None:
        self.id = id_
        self.parent = parent
        self.tokens = tokens
        self.root = root
        self.slot = slot
        self.used = 0
        self.pins = 0
        self.children = 0
        self.ready = False
        self.kept = False


class Arena:
    """An index of ``slots`` slots. ``drain`` tells what became of its pages."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.evicted = 0
        """Pages that made room for others, since the start."""
        self._pages: dict[int, Page] = {}
        self._tick = 0
        self._ends: list[tuple[int, int]] = []  # a heap of (used, id): chains' ends, and what was one once
        self._free = deque(range(slots))
        self._granted: set[int] = set()
        self._told: list[Stored | Removed] = []

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def granted(self) -> int:
        """Slots that are the agent's."""
        return len(self._granted)

    def get(self, id_: int) -> Page | None:
        """The page of this content, ready or not."""
        return self._pages.get(id_)

    def match(self, root: Root, blocks: Iterable[bytes], ids: Iterable[int] | None = None) -> list[Page]:
        """The pages that are ready of a prompt's ``blocks``, from the first on. ``ids`` are theirs, where known.

        Tokens are compared, block by block from the root on: equal ids alone find nothing.
        """
        found: list[Page] = []
        parent = root_id(root)
        known = iter(ids) if ids is not None else None
        for tokens in blocks:
            id_ = next(known) if known is not None else next_id(parent, tokens)
            page = self._pages.get(id_)
            if page is None or not page.ready or page.parent != parent or page.tokens != tokens:
                break
            if not found and page.root != root:
                break
            found.append(page)
            parent = id_
        return found

    def touch(self, chain: Sequence[Page]) -> None:
        """A chain's first pages were used."""
        self._tick += 1
        for page in chain:
            page.used = self._tick
        if chain:
            self._offer(chain[-1])

    def pin(self, pages: Iterable[Page]) -> None:
        """Have them stay, once more."""
        for page in pages:
            page.pins += 1

    def unpin(self, pages: Iterable[Page]) -> None:
        """Take back a ``pin``."""
        for page in pages:
            page.pins -= 1
            self._offer(page)

    def claim(self, parent: int, tokens: bytes, root: Root | None) -> Page | None:
        """A slot for the page behind ``parent`` (with ``root``: for a chain's first), which is not there yet: pinned
        once, and not ready. None when nothing can make room, or the page before it is not there."""
        before = [self._pages[parent]] if parent in self._pages else []
        if root is None and not before:
            return None
        self.pin(before)  # it must not make the room itself
        slot = self._room()
        self.unpin(before)
        if slot is None:
            return None
        page = Page(next_id(parent, tokens), parent, tokens, root, slot)
        page.pins = 1
        self._add(page)
        return page

    def ready(self, page: Page) -> None:
        """Its slot is filled. The pin of ``claim`` stays."""
        page.ready = True
        self._offer(page)
        self._tell(page)

    def abandon(self, page: Page) -> None:
        """It will not be filled: what was claimed is given back. Pages behind it must have been before."""
        self._forget(page)
        self._free.append(page.slot)

    def grant(self, slots: int) -> list[int]:
        """Up to ``slots`` slots for the agent to write."""
        granted: list[int] = []
        while len(granted) < slots and (slot := self._room()) is not None:
            granted.append(slot)
        self._granted.update(granted)
        return granted

    def give_back(self, slots: Iterable[int]) -> None:
        """Granted slots are free again; others are passed over."""
        for slot in slots:
            if slot in self._granted:
                self._granted.remove(slot)
                self._free.append(slot)

    def revoke(self) -> None:
        """The agent is gone, and what it was granted is free."""
        self._free.extend(self._granted)
        self._granted.clear()

    def adopt(self, slot: int, parent: int, tokens: bytes, root: Root | None) -> Page | None:
        """A granted slot holds the page behind ``parent`` now, ready. Of one that is there already the slot is freed.

        None when the slot was not granted, or the page before it is not there.
        """
        if slot not in self._granted or (root is None and parent not in self._pages):
            return None
        self._granted.remove(slot)
        page = Page(next_id(parent, tokens), parent, tokens, root, slot)
        there = self._pages.get(page.id)
        if there is not None:
            self._free.append(slot)
            return there
        page.kept = page.ready = True
        self._add(page)
        self._tell(page)
        return page

    def drop(self, chain: Sequence[Page]) -> int:
        """Forget a chain's last pages, as far as nobody needs them; returns how many."""
        dropped = 0
        for page in reversed(chain):
            if page.pins or page.children or self._pages.get(page.id) is not page:
                break
            self._evict(page)
            dropped += 1
        return dropped

    def stored(self) -> list[Stored]:
        """All pages that are ready, each behind the one before it: for an agent that comes new."""
        children: dict[int, list[Page]] = {}
        for page in self._pages.values():
            children.setdefault(page.parent, []).append(page)
        open_pages = [page for page in self._pages.values() if page.root is not None]
        told: list[Stored] = []
        while open_pages:
            page = open_pages.pop()
            if page.ready:
                told.append(_stored(page))
                open_pages.extend(children.get(page.id, ()))
        return told

    def drain(self) -> list[Stored | Removed]:
        """What became of pages since the last call, in order."""
        told, self._told = self._told, []
        return told

    # Inside

    def _room(self) -> int | None:
        while not self._free and self._ends:
            used, id_ = heappop(self._ends)
            page = self._pages.get(id_)
            if page is not None and page.used == used and self._idle(page):
                self._evict(page)
                self.evicted += 1
        return self._free.popleft() if self._free else None

    @staticmethod
    def _idle(page: Page) -> bool:
        return page.ready and not page.pins and not page.children

    def _offer(self, page: Page) -> None:
        """It may have become one that can make room."""
        if self._idle(page):
            if len(self._ends) > 4 * self.slots:
                self._ends = [(each.used, each.id) for each in self._pages.values() if self._idle(each)]
                heapify(self._ends)
            heappush(self._ends, (page.used, page.id))

    def _evict(self, page: Page) -> None:
        self._forget(page)
        self._free.append(page.slot)
        if self._told and isinstance(self._told[-1], Removed):
            self._told[-1].ids.append(page.id)
        else:
            self._told.append(Removed([page.id]))

    def _add(self, page: Page) -> None:
        self._tick += 1
        page.used = self._tick
        self._pages[page.id] = page
        before = self._pages.get(page.parent)
        if before is not None:
            before.children += 1
            before.used = self._tick
        self._offer(page)

    def _forget(self, page: Page) -> None:
        del self._pages[page.id]
        before = self._pages.get(page.parent)
        if before is not None:
            before.children -= 1
            self._offer(before)

    def _tell(self, page: Page) -> None:
        self._told.append(_stored(page))


def _stored(page: Page) -> Stored:
    return Stored(page.id, page.parent, page.tokens, (page.root.salt, page.root.adapter) if page.root else None)
