"""What the predictor needs of others, so that a whole fleet in one process can hand it over directly."""

from typing import Protocol

from msgspec import Struct


class Budget(Struct, frozen=True):
    """Whether bytes may move into a node now, and how long they would take; ``detail`` says why not."""

    granted: bool
    predicted_ms: float = 0.0
    detail: str = ""


class NoBudget(Exception):
    """Nobody could be asked: without a coordinator no weights move, for they would compete with KV unseen."""


class LinkBudget(Protocol):
    """The KV coordinator's word on links. Asked before every load, never on a request's path."""

    async def ask(self, node: str, transfer_bytes: int, deadline_ms: float) -> Budget:
        """May ``transfer_bytes`` move into ``node`` within ``deadline_ms``? Raises `NoBudget`."""
        ...
