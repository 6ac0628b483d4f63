"""Which two workers may exchange KV, and where a worker stands when paths to it are chosen.

Workers are seen through protocols, so that bus messages fit as they are. A coordinator refuses wrong pairs at
planning; a router that asks the same functions never plans them.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from quartet_core.catalogue import HardwareClass
from quartet_core.links import Place

RESHARD = "reshard"
"""Capability of a target whose engine reads KV that was laid out for another TP degree."""

EXPORT, IMPORT, RESERVE = "export", "import", "reserve"
"""Capabilities that a transfer needs: ``export`` of its source, ``import`` and ``reserve`` of its target."""

OVERLAP = "overlap"
"""Capability of a source whose engine can export the KV of a prompt's first chunks while it computes the next ones: a
split's transfer then begins before its prefill ends. Without it all of a transfer comes after the prefill."""


PAGE = "page"
"""Capability that a page-out needs at both ends besides: idle prefixes are told, pinned, kept and dropped."""

STORE = "store"
"""Role of host memory that keeps paged KV (``quartet_bus.messages.Role``)."""

HANDSHAKE = "handshake:"
"""Capability of an engine that hands KV to its like by itself: ``handshake:<connector>``. Two workers that name the
same connector pair without export, import, leases and coordinator: their agents only pass on what the engines say."""


class LayoutFacts(Protocol):
    """How KV lies in a worker's memory. ``bytes_per_token`` is over all GPUs of the worker."""

    @property
    def block_tokens(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def tp(self) -> int: ...


class Replica(Protocol):
    """What pairing asks of a worker; ``precision`` is of its weights."""

    @property
    def model(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def engine_version(self) -> str: ...
    @property
    def capabilities(self) -> tuple[str, ...]: ...
    @property
    def layout(self) -> LayoutFacts: ...


def why_not(source: LayoutFacts, target: LayoutFacts, *, any_tp: bool = False) -> str | None:
    """Why KV laid out as ``source`` cannot be read as ``target``, naming the first difference; None when it can.

    ``any_tp`` is whether the target's engine takes KV of another TP degree (it then cuts heads anew).
    """
    for name, here, there in (
        ("block_tokens", source.block_tokens, target.block_tokens),
        ("bytes_per_token", source.bytes_per_token, target.bytes_per_token),
        ("KV precision", source.precision, target.precision),
        ("revision", source.revision, target.revision),
    ):
        if here != there:
            return f"{name} {here} against {there}"
    if source.tp != target.tp and not any_tp:
        return f"tp {source.tp} against {target.tp}"
    return None


def why_not_pair(source: Replica, target: Replica) -> str | None:
    """Why KV of ``source`` is no use to ``target``, or None: model, weights, engine, its version, then the layout.

    KV computed by other weights, or by another build of the engine, is other numbers under the same prompt.
    """
    for name, here, there in (
        ("model", source.model, target.model),
        ("weight precision", source.precision, target.precision),
        ("engine", source.engine, target.engine),
        ("engine_version", source.engine_version, target.engine_version),
    ):
        if here != there:
            return f"{name} {here or 'unknown'} against {there or 'unknown'}"
    return why_not(source.layout, target.layout, any_tp=RESHARD in target.capabilities)


def handshake_of(connector: str) -> str:
    """The capability of an engine with this connector."""
    return HANDSHAKE + connector


def handshake(source: Replica, target: Replica) -> str:
    """The connector by which ``source``'s engine hands KV to ``target``'s, "" when they have none in common."""
    for capability in source.capabilities:
        if capability.startswith(HANDSHAKE) and capability in target.capabilities:
            return capability.removeprefix(HANDSHAKE)
    return ""


def lacking(source: Replica, target: Replica) -> str | None:
    """The first capability that a transfer from ``source`` to ``target`` would need and its worker has not, or None.

    Engines that shake hands need none: whoever moves their KV is not us.
    """
    if handshake(source, target):
        return None
    if EXPORT not in source.capabilities:
        return f"source has no {EXPORT}"
    for needed in (IMPORT, RESERVE):
        if needed not in target.capabilities:
            return f"target has no {needed}"
    return None


NUMA_PENALTY = 1.25
"""How much longer bytes take whose cards and NIC hang on different sockets. (Judged: what crosses the link between
sockets is bound by it, and shares it with everything else; measured rates of the link correct it.)"""


def place_of(
    node: str,
    fabrics: Mapping[str, float],
    hardware: HardwareClass,
    gpus: int,
    *,
    root: str = "",
    numa: int = -1,
    nic_numa: int = -1,
    host: bool = False,
) -> Place:
    """Where a worker on ``gpus`` cards of ``hardware`` stands, in a node that announces ``fabrics``.

    ``fabrics`` are link classes of the inventory with their rate in GB/s. InfiniBand wins over RoCE where a node has
    both. Peer to peer over PCIe is taken for granted unless the node offers shared memory in its stead. ``root`` is the
    PCIe root complex of its cards, ``numa`` and ``nic_numa`` the NUMA nodes of cards and NIC, -1 where nobody said.
    ``host``: it is the node's memory, beside such cards.
    """
    rdma: Literal["ib", "roce", ""] = ""
    if "RDMA_IB" in fabrics:
        rdma = "ib"
    elif "RDMA_ROCE" in fabrics:
        rdma = "roce"
    nic = {"ib": "RDMA_IB", "roce": "RDMA_ROCE", "": "TCP"}[rdma]
    return Place(
        node=node,
        gpus=gpus,
        gpu_link=hardware.gpu_link.kind,
        gpu_gb_per_s=hardware.gpu_link.gb_per_s,
        host_gb_per_s=hardware.host_link.gb_per_s,
        rdma=rdma,
        nic_gb_per_s=fabrics.get(nic, 0.0),
        peer_to_peer="PCIE_P2P" in fabrics or "SHM" not in fabrics,
        numa_penalty=NUMA_PENALTY if numa >= 0 and nic_numa >= 0 and numa != nic_numa else 1.0,
        root=root,
        host=host,
    )
