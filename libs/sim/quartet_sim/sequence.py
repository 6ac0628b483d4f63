"""One job inside an engine: its tokens, its blocks, how far it is."""

from array import array
from bisect import bisect_right
from enum import Enum
from typing import Final, Literal

from quartet_core.ladder import BLOCK_TOKENS, RUNGS, sketch_tokens, token_bytes
from quartet_sim import content, tokens
from quartet_sim.job import Job
from quartet_sim.pool import KvPool

_RUNG_TOKENS: Final = tuple(blocks * BLOCK_TOKENS for blocks in RUNGS)


class Place(Enum):
    """Where in the engine a sequence is."""

    WAITING = 0
    """holds no blocks"""
    READY = 1
    """its prompt's KV came by transfer; it joins the next iteration that has a place in the batch"""
    LENT = 2
    """all of it was cached; it holds these blocks for a transfer, and computes nothing"""
    PREFILL = 3
    DECODE = 4
    GONE = 5


class EngineSequence:
    """Positions ``[0, computed)`` have KV; ``goal`` is how many must have it before the next token comes of a prefill.

    With ``generated`` output tokens known, the last of them has no KV yet: a decode step computes that position and
    yields the next token. So a decoding sequence has ``computed == prompt_tokens + generated - 1``.
    """

    __slots__ = (
        "_parent",
        "_rungs",
        "_tokens",
        "arrived",
        "blocks",
        "cached_tokens",
        "cancelled",
        "checkpoint",
        "computed",
        "decode_mark_ms",
        "dropped_blocks",
        "filled",
        "generated",
        "goal",
        "gpu_ms",
        "id",
        "job",
        "keys",
        "limit",
        "order",
        "pieces",
        "place",
        "prompt_tokens",
        "queued_ms",
        "queued_tokens",
        "reason",
        "started_ms",
        "submitted_ms",
        "transferred_tokens",
        "verified_blocks",
    )

    def __init__(self, job: Job, block_tokens: int, order: int, now_ms: float) -> None:
        self.job = job
        self.id = job.id
        self._tokens = array("I", job.tokens)
        data = bytes(token_bytes(self._tokens))
        self.prompt_tokens = len(self._tokens)
        self._parent = content.root(job.salt)
        self.keys = content.chain(data, self._parent, block_tokens * content.TOKEN_BYTES)
        self._rungs = list(job.sketch.rungs) if job.sketch is not None else None
        self.order = order
        self.place = Place.WAITING
        self.blocks: list[int] = []
        self.filled = 0
        self.computed = 0
        self.goal = self.prompt_tokens
        self.generated = 0
        self.checkpoint = 0
        self.cached_tokens = -1
        self.verified_blocks = 0
        self.arrived = range(0)  # blocks of the prompt that only a transfer brought
        self.transferred_tokens = 0
        self.dropped_blocks = 0
        self.cancelled = False
        self.submitted_ms = now_ms
        self.started_ms = now_ms
        self.gpu_ms = 0.0
        self.decode_mark_ms = 0.0
        self.queued_tokens = 0
        self.queued_ms = 0.0
        self.limit = job.max_tokens
        self.reason: Literal["stop", "length"] = "length"
        self.pieces = b""
        if job.kind != "prefill":
            seed = tokens.fingerprint(data)
            if job.may_stop and (natural := tokens.natural_tokens(seed)) < self.limit:
                self.limit = natural
                self.reason = "stop"
            self.pieces = tokens.output(seed, self.limit)

    def start(self, now_ms: float) -> None:
        """Its first iteration begins. A driver that plans iterations end to end may date that before the job came."""
        self.started_ms = max(now_ms, self.submitted_ms)

    def admit(self, blocks: list[int], hits: int, block_tokens: int) -> None:
        """Its turn has come: ``blocks`` are its own from now on, the first ``hits`` of them with their KV."""
        self.blocks = blocks
        self.filled = hits
        self.computed = hits * block_tokens
        self.place = Place.PREFILL
        if self.cached_tokens < 0:
            arrived = self.arrived
            self.transferred_tokens = max(0, min(hits, arrived.stop) - arrived.start) * block_tokens
            self.cached_tokens = self.computed - self.transferred_tokens

    def context(self) -> int:
        """Tokens that the next step's attention reads."""
        return self.prompt_tokens + self.generated

    def hit_limit(self, block_tokens: int) -> int:
        """At most how many leading blocks may come from the cache: one token is always left to compute."""
        return (self.goal - 1) // block_tokens

    def tail_content(self, block_tokens: int) -> int | None:
        """The content id of the prompt's last block when it is not full, else None."""
        full = self.prompt_tokens // block_tokens
        if full * block_tokens == self.prompt_tokens:
            return None
        data = bytes(token_bytes(self._tokens[full * block_tokens : self.prompt_tokens]))
        return content.after(data, self.keys[full - 1] if full else self._parent)

    def note_output(self) -> None:
        """Take the output tokens generated so far into the token stream, so that blocks of them can be hashed."""
        known = len(self._tokens) - self.prompt_tokens
        self._tokens.extend([tokens.PIECE_IDS[piece] for piece in self.pieces[known : self.generated]])

    def set_checkpoint(self, block_tokens: int) -> None:
        """Choose at how many generated tokens the next block is full, or the answer is complete."""
        full_at = self.generated + block_tokens - (self.prompt_tokens + self.generated - 1) % block_tokens
        self.checkpoint = min(full_at, self.limit)

    def fill(self, pool: KvPool) -> None:
        """Give the cache every block that became full since the last call, with the ladder rungs that end in it."""
        block_tokens = pool.block_tokens
        first, last = self.filled, self.computed // block_tokens
        if first >= last:
            return
        self._extend_keys(last, block_tokens)
        cache = pool.blocks
        blocks = self.blocks
        keys = self.keys
        keep = cache.keep
        fresh = []
        for index in range(first, last):
            own = blocks[index]
            kept = keep(own, keys[index], keys[index - 1] if index else 0)
            if kept == own:
                fresh.append(index)
            else:
                blocks[index] = kept
        self.filled = last
        lo = bisect_right(_RUNG_TOKENS, first * block_tokens)
        hi = bisect_right(_RUNG_TOKENS, last * block_tokens)
        if lo == hi or not fresh:
            return
        rungs = self._rungs_to(hi)
        new = set(fresh)
        for rung in range(lo, hi):
            index = (_RUNG_TOKENS[rung] - 1) // block_tokens
            if index in new:
                cache.tag(blocks[index], rungs[rung])

    def _extend_keys(self, count: int, block_tokens: int) -> None:
        known = len(self.keys)
        if count > known:
            self.note_output()
            data = bytes(token_bytes(self._tokens[known * block_tokens : count * block_tokens]))
            parent = self.keys[-1] if known else self._parent
            self.keys += content.chain(data, parent, block_tokens * content.TOKEN_BYTES)

    def _rungs_to(self, count: int) -> list[int]:
        """Rung hashes up to number ``count``; those beyond the prompt's sketch are made from the token stream.

        Hashing the stream anew is cheap, because rungs are rare: one in an eighth of the depth, or in 2,048 tokens.
        """
        if self._rungs is None or len(self._rungs) < count:
            self.note_output()
            stream = self._tokens[: _RUNG_TOKENS[count - 1]]
            self._rungs = list(sketch_tokens(stream, salt=self.job.salt).rungs)
        return self._rungs

    def start_over(self, block_tokens: int) -> None:
        """Preempted: nothing is computed any more; the goal is all tokens known so far."""
        self.place = Place.WAITING
        self.blocks = []
        self.filled = 0
        self.computed = 0
        self.goal = self.prompt_tokens + self.generated
        self._extend_keys(self.goal // block_tokens, block_tokens)
