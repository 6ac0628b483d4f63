"""Which weights should be where: from outlooks and inventories to wishes, purely.

A model is worth loading when it will probably be needed within some minutes, and not so soon that the load comes too
late for the very request that needs it: value = p(300 s) − p(25 s) / 2 over nothing, in the horizons of the
configuration. (What it would push out counts against it once evictions are ordered here; until then agents load only
into free memory, so there is no victim.) Only models that are resident nowhere are wished for.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from quartet_bus.config.schema import ModelSection
from quartet_bus.messages import NodeInventory, PrefetchVerb
from quartet_core.catalogue import Catalogue
from quartet_core.demand import ClassOutlook, Outlook

MARGIN = 0.25
"""The least value worth a load."""

SURE = 0.5
"""From this chance on weights go into GPU memory; below it they are read into the host's page cache, which costs
nobody anything."""

LOAD_DEADLINE_MS = 30_000.0
"""When a load should be done. It is not how long the model is worth keeping."""


class Wish(Struct, frozen=True):
    """``model`` should be ready on ``node``, on cards of class ``hardware``."""

    verb: PrefetchVerb
    model: str
    node: str
    hardware: str
    weight_bytes: int
    confidence: float


def value_of(outlook: Outlook) -> float:
    """What having the model ready is worth, as a chance."""
    near = outlook.probabilities[0]
    later = outlook.probabilities[min(1, len(outlook.probabilities) - 1)]
    return later - near / 2


def holds(inventory: NodeInventory, model: str) -> bool:
    """Whether a node has the model's weights, in a worker or otherwise."""
    return model in inventory.resident or any(
        model == worker.model or model in worker.adapters for worker in inventory.workers
    )


def wishes(
    outlooks: Sequence[tuple[Outlook, Sequence[ClassOutlook]]],
    nodes: Mapping[str, NodeInventory],
    models: Mapping[str, ModelSection],
    catalogue: Catalogue,
) -> list[Wish]:
    """What should be loaded where, the most valuable first; nothing for models that some node holds already.

    Classes on which a model ran lately come first, then those the catalogue has times for. Of a class's nodes the one
    with the fewest workers is taken: it has the most memory to spare.
    """
    found: list[tuple[float, Wish]] = []
    for outlook, classes in outlooks:
        value = value_of(outlook)
        section = models.get(outlook.model)
        if value < MARGIN or section is None or any(holds(node, outlook.model) for node in nodes.values()):
            continue
        ran_on = [part.hardware for part in sorted(classes, key=lambda part: -part.share) if part.hardware]
        host = _host(ran_on or _fitting(section.spec, catalogue), nodes)
        if host is None:
            continue
        node, hardware = host
        sure = outlook.probabilities[0] >= SURE
        wish = Wish(
            PrefetchVerb.LOAD if sure else PrefetchVerb.WARM,
            outlook.model,
            node,
            hardware,
            min(catalogue.model(section.spec).weight_bytes.values()),
            outlook.probabilities[0] if sure else value,
        )
        found.append((value, wish))
    found.sort(key=lambda pair: (-pair[0], pair[1].model))
    return [wish for _, wish in found]


def _fitting(spec: str, catalogue: Catalogue) -> list[str]:
    """Classes with a profile for the model, in the catalogue's order."""
    return list(dict.fromkeys(key[0] for key in catalogue.profiles if key[1] == spec))


def _host(classes: Sequence[str], nodes: Mapping[str, NodeInventory]) -> tuple[str, str] | None:
    """The node of the first of ``classes`` that any node has, and that class."""
    for hardware in classes:
        able = [node for node in nodes.values() if any(worker.hardware == hardware for worker in node.workers)]
        if able:
            return min(able, key=lambda node: (len(node.workers), node.node)).node, hardware
    return None
