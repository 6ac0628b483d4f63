"""The scheduler's side of pages: which are loaded for a request, which are saved, what the agent has of them.

Runs beside an engine's scheduler, and knows no engine: what it needs of one is ``EngineBlocks``. Methods are called
from two threads, the scheduler's and the one that hears the agent; what touches the engine's blocks happens in the
scheduler's alone, in ``step``. Nothing here waits for the agent.
"""

import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from quartet_connector import page as pages
from quartet_connector.arena import Arena, Page
from quartet_connector.contents import Root, blocks_of, chain, root_id, token_bytes
from quartet_connector.known import Block, Known
from quartet_connector.layout import PROTOCOL, PageLayout
from quartet_connector.words import (
    AgentWord,
    Ask,
    Cold,
    Coldest,
    Drop,
    Dropped,
    EngineWord,
    Fill,
    Granted,
    Keep,
    Kept,
    NotPinned,
    Pin,
    Pinned,
    Release,
    Return,
    Want,
    Welcome,
)

SPILL_BLOCKS = 64
"""Blocks that are saved a step at most because they will be evicted next: what it adds to a step stays small."""

_TELL_MS = 250.0
_MOST_CHAINS = 256
_COLDEST = 16


class EngineBlocks(Protocol):
    """An engine's prefix cache. Called from the scheduler's thread alone."""

    @property
    def total(self) -> int:
        """Blocks that it has."""
        ...

    def fill(self) -> tuple[int, int]:
        """How many are empty, and how many cached and used by nobody."""
        ...

    def find(self, hash_: bytes) -> int | None:
        """The number of the cached block that the engine calls so."""
        ...

    def users(self, block: int) -> int:
        """How many use a block, each ``hold`` among them."""
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep blocks from being evicted."""
        ...

    def let_go(self, blocks: Sequence[int]) -> None:
        """Take back a ``hold``; the first of them are the last to be evicted."""
        ...

    def evict(self, block: int) -> None:
        """Drop an idle block's content: it is empty, and the next one that is given out."""
        ...

    def next_evicted(self, limit: int) -> list[bytes]:
        """The engine's names of what stands among the next ``limit`` blocks that it gives out."""
        ...


class Request(NamedTuple):
    """A request as a scheduler has it. ``hashes`` are the engine's names of its full blocks; ``root`` None: its KV
    depends on more than tokens, so that it takes no part."""

    id: str
    root: Root | None
    tokens: Sequence[int]
    hashes: Sequence[bytes]


class Copies(NamedTuple):
    """What a step copies: (block, slot) of pages to load before its forward pass, and to save after it."""

    job: int
    loads: list[tuple[int, int]]
    saves: list[tuple[int, int]]


class _Chain(NamedTuple):
    """The content of a request's full blocks, as far as they were looked at."""

    ids: list[int]
    blocks: list[bytes]


class _Matched(NamedTuple):
    computed: int
    pages: list[Page]


class _Job(NamedTuple):
    loading: list[Page]
    saving: list[Page]
    held: list[int]


class _Pinned:
    """What a ``Pin`` keeps. ``waiting`` are ids of pages that are not ready yet."""

    __slots__ = ("pages", "since_ms", "waiting")

    def __init__(self, kept: list[Page], waiting: set[int], since_ms: float) -> None:
        self.pages = kept
        self.waiting = waiting
        self.since_ms = since_ms


