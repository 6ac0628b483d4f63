"""What this node is: the inventory it announces on change, on request, and every few seconds."""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

from quartet_agent.worker import HostedWorker
from quartet_bus.catalogue import WHERE
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import Config
from quartet_bus.messages import LinkInfo, NodeInventory
from quartet_core.catalogue import Catalogue
from quartet_core.links import LINK_CLASSES

_GPU_LINKS = {"nvlink": "NVLINK", "pcie": "PCIE_P2P"}


def links_of(config: Config, catalogue: Catalogue, node: str, hardware: Iterable[str]) -> tuple[LinkInfo, ...]:
    """The ways KV can leave and enter this node: its fabrics, and between its own cards what their classes have.

    Raises ``ConfigError`` for a fabric that is no link class.
    """
    links: list[LinkInfo] = []
    numa = config.agent.nic_numa
    if numa < 0 and config.agent.nics:
        numa = config.agent.nics[0].numa
    for kind in config.agent.fabrics:
        given, shipped = config.kv.links.get(kind), LINK_CLASSES.get(kind)
        if given is not None:
            links.append(LinkInfo(kind, given.gb_per_s, given.setup_ms, numa=numa))
        elif shipped is not None:
            links.append(LinkInfo(kind, shipped.gb_per_s, shipped.setup_ms, numa=numa))
        else:
            known = ", ".join(sorted({*LINK_CLASSES, *config.kv.links}))
            raise ConfigError(WHERE, "agent.fabrics", kind, f"is no link class; known: {known}")
    best: dict[str, float] = {}
    for name in hardware:
        gpu_link = catalogue.hardware_class(name).gpu_link
        kind = _GPU_LINKS[gpu_link.kind]
        best[kind] = max(best.get(kind, 0.0), gpu_link.gb_per_s)
    for kind, gb_per_s in best.items():
        links.append(LinkInfo(kind, gb_per_s, LINK_CLASSES[kind].setup_ms, peer=node))
    return tuple(links)


class InventoryAuthor:
    """Announces this node and its workers whose engines run.

    ``epoch`` counts what was announced that differs from before; the words mirror it.
    """

    def __init__(
        self,
        config: Config,
        catalogue: Catalogue,
        node: str,
        incarnation: int,
        workers: Sequence[HostedWorker],
        publish: Callable[[NodeInventory], None],
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._zone = config.agent.zone
        self._workers = workers
        self._publish = publish
        self._links = links_of(config, catalogue, node, dict.fromkeys(w.facts.hardware for w in workers))
        self._version = version("quartet-agent")
        self.kv_address = ""
        """Where this node's mover listens."""
        self.resident: tuple[str, ...] = ()
        """Models whose weights are in memory here."""
        self.epoch = 1

    def changed(self) -> None:
        """Something in it is no longer as it was announced: count an epoch and say it."""
        self.epoch += 1
        self.announce()

    def announce(self) -> None:
        """Say it, changed or not."""
        self._publish(
            NodeInventory(
                node=self._node,
                incarnation=self._incarnation,
                epoch=self.epoch,
                workers=tuple(worker.info() for worker in self._workers if worker.up),
                zone=self._zone,
                links=self._links,
                kv_address=self.kv_address,
                agent_version=self._version,
                resident=self.resident,
            )
        )
