"""The machines a model may be cut over: nodes with their cards, as pools of equal ones, and the links between them."""

import re
from typing import Literal

import msgspec
from msgspec import Struct

from quartet_core.catalogue import Catalogue, HardwareClass
from quartet_core.links import LINK_CLASSES, Place, best_path, ceiling_gb_per_s, place_on

MOST_GPUS = 64
"""More are refused: a pipeline over so many cards is no plan, and the search would take very long."""

Rdma = Literal["ib", "roce", ""]

_CARDS = re.compile(r"(\d+)x([A-Za-z0-9_]+)")
_GRAMMAR = "COUNTxCLASS, '+' between cards of one node, ',' between nodes: 1xH100_SXM5,2xL40S_PCIE"


class WrongMachines(ValueError):
    """The machines cannot be read or used: ``what``, and what is ``allowed``."""

    def __init__(self, what: str, allowed: str) -> None:
        super().__init__(f"{what}; {allowed}")
        self.what = what
        self.allowed = allowed


class Node(Struct, frozen=True, forbid_unknown_fields=True):
    """One host: how many cards of which class, and its way to the others. ``nic_gb_per_s`` 0: unknown, caps nothing."""

    name: str
    cards: dict[str, int]
    rdma: Rdma = ""
    nic_gb_per_s: float = 0.0


class Pool(Struct, frozen=True):
    """The cards of one class in one node. ``first`` is the ordinal of the first of them in their node."""

    node: Node
    hardware: HardwareClass
    gpus: int
    first: int

    def place(self, tp: int) -> Place:
        """A group of ``tp`` of these cards, as links see it."""
        return place_on(self.node.name, self.hardware, tp, self.node.rdma, self.node.nic_gb_per_s)

    def alike(self, other: "Pool") -> bool:
        """Whether exchanging the two changes nothing: same cards, and nodes that differ in name alone."""
        same_node = msgspec.structs.replace(self.node, name="") == msgspec.structs.replace(other.node, name="")
        return same_node and self.hardware.name == other.hardware.name and self.gpus == other.gpus


class Hop(Struct, frozen=True):
    """The way from one group of cards to another. ``seconds = setup + bytes / rate``, in ms and decimal GB/s."""

    path: str
    setup_ms: float
    gb_per_s: float

    def ms(self, size_bytes: float) -> float:
        """Time for ``size_bytes``."""
        return self.setup_ms + size_bytes / (self.gb_per_s * 1e6)


def hop(source: Place, target: Place) -> Hop:
    """How ``source`` reaches ``target``, by the catalogue's link classes and what both ends can take."""
    path = best_path(source, target)
    link = LINK_CLASSES[path]
    return Hop(path, link.setup_ms, min(link.gb_per_s, ceiling_gb_per_s(path, source, target)))


def pools_of(nodes: tuple[Node, ...], catalogue: Catalogue) -> tuple[Pool, ...]:
    """One pool for each class of each node. Raises `WrongMachines`, and ``UnknownProfile`` for a class that is none."""
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WrongMachines(f"two nodes are called {twice!r}", "names must differ")
    pools: list[Pool] = []
    for node in nodes:
        first = 0
        for name, count in node.cards.items():
            if count < 1:
                raise WrongMachines(f"node {node.name!r}: {count} cards of {name}", "at least 1")
            pools.append(Pool(node, catalogue.hardware_class(name), count, first))
            first += count
    total = sum(pool.gpus for pool in pools)
    if not 1 <= total <= MOST_GPUS:
        raise WrongMachines(f"{total} cards", f"from 1 to {MOST_GPUS}")
    return tuple(pools)


def parse_nodes(text: str, rdma: Rdma = "roce") -> tuple[Node, ...]:
    """Nodes ``n0``, ``n1``… from ``COUNTxCLASS[+COUNTxCLASS…][,…]``. Raises `WrongMachines`."""
    nodes: list[Node] = []
    for number, part in enumerate(text.split(",")):
        cards: dict[str, int] = {}
        for group in part.split("+"):
            found = _CARDS.fullmatch(group.strip())
            if found is None:
                raise WrongMachines(f"cannot read {group.strip()!r}", f"it is {_GRAMMAR}")
            cards[found[2]] = cards.get(found[2], 0) + int(found[1])
        nodes.append(Node(f"n{number}", cards, rdma))
    return tuple(nodes)


class _NodesFile(Struct, forbid_unknown_fields=True):
    nodes: tuple[Node, ...]


def decode_nodes(toml: str) -> tuple[Node, ...]:
    """Nodes from a TOML text of ``[[nodes]]`` tables. Raises `WrongMachines`."""
    try:
        return msgspec.toml.decode(toml, type=_NodesFile).nodes
    except msgspec.DecodeError as wrong:
        raise WrongMachines(
            str(wrong), "[[nodes]] tables with name, cards = { CLASS = COUNT }, rdma, nic_gb_per_s"
        ) from (wrong)