class PageScheduler:
    """Pages of one engine. ``memory`` is the arena's; ``tell`` takes what the agent shall hear, and never waits.

    ``ahead``: what stands in so many of the blocks that are given out next is saved before; 0: nothing is.
    """

    def __init__(
        self,
        layout: PageLayout,
        slots: int,
        memory: memoryview,
        blocks: EngineBlocks,
        life: str,
        now_ms: Callable[[], float],
        tell: Callable[[Sequence[EngineWord]], None],
        *,
        ahead: int = 64,
    ) -> None:
        self._layout = layout
        self._fingerprint = layout.fingerprint
        self._memory = memory
        self._engine = blocks
        self._life = life
        self._now_ms = now_ms
        self._say = tell
        self._ahead = ahead
        self._lock = threading.Lock()
        self._arena = Arena(slots)
        self._known = Known(2 * blocks.total + slots)
        self._fill = Fill(total=blocks.total, empty=blocks.total, slots=slots)
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        self._matched: dict[str, _Matched] = {}
        self._loads: list[tuple[int, int]] = []
        self._loading: list[Page] = []
        self._jobs: dict[int, _Job] = {}
        self._held: Counter[int] = Counter()
        self._last_job = 0
        self._pins: dict[str, _Pinned] = {}
        self._queued: list[Pin | Drop] = []
        self._coldest = 0  # how many the agent asked for
        self._told_ms = -_TELL_MS
        self.off = ""
        """Why no pages are saved or loaded any more."""

    # The engine's side

    @property
    def wanted(self) -> bool:
        """Whether the agent asked for something that takes a step."""
        return bool(self._queued)

    def matched(self, request: Request, computed_tokens: int) -> int:
        """How many tokens beyond ``computed_tokens`` are in pages; those stay until ``step``. The prompt's last token
        is never among them, since it must be computed."""
        with self._lock:
            self._unmatch(request.id)
            if request.root is None or self.off or not len(self._arena):
                return 0
            size = self._layout.block_tokens
            most = (len(request.tokens) - 1) // size
            content = self._content(request, most)
            found = self._arena.match(request.root, content.blocks[:most], content.ids)
            if len(found) * size <= computed_tokens:
                return 0
            self._arena.pin(found)
            self._matched[request.id] = _Matched(computed_tokens, found)
            return len(found) * size - computed_tokens

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """The request's ``blocks`` are its own now: its pages for ``external_tokens`` tokens are loaded this step."""
        with self._lock:
            matched = self._matched.get(request.id)
            if matched is None or not external_tokens:
                return
            del self._matched[request.id]
            size = self._layout.block_tokens
            first = matched.computed // size
            last = first + -(-external_tokens // size)
            for index in range(first, last):
                page = matched.pages[index]
                self._loads.append((blocks[index], page.slot))
                if page.kept:
                    page.kept = False
                    self._fill.hit_kept += 1
            self._arena.touch(matched.pages)
            self._loading += matched.pages

    def step(self, *, idle: bool) -> Copies:
        """Called once a step, when everything is scheduled; ``idle``: nothing was."""
        with self._lock:
            for id_ in list(self._matched):
                self._unmatch(id_)
            job = _Job(self._loading, [], [])
            loads, self._loads, self._loading = self._loads, [], []
            saves: list[tuple[int, int]] = []
            queued, self._queued = self._queued, []
            if self.off:
                queued = [word for word in queued if isinstance(word, Drop) or self._not_pinned(word, self.off)]
            for word in queued:
                if isinstance(word, Drop):
                    self._drop(word)
                else:
                    self._pin(word, job, saves)
            if self._ahead and not self.off:
                self._save_ahead(job, saves)
            self._last_job += 1
            if loads or saves:
                self._jobs[self._last_job] = job
            self._tell_state(idle=idle)
            self._tell()
            return Copies(self._last_job, loads, saves)

    def copied(self, job_id: int, failed: str = "") -> None:
        """A step's copies were made; or not, and ``failed`` says why: then there are no more."""
        with self._lock:
            job = self._jobs.pop(job_id, None)
            if job is None:
                return
            self._engine.let_go(list(reversed(job.held)))
            self._held -= Counter(job.held)
            self._arena.unpin(job.loading)
            if failed:
                self.off = self.off or failed
                self._fill.failed_loads += len(job.loading)
                for page in reversed(job.saving):
                    self._fail_pins(page.id, failed)
                    self._arena.abandon(page)
                self._say([Welcome(PROTOCOL, self._life, self._layout, self._arena.slots, self.off)])
            else:
                self._fill.loaded += len(job.loading)
                self._fill.saved += len(job.saving)
                for page in job.saving:
                    self._arena.ready(page)
                self._tell()
                for page in job.saving:
                    self._arena.unpin([page])
                    self._is_ready(page.id)
            self._tell()

    def finished(self, request: Request, computed_tokens: int) -> None:
        """The request has ended; its first ``computed_tokens`` tokens are computed."""
        with self._lock:
            self._unmatch(request.id)
            if request.root is not None and pages.can_root(request.root):
                full = min(computed_tokens // self._layout.block_tokens, len(request.hashes))
                content = self._content(request, full)
                self._known.see(request.root, content.ids[:full], content.blocks, request.hashes, self._now_ms())
            self._chains.pop(request.id, None)

    def reset(self) -> bool:
        """What is cached is void, since the weights are others; False while copies are under way.

        Nobody knows the new weights by the files any more, so pages are exchanged with no other engine from now on.
        """
        with self._lock:
            if self._jobs or self._loads:
                return False
            self._layout = msgspec.structs.replace(self._layout, weights=uuid.uuid4().hex)
            self._fingerprint = self._layout.fingerprint
            self._arena = Arena(self._arena.slots)
            self._known.clear()
            self._chains.clear()
            self._matched.clear()
            self._end_agent()
            self._greet()
            return True

    # The agent's side

    def hello(self) -> None:
        """An agent came: tell it all that it must know first, beginning with ``Welcome``."""
        with self._lock:
            self._greet()

    def gone(self) -> None:
        """The agent went: what it had ends."""
        with self._lock:
            self._arena.revoke()
            for pinned in self._pins.values():
                self._arena.unpin(pinned.pages)
            self._end_agent()

    def hear(self, word: AgentWord) -> None:
        """What the agent says."""
        with self._lock:
            match word:
                case Ask(limit):
                    self._coldest = max(0, min(limit, _COLDEST))
                case Want(slots):
                    granted = self._arena.grant(slots - self._arena.granted)
                    if granted:
                        self._say([Granted(granted)])
                case Return(slots):
                    self._arena.give_back(slots)
                case Keep():
                    self._keep(word)
                case Pin():
                    self._begin_pin(word)
                case Release(transfer):
                    self._queued = [other for other in self._queued if other.transfer != transfer]
                    self._unpin(transfer)
                case Drop():
                    self._queued.append(word)
            self._tell()

    def _greet(self) -> None:
        told: list[EngineWord] = [Welcome(PROTOCOL, self._life, self._layout, self._arena.slots, self.off)]
        told += self._arena.stored()
        self._arena.drain()
        self._say([*told, self._current()])

    def _end_agent(self) -> None:
        self._pins.clear()
        self._queued.clear()
        self._coldest = 0

    # Inside: requests

    def _content(self, request: Request, blocks: int) -> _Chain:
        """The content of a request's first ``blocks`` blocks."""
        assert request.root is not None
        size = self._layout.block_tokens
        content = self._chains.get(request.id)
        if content is None or len(content.ids) < blocks:
            data = blocks_of(token_bytes(request.tokens[: blocks * size]), size)
            content = self._chains[request.id] = _Chain(chain(request.root, data), data)
            while len(self._chains) > _MOST_CHAINS:
                self._chains.popitem(last=False)
        return content

    def _unmatch(self, id_: str) -> None:
        matched = self._matched.pop(id_, None)
        if matched is not None:
            self._arena.unpin(matched.pages)

    # Inside: saving

    def _save(self, block: Block, number: int, job: _Job, saves: list[tuple[int, int]]) -> Page | None:
        """Have a cached block saved in this step; None when there is no room for it."""
        parent = block.parent.id if block.parent is not None else root_id(block.root or Root())
        page = self._arena.claim(parent, block.tokens, block.root)
        if page is None:
            return None
        layout = self._layout
        head = pages.encode(self._fingerprint, parent, block.tokens, block.root, layout.kv_bytes, layout.block_tokens)
        start = page.slot * layout.slot_bytes
        self._memory[start : start + len(head)] = head
        self._engine.hold([number])
        self._held[number] += 1
        job.held.append(number)
        job.saving.append(page)
        saves.append((number, page.slot))
        return page

    def _save_ahead(self, job: _Job, saves: list[tuple[int, int]]) -> None:
        """Save what the engine evicts next, with all that is before it."""
        left = SPILL_BLOCKS - len(saves)
        for hash_ in self._engine.next_evicted(self._ahead):
            end = self._known.by_hash(hash_)
            if end is None or self._arena.get(end.id) is not None:
                continue
            for block in self._known.chain(end.id):
                if self._arena.get(block.id) is not None:
                    continue
                number = self._engine.find(block.hash)
                if number is None or left <= 0 or self._save(block, number, job, saves) is None:
                    break
                left -= 1
            if left <= 0:
                return

    # Inside: pins

    def _begin_pin(self, word: Pin) -> None:
        """At once, when all is in the arena; else in the next step."""
        if word.transfer in self._pins:
            return
        found = [page for id_ in word.ids if (page := self._arena.get(id_)) is not None and page.ready]
        if len(found) == len(word.ids) and not word.idle:
            self._arena.pin(found)
            self._pins[word.transfer] = _Pinned(found, set(), self._now_ms())
            self._say([Pinned(word.transfer, [page.slot for page in found])])
        else:
            self._queued.append(word)

    def _pin(self, word: Pin, job: _Job, saves: list[tuple[int, int]]) -> None:
        found: list[Page] = []
        waiting: set[int] = set()
        reason = "" if word.ids else "nothing asked for"
        for index, id_ in enumerate(word.ids):
            block = self._known.get(id_)
            number = self._engine.find(block.hash) if block is not None else None
            page = self._arena.get(id_)
            if page is None:
                if block is None or number is None:
                    reason = f"block {index} of {len(word.ids)} is not cached"
                    break
                page = self._save(block, number, job, saves)
                if page is None:
                    reason = "the arena has no room"
                    break
            elif found and page.parent != found[-1].id:
                reason = f"block {index} is not behind the one before it"
                break
            self._arena.pin([page])
            found.append(page)
            if not page.ready:
                waiting.add(id_)
            if word.idle and index == len(word.ids) - 1 and number is not None and not self._unused(number):
                reason = "in use"
        if reason:
            # what was claimed for it is saved all the same: it is on its way
            self._arena.unpin(found)
            self._not_pinned(word, reason)
            return
        self._pins[word.transfer] = _Pinned(found, waiting, self._now_ms())
        if not waiting:
            self._say([Pinned(word.transfer, [page.slot for page in found])])

    def _unused(self, number: int) -> bool:
        """Whether nobody but a copy that is under way uses a block."""
        return self._engine.users(number) == self._held[number]

    def _is_ready(self, id_: int) -> None:
        for transfer, pinned in self._pins.items():
            if id_ in pinned.waiting:
                pinned.waiting.remove(id_)
                if not pinned.waiting:
                    self._say([Pinned(transfer, [page.slot for page in pinned.pages])])

    def _fail_pins(self, id_: int, reason: str) -> None:
        for transfer in [transfer for transfer, pinned in self._pins.items() if id_ in pinned.waiting]:
            self._unpin(transfer)
            self._say([NotPinned(transfer, reason)])

    def _not_pinned(self, word: Pin, reason: str) -> bool:
        self._say([NotPinned(word.transfer, reason)])
        return False

    def _unpin(self, transfer: str) -> _Pinned | None:
        pinned = self._pins.pop(transfer, None)
        if pinned is not None:
            self._arena.unpin(pinned.pages)
        return pinned

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
            if block.children or block.used_ms > pinned.since_ms or (number is not None and not self._unused(number)):
                break
            if number is not None:
                self._engine.evict(number)
                dropped += 1
            self._known.forget(block)
        self._fill.dropped += dropped
        gone = self._arena.drop(pinned.pages)
        self._say([Dropped(word.transfer, dropped, gone)])

    # Inside: pages that came

    def _keep(self, word: Keep) -> None:
        kept: list[Page] = []
        refused = ""
        size, layout = self._layout.slot_bytes, self._layout
        for index, slot in enumerate(word.slots):
            try:
                if not 0 <= slot < self._arena.slots:
                    raise pages.PageRefused(f"slot {slot} of {self._arena.slots}")
                head = pages.decode(
                    self._memory[slot * size : (slot + 1) * size], self._fingerprint, layout.block_tokens,
                    layout.kv_bytes,
                )  # fmt: skip
                if head.tail or (head.root is None) != (index > 0) or (kept and head.parent != kept[-1].id):
                    raise pages.PageRefused(f"page {index} is not behind the one before it")
                page = self._arena.adopt(slot, head.parent, head.tokens, head.root)
                if page is None:
                    raise pages.PageRefused(f"slot {slot} was not granted")
            except pages.PageRefused as error:
                refused = str(error)
                self._arena.give_back(word.slots[index:])
                break
            self._arena.pin([page])  # the next one shall not make room by it
            kept.append(page)
        self._arena.touch(kept)
        self._arena.unpin(kept)
        self._fill.kept += len(kept)
        self._say([*self._arena.drain(), Kept(word.transfer, len(kept), refused), self._current()])

    # Inside: what the agent hears

    def _current(self) -> Fill:
        fill = self._fill
        fill.pages, fill.evicted = len(self._arena), self._arena.evicted
        return fill

    def _tell_state(self, *, idle: bool) -> None:
        self._fill.empty, self._fill.idle = self._engine.fill()
        now_ms = self._now_ms()
        if not idle and now_ms - self._told_ms < _TELL_MS:
            return
        self._told_ms = now_ms
        told: list[EngineWord] = [self._current()]
        if self._coldest:
            told.append(Coldest(self._cold(now_ms), self._known.drain_returns()))
        self._say(told)

    def _cold(self, now_ms: float) -> list[Cold]:
        found: list[Cold] = []
        for end in self._known.coldest(2 * self._coldest):
            number = self._engine.find(end.hash)
            if number is None:
                self._known.forget(end)
                continue
            blocks = self._known.chain(end.id)
            if not self._unused(number) or any(self._engine.find(block.hash) is None for block in blocks):
                continue
            tokens = len(blocks) * self._layout.block_tokens
            found.append(Cold([block.id for block in blocks], tokens, now_ms - end.used_ms, end.uses))
            if len(found) == self._coldest:
                break
        return found

    def _tell(self) -> None:
        told = self._arena.drain()
        if told:
            self._say(told)
