"""Who may speak: nodes and workers as their inventories announce them.

A beat counts only for an incarnation that was announced, because beats are small and nameless: the inventory says whose
hash it is, which worker has which ordinal, and (with keys) whose key must have made the tag.
"""

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, auto

from quartet_bus.messages import NodeInventory, WorkerInfo
from quartet_core.heartbeat import TagCheck, node_hash, node_key

REMEMBERED_INCARNATIONS = 4
"""Former incarnations of a node that are recognised: what they still say is late, or comes from a second agent."""


class Worker:
    """One announced worker and what is known of it. ``key`` is its name among verdicts.

    ``state`` is None until a beat that counts has told it.
    """

    __slots__ = ("announced", "id", "incarnation", "key", "ordinal", "queued", "state", "step_ns")

    def __init__(self, info: WorkerInfo, node: str) -> None:
        self.id = info.id
        self.key = (node, info.ordinal)
        self.ordinal = info.ordinal
        self.incarnation = info.incarnation
        self.announced = info.incarnation & 0xFFFF
        self.step_ns = round(info.step_ms * 1e6)
        self.state: int | None = None
        self.queued = False


class Node:
    """One announced node. ``sequence`` is -1 until its incarnation was heard; ``emit_ns`` is the node's own clock.

    ``lost`` counts gaps in its sequences, over all incarnations. ``tags`` is None where the fleet uses no keys.
    """

    __slots__ = (
        "announced_ns",
        "emit_ns",
        "epoch",
        "former",
        "hash",
        "heard_ns",
        "incarnation",
        "lost",
        "name",
        "sequence",
        "tags",
        "workers",
    )

    def __init__(self, name: str, tags: TagCheck | None) -> None:
        self.name = name
        self.hash = node_hash(name)
        self.tags = tags
        self.incarnation = 0
        self.epoch = 0
        self.former: deque[int] = deque(maxlen=REMEMBERED_INCARNATIONS)
        self.sequence = -1
        self.emit_ns = 0
        self.lost = 0
        self.heard_ns = 0
        self.announced_ns = 0
        self.workers: dict[int, Worker] = {}


class Outcome(Enum):
    """What an inventory meant."""

    KNOWN = auto()
    """Nothing that beats depend on is new."""
    CHANGED = auto()
    """The same agent, with other workers."""
    NEW = auto()
    """A new node, or a new incarnation of its agent."""
    LATE = auto()
    """Older than what is known; ignored."""
    DUPLICATE = auto()
    """From a former incarnation while the present one lives: two agents use this name, or a message was late."""
    FULL = auto()
    """There is no room for another node."""


class Roster:
    """All announced nodes, at most ``max_nodes``, by name; ``master_keys`` are valid side by side."""

    def __init__(self, max_nodes: int, master_keys: Iterable[bytes] = ()) -> None:
        self.nodes: dict[str, Node] = {}
        self._max_nodes = max_nodes
        self._master_keys = tuple(master_keys)

    def announce(
        self, inventory: NodeInventory, now_ns: int, is_dead: Callable[[str], bool]
    ) -> tuple[Outcome, Node | None, list[Worker]]:
        """Take ``inventory``; return what it meant, its node, and the workers that are gone with it.

        A former incarnation is believed again only once the present one ``is_dead``: of two agents with one name, one
        at a time. Gone are workers that are no longer announced, or whose engine restarted.
        """
        node = self.nodes.get(inventory.node)
        if node is None:
            if len(self.nodes) >= self._max_nodes:
                return Outcome.FULL, None, []
            keys = [node_key(master, inventory.node) for master in self._master_keys]
            node = self.nodes[inventory.node] = Node(inventory.node, TagCheck(keys) if keys else None)
            outcome = Outcome.NEW
        elif inventory.incarnation != node.incarnation:
            if inventory.incarnation in node.former and not is_dead(node.name):
                return Outcome.DUPLICATE, node, []
            node.former.append(node.incarnation)
            outcome = Outcome.NEW
        elif inventory.epoch < node.epoch:
            return Outcome.LATE, node, []
        else:
            outcome = Outcome.KNOWN
        node.announced_ns = now_ns
        node.epoch = inventory.epoch
        if outcome is Outcome.NEW:
            node.incarnation = inventory.incarnation
            node.sequence = -1
        gone = _replace_workers(node, inventory.workers)
        if outcome is Outcome.KNOWN and gone is not None:
            outcome = Outcome.CHANGED
        return outcome, node, gone or []

    def forget(self, name: str) -> None:
        """``name`` left the fleet."""
        self.nodes.pop(name, None)


def _replace_workers(node: Node, announced: tuple[WorkerInfo, ...]) -> list[Worker] | None:
    """Give ``node`` these workers and return those that are gone; None when nothing changed."""
    before = node.workers
    node.workers = {}
    for info in announced:
        known = before.get(info.ordinal)
        if known is None or known.id != info.id or known.incarnation != info.incarnation:
            known = Worker(info, node.name)
        known.step_ns = round(info.step_ms * 1e6)
        node.workers[info.ordinal] = known
    if len(before) == len(node.workers) and all(node.workers.get(key) is worker for key, worker in before.items()):
        return None
    return [worker for key, worker in before.items() if node.workers.get(key) is not worker]
