"""What it costs to move KV: kinds of link, the state of one link, and the choice between moving and computing again.

Time of a transfer = setup + (bytes in flight + bytes) / bandwidth x NUMA penalty. Bandwidth starts as the class says,
capped by what the cards and NICs at both ends can take, and follows what is measured from then on.
Rates are decimal GB/s, one way: 1 GB/s is 1e6 bytes per ms.
"""

import math
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from quartet_core.catalogue import HardwareClass
from quartet_core.profile import Profile

_BYTES_PER_MS = 1e6  # of one GB/s


class LinkClass(Struct, frozen=True):
    """A kind of path, with planning figures until the link itself is measured."""

    name: str
    gb_per_s: float
    setup_ms: float
    source: str


LINK_CLASSES: Mapping[str, LinkClass] = {
    link.name: link
    for link in (
        LinkClass("NVLINK", 316.0, 0.1, "NCCL all-reduce of 512 MiB over two H100 SXM in 1.7 ms; setup judged"),
        LinkClass("PCIE_P2P", 20.0, 0.1, "NCCL all-reduce of 512 MiB over two L40S in 26.6 ms, one host; setup judged"),
        LinkClass("RDMA_IB", 45.0, 0.4, "NDR 400 Gb/s: planning value below its 50 GB/s line rate; setup as RoCE"),
        LinkClass("RDMA_ROCE", 46.6, 0.4, "400 GbE RoCE v2 into four L40S; setup from Mooncake's KV push, 8 x RoCE"),
        LinkClass("TCP", 9.0, 1.0, "Mooncake over TCP: 36 GB/s on four 200 Gb/s NICs, so 9 each; setup judged"),
        LinkClass("SHM", 12.0, 0.2, "judged: two copies through host memory"),
        LinkClass("HOST", 56.0, 0.1, "88 % of PCIe Gen5 x16's 64 GB/s, as measured of Gen4 into an L40S; setup judged"),
    )
}
"""The classes that ship; a caller may hand in others under the same names."""

SLOWED_BELOW = 0.25
"""A link measured below this share of what its class and ends promise is not what it is taken for (a silent TCP
fallback is some hundred times slower than RDMA; congestion rarely takes three quarters for long)."""


class Place(Struct, frozen=True, kw_only=True):
    """Where a worker's KV lies, as far as paths depend on it: facts from its node's inventory.

    ``rdma`` is "ib", "roce" or "" without; ``nic_gb_per_s`` 0 means unknown, and caps nothing. ``host_gb_per_s`` and
    ``gpu_gb_per_s`` are per card, for ``gpus`` cards. ``numa_penalty`` >= 1 is what crossing sockets to the NIC costs.
    ``root`` names the PCIe root complex that its cards hang on, "" where nobody said. ``host`` says that the KV lies in
    the node's memory instead of on cards.
    """

    node: str
    gpus: int = 1
    gpu_link: Literal["nvlink", "pcie"] = "pcie"
    gpu_gb_per_s: float
    host_gb_per_s: float
    rdma: Literal["ib", "roce", ""] = ""
    nic_gb_per_s: float = 0.0
    peer_to_peer: bool = True
    numa_penalty: float = 1.0
    root: str = ""
    host: bool = False


def place_on(
    node: str, hardware: HardwareClass, gpus: int, rdma: Literal["ib", "roce", ""] = "", nic_gb_per_s: float = 0.0
) -> Place:
    """The place of a worker on ``gpus`` cards of ``hardware``, with its node's NIC."""
    return Place(
        node=node,
        gpus=gpus,
        gpu_link=hardware.gpu_link.kind,
        gpu_gb_per_s=hardware.gpu_link.gb_per_s,
        host_gb_per_s=hardware.host_link.gb_per_s,
        rdma=rdma,
        nic_gb_per_s=nic_gb_per_s,
    )


