"""Sightings: how far each collector has heard each node, and so which of several collectors knows a worker best.

Of several collectors' words on a worker the one that names the higher beat wins, on a tie the more alive verdict. But a
word is said only when something changes, and names the beat of that moment: a collector that has heard a quiet node
ever since would lose against one that lost sight of it a second ago and calls it dead. So a word counts with the newest
beat that its collector has stamped the node with since.
"""

from collections.abc import Mapping
from typing import Final

_MOST_COLLECTORS: Final = 16

Word = tuple[int, int, int]
"""(beat, −verdict, state) of one worker."""


class Sightings:
    """The last stamp of every collector for every node; of more than 16 collectors the longest unheard is forgotten."""

    __slots__ = ("_stamps",)

    def __init__(self) -> None:
        self._stamps: dict[str, dict[str, int]] = {}

    def note(self, collector: str, node: str, sequence: int) -> None:
        """``collector`` has heard ``node`` up to beat ``sequence``."""
        stamps = self._stamps.get(collector)
        if stamps is None:
            while len(self._stamps) >= _MOST_COLLECTORS:
                del self._stamps[next(iter(self._stamps))]
            stamps = self._stamps[collector] = {}
        stamps[node] = sequence

    def best(self, node: str, words: Mapping[str, Word]) -> Word:
        """Of several collectors' ``words`` on a worker of ``node`` the one to be believed."""
        return max(
            (max(beat, self._stamps.get(collector, {}).get(node, -1)), alive, state)
            for collector, (beat, alive, state) in words.items()
        )

    def forget_node(self, node: str) -> None:
        """``node`` left the fleet."""
        for stamps in self._stamps.values():
            stamps.pop(node, None)

    def forget_collector(self, collector: str) -> None:
        """``collector`` is gone."""
        self._stamps.pop(collector, None)
