"""What an engine probably has cached, told from its own traffic: for engines that do not say it themselves.

Prompts that an engine has read are in its cache until newer ones push them out. An engine evicts the least recently
used blocks, tails first; this does the same with rungs, counting each with the tokens since the one before it.
"""

from collections import OrderedDict
from typing import Final

from quartet_core.ladder import Sketch, covered_tokens

MAX_RUNGS: Final = 200_000


class TrafficCache:
    """Rungs of the last prompts, up to ``capacity_tokens`` of the engine's KV."""

    def __init__(self, capacity_tokens: int, *, max_rungs: int = MAX_RUNGS) -> None:
        self._capacity_tokens = capacity_tokens
        self._max_rungs = max_rungs
        self._tokens: OrderedDict[int, int] = OrderedDict()  # rung → its tokens, least recently used first
        self._used_tokens = 0
        self._became: dict[int, None] = {}
        self._ended: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def used_tokens(self) -> int:
        """Tokens that are taken to be cached."""
        return self._used_tokens

    def resize(self, capacity_tokens: int) -> None:
        """The engine's KV has another size than was thought."""
        self._capacity_tokens = capacity_tokens
        self._evict()

    def read(self, sketch: Sketch) -> None:
        """The engine has read this prompt."""
        # Deepest first, so that the shallowest rung is the most recently used: tails go before heads.
        for index in range(len(sketch.rungs) - 1, -1, -1):
            rung = sketch.rungs[index]
            if rung in self._tokens:
                self._tokens.move_to_end(rung)
                continue
            tokens = covered_tokens(index) - covered_tokens(index - 1)
            self._tokens[rung] = tokens
            self._used_tokens += tokens
            if rung in self._ended:
                del self._ended[rung]
            else:
                self._became[rung] = None
        self._evict()

    def held(self, sketch: Sketch) -> int:
        """How many tokens of this prompt are taken to be cached."""
        depth = -1
        for index, rung in enumerate(sketch.rungs):
            if rung not in self._tokens:
                break
            depth = index
        return covered_tokens(depth)

    def clear(self) -> None:
        """The engine has lost its cache."""
        for rung in list(self._tokens):
            self._drop(rung)

    def drain(self) -> tuple[list[int], list[int]]:
        """Rungs that became cached and that were evicted since the last call."""
        became, ended = list(self._became), list(self._ended)
        self._became.clear()
        self._ended.clear()
        return became, ended

    def _evict(self) -> None:
        while self._tokens and (self._used_tokens > self._capacity_tokens or len(self._tokens) > self._max_rungs):
            self._drop(next(iter(self._tokens)))

    def _drop(self, rung: int) -> None:
        self._used_tokens -= self._tokens.pop(rung)
        if rung in self._became:
            del self._became[rung]
        else:
            self._ended[rung] = None