def best_path(source: Place, target: Place) -> str:
    """The name of the fastest link class that both ends have.

    On one node: between a card and the node's memory PCIe; between cards NVLink, else PCIe peer to peer under one root
    complex (as far as that is known: between two of them it is slow or not there at all), else shared host memory.
    Between nodes, from cards or memory: RDMA when both speak the same kind of it, else TCP.
    """
    if source.node == target.node:
        if source.host or target.host:
            return "HOST"
        if source.gpu_link == target.gpu_link == "nvlink":
            return "NVLINK"
        apart = source.root and target.root and source.root != target.root
        return "PCIE_P2P" if source.peer_to_peer and target.peer_to_peer and not apart else "SHM"
    if source.rdma and source.rdma == target.rdma:
        return "RDMA_IB" if source.rdma == "ib" else "RDMA_ROCE"
    return "TCP"


def ceiling_gb_per_s(path: str, source: Place, target: Place) -> float:
    """The most the ends can send and take over ``path``: their cards' links, and the NICs between nodes.

    One L40S takes in 28 GB/s (PCIe Gen4 x16) however fast its NIC is; four of them take what the NIC gives. A node's
    memory is quicker than either, and caps nothing.
    """
    if path in ("NVLINK", "PCIE_P2P"):
        return min(source.gpus * source.gpu_gb_per_s, target.gpus * target.gpu_gb_per_s)
    ceiling = min(math.inf if place.host else place.gpus * place.host_gb_per_s for place in (source, target))
    if path not in ("SHM", "HOST"):
        for place in (source, target):
            if place.nic_gb_per_s > 0:
                ceiling = min(ceiling, place.nic_gb_per_s)
    return ceiling


class Link:
    """The state of one directed link: EWMA bandwidth and setup, and the bytes that are on it now.

    Bytes in flight come back exactly once: every `begin` is followed by one `end` with the same number.
    """

    __slots__ = ("bytes_in_flight", "gb_per_s", "kind", "numa_penalty", "promised_gb_per_s", "setup_ms")

    def __init__(self, kind: str, gb_per_s: float, setup_ms: float, numa_penalty: float = 1.0) -> None:
        if gb_per_s <= 0 or setup_ms < 0 or numa_penalty < 1:
            raise ValueError("a link needs gb_per_s > 0, setup_ms >= 0 and numa_penalty >= 1")
        self.kind = kind
        self.promised_gb_per_s = gb_per_s
        self.gb_per_s = gb_per_s
        self.setup_ms = setup_ms
        self.numa_penalty = numa_penalty
        self.bytes_in_flight = 0

    def begin(self, transfer_bytes: int) -> int:
        """A transfer of ``transfer_bytes`` starts; returns the bytes that were ahead of it, which `observe` wants."""
        ahead = self.bytes_in_flight
        self.bytes_in_flight = ahead + transfer_bytes
        return ahead

    def end(self, transfer_bytes: int) -> None:
        """It ended, however. Raises ``ValueError`` when more would come back than is out."""
        if transfer_bytes > self.bytes_in_flight:
            raise ValueError(f"{transfer_bytes} bytes cannot end: {self.bytes_in_flight} are in flight")
        self.bytes_in_flight -= transfer_bytes

    def observe(self, transfer_bytes: int, ahead_bytes: int, elapsed_ms: float, weight: float = 0.2) -> None:
        """A transfer with ``ahead_bytes`` before it took ``elapsed_ms``: learn from it with EWMA ``weight``.

        A transfer that is mostly setup tells of setup, any other of bandwidth; never of both, which would let the
        one's noise move the other.
        """
        if transfer_bytes <= 0 or elapsed_ms <= 0:
            return
        moving_ms = (ahead_bytes + transfer_bytes) / (self.gb_per_s * _BYTES_PER_MS) * self.numa_penalty
        if moving_ms < self.setup_ms and elapsed_ms < 2 * self.setup_ms:
            self.setup_ms += weight * (max(elapsed_ms - moving_ms, 0.0) - self.setup_ms)
            return
        # a transfer faster than setup alone still has to give a finite rate
        seen_ms = max(elapsed_ms - self.setup_ms, 0.1 * elapsed_ms)
        seen_gb_per_s = (ahead_bytes + transfer_bytes) / seen_ms * self.numa_penalty / _BYTES_PER_MS
        self.gb_per_s += weight * (seen_gb_per_s - self.gb_per_s)

    @property
    def slowed(self) -> bool:
        """Measured far below what its class and ends promise: congested, or not the path it is said to be."""
        return self.gb_per_s < SLOWED_BELOW * self.promised_gb_per_s


