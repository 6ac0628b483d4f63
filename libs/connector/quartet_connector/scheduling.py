"""The scheduler's side of pages: which are loaded for a request, which are saved, what the agent has of them.

Runs beside an engine's scheduler, and knows no engine: what it needs of one is ``EngineBlocks``. Methods are called
from two threads, the scheduler's and the one that hears the agent; what touches the engine's blocks happens in the
scheduler's alone, in ``step``. Nothing here waits for the agent.
"""

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from quartet_connector import page as pages
from quartet_connector.arena import Arena, Page
from quartet_connector.contents import blocks_of, chain, token_bytes
from quartet_connector.engine import Copies, EngineBlocks, Request
from quartet_connector.known import Known
from quartet_connector.layout import PROTOCOL, PageLayout
from quartet_connector.pins import Pins
from quartet_connector.saving import StepCopies
from quartet_connector.words import (
    AgentWord,
    Ask,
    Cold,
    Coldest,
    Drop,
    EngineWord,
    Fill,
    Granted,
    Keep,
    Kept,
    Pin,
    Release,
    Return,
    Want,
    Welcome,
)

_TELL_MS = 250.0
_MOST_CHAINS = 256
_COLDEST = 16


class _Chain(NamedTuple):
    """The content of a request's full blocks, as far as they were looked at."""

    ids: list[int]
    blocks: list[bytes]


class _Matched(NamedTuple):
    computed: int
    pages: list[Page]


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
        self._memory = memory
        self._engine = blocks
        self._life = life
        self._now_ms = now_ms
        self._say = tell
        self._ahead = ahead
        self._lock = threading.Lock()
        self._slots = slots
        self._fill = Fill(total=blocks.total, empty=blocks.total, slots=slots)
        self._chains: OrderedDict[str, _Chain] = OrderedDict()
        self._matched: dict[str, _Matched] = {}
        self._coldest = 0  # how many the agent asked for
        self._told_ms = -_TELL_MS
        self.off = ""
        """Why no pages are saved or loaded any more."""
        self._begin(layout)

    # The engine's side

    @property
    def wanted(self) -> bool:
        """Whether the agent asked for something that takes a step."""
        return self._pins.wanted

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
            loaded = matched.pages[first:last]
            self._copies.load(matched.pages, zip(blocks[first:last], [page.slot for page in loaded], strict=True))
            for page in loaded:
                self._fill.hit_kept += page.kept
                page.kept = False
            self._arena.touch(matched.pages)

    def step(self, *, idle: bool) -> Copies:
        """Called once a step, when everything is scheduled; ``idle``: nothing was."""
        with self._lock:
            for id_ in list(self._matched):
                self._unmatch(id_)
            self._pins.step(self.off)
            if self._ahead and not self.off:
                self._copies.save_ahead(self._ahead)
            copies = self._copies.take()
            self._tell_state(idle=idle)
            self._tell()
            return copies

    def copied(self, job_id: int, failed: str = "") -> None:
        """A step's copies were made; or not, and ``failed`` says why: then there are no more."""
        with self._lock:
            job = self._copies.done(job_id)
            if job is None:
                return
            if failed:
                self.off = self.off or failed
                self._fill.failed_loads += len(job.loading)
                for page in reversed(job.saving):
                    self._pins.fail(page.id, failed)
                    self._arena.abandon(page)
                self._say([self._welcome()])
            else:
                self._fill.loaded += len(job.loading)
                self._fill.saved += len(job.saving)
                for page in job.saving:
                    self._arena.ready(page)
                self._tell()
                for page in job.saving:
                    self._arena.unpin([page])
                    self._pins.ready(page.id)
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
            if self._copies.busy:
                return False
            self._begin(msgspec.structs.replace(self._layout, weights=uuid.uuid4().hex))
            self._chains.clear()
            self._matched.clear()
            self._coldest = 0
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
            self._pins.end()
            self._coldest = 0

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
                    self._pins.pin(word)
                case Release(transfer):
                    self._pins.release(transfer)
                case Drop():
                    self._pins.drop(word)
            self._tell()

    def _greet(self) -> None:
        told: list[EngineWord] = [self._welcome(), *self._arena.stored()]
        self._arena.drain()
        self._say([*told, self._current()])

    def _welcome(self) -> Welcome:
        return Welcome(PROTOCOL, self._life, self._layout, self._slots, self.off)

    def _begin(self, layout: PageLayout) -> None:
        """With an empty arena."""
        self._layout = layout
        self._fingerprint = layout.fingerprint
        self._arena = Arena(self._slots)
        self._known = Known(2 * self._engine.total + self._slots)
        self._copies = StepCopies(layout, self._memory, self._arena, self._known, self._engine)
        self._pins = Pins(self._arena, self._known, self._engine, self._copies, self._now_ms, self._say)

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
        fill.pages, fill.evicted, fill.dropped = len(self._arena), self._arena.evicted, self._pins.dropped
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
            if not self._copies.unused(number) or any(self._engine.find(block.hash) is None for block in blocks):
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