def link_between(source: Place, target: Place, classes: Mapping[str, LinkClass] = LINK_CLASSES) -> Link:
    """A fresh link over `best_path`, at its class's rate or the ends' ceiling, whichever is lower."""
    path = best_path(source, target)
    known = classes[path]
    rate = min(known.gb_per_s, ceiling_gb_per_s(path, source, target))
    # inside a node the NIC is not on the way
    penalty = 1.0 if source.node == target.node else max(source.numa_penalty, target.numa_penalty)
    return Link(path, rate, known.setup_ms, penalty)


def crossing_ms(gb_per_s: float, setup_ms: float, transfer_bytes: int, ahead_bytes: int = 0) -> float:
    """Setup, then ``ahead_bytes`` and ``transfer_bytes`` at ``gb_per_s``; 0 for nothing to move.

    The one formula by which routers, coordinators and agents price a link.
    """
    if transfer_bytes <= 0:
        return 0.0
    return setup_ms + (ahead_bytes + transfer_bytes) / (gb_per_s * _BYTES_PER_MS)


def transfer_ms(link: Link, transfer_bytes: int) -> float:
    """When ``transfer_bytes`` would have arrived, behind all that is in flight now; 0 for nothing to move."""
    return crossing_ms(link.gb_per_s / link.numa_penalty, link.setup_ms, transfer_bytes, link.bytes_in_flight)


def left_after_prefill_ms(move_ms: float, last_share: float, meanwhile_ms: float) -> float:
    """How long after a prefill's end its KV has arrived, when the KV of each chunk leaves as the chunk ends.

    The whole would take ``move_ms`` on the link; ``last_share`` of it (0 to 1) comes with the last chunk, and
    ``meanwhile_ms`` pass from the first chunk's end to the last's:

        max(move_ms x last_share, move_ms - meanwhile_ms)

    The link either kept up with the prefill (then the last chunk's part is left) or was busy from the first chunk's end
    on (then what did not fit). Exact for chunks that take equally long, on a link whose rate does not change: the KV is
    there at max over chunks i of (end of chunk i + what is left from i on), which is linear in i, so largest at an end.
    With one chunk nothing overlaps, and all of ``move_ms`` is left.
    """
    return max(move_ms * last_share, move_ms - meanwhile_ms)


class MoveChoice(Struct, frozen=True):
    """Both prices of having a prefix's KV at a worker, and whether moving is the lower.

    ``move_ms`` and ``recompute_ms`` are each from now until the KV is there.
    """

    move: bool
    move_ms: float
    recompute_ms: float


def cheaper_to_move(
    transfer_bytes: int, link: Link, profile: Profile, cached: int, new: int, drift: float = 1.0
) -> MoveChoice:
    """Move the KV of ``new`` tokens behind ``cached`` ones over ``link``, or compute it with ``profile``?

    ``drift`` is how much slower than its profile the worker runs.
    """
    return choose(transfer_ms(link, transfer_bytes), profile, cached, new, drift)


def choose(
    move_ms: float, profile: Profile, cached: int, new: int, drift: float = 1.0, *, lend_ms: float = 0.0,
    wait_ms: float = 0.0,
) -> MoveChoice:  # fmt: skip
    """Move or recompute: what a router asks for a fetch and a coordinator for a plan, where what moving takes is known.

    The KV of ``new`` tokens behind ``cached`` ones is there, moved, ``lend_ms`` (until its holder can send) +
    ``move_ms`` (`crossing_ms`) from now; computed, ``wait_ms`` (until the worker gets to it) + drift x its prefill.

    The worker prefills in any case (a prompt's last token is never taken from a cache), so recomputing costs the
    prefill of these tokens without the constant ``a_ms``. On a tie nothing moves.
    """
    here_ms = lend_ms + move_ms
    computed_ms = wait_ms + max(profile.prefill_ms(cached, new) - profile.a_ms, 0.0) * drift
    return MoveChoice(here_ms < computed_ms, here_ms, computed_ms)
