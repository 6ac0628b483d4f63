"""Which models clients may name: what the fleet serves now, what it served before, and what the configuration names."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from quartet_bus.config.schema import ModelSection
from quartet_bus.messages import NodeInventory, Role
from quartet_core.openai import unknown_model
from quartet_gateway.errors import fleet_unknown

MAX_NAMES = 16_384
"""Model names remembered of inventories, so that no agent can fill our memory."""

_DEFAULT = ModelSection(spec="")


class ServedModel(Struct, frozen=True):
    """A name that workers answer to right now; ``base`` is the model under an adapter, "" for a model."""

    id: str
    max_context: int
    base: str = ""


class _Listed(Struct):
    id: str
    created: int
    owned_by: str
    max_model_len: int
    parent: str | None
    object: str = "model"


class _List(Struct):
    data: list[_Listed]
    object: str = "list"


_encode = msgspec.json.Encoder().encode


class ModelBook:
    """Follows inventories. A node not heard for ``stale_ns`` serves nothing, but its models stay known.

    ``created_s`` (Unix time) is what listings say of every model: when this gateway learned of the fleet.
    """

    def __init__(self, configured: Mapping[str, ModelSection], *, stale_ns: int, created_s: int) -> None:
        self._configured = configured
        self._stale_ns = stale_ns
        self._created_s = created_s
        self._nodes: dict[str, tuple[int, tuple[ServedModel, ...]]] = {}
        self._ever: dict[str, None] = {}
        self._served: dict[str, ServedModel] = {}
        self._heard_any = False

    def heard(self, inventory: NodeInventory, now_ns: int) -> None:
        """Take one node's inventory as what it serves from now on."""
        self._heard_any = True
        models = _models_of(inventory)
        before = self._nodes.get(inventory.node)
        self._nodes[inventory.node] = (now_ns, models)
        if before is None or before[1] != models:
            self._collect()

    def expire(self, now_ns: int) -> None:
        """Drop the nodes that fell silent."""
        stale = [node for node, (heard_ns, _) in self._nodes.items() if now_ns - heard_ns > self._stale_ns]
        for node in stale:
            del self._nodes[node]
        if stale:
            self._collect()

    @property
    def nodes(self) -> int:
        """How many nodes are heard now."""
        return len(self._nodes)

    @property
    def served(self) -> list[ServedModel]:
        """What the fleet serves now, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def knows(self, model: str) -> bool:
        """Whether ``model`` is configured, served, or was served since this gateway started."""
        return model in self._configured or model in self._served or model in self._ever

    def check(self, model: str) -> None:
        """Raise ``Refused`` for a model that nobody ever heard of: 404, or 503 while no node was heard at all."""
        if not self.knows(model):
            raise unknown_model(model) if self._heard_any else fleet_unknown()

    def section(self, model: str) -> ModelSection:
        """The configuration of ``model``, or the defaults."""
        return self._configured.get(model, _DEFAULT)

    def listing(self) -> bytes:
        """The answer to ``GET /v1/models``: what is served now."""
        return _encode(_List([self._listed(model) for model in self.served]))

    def entry(self, model: str) -> bytes:
        """The answer to ``GET /v1/models/MODEL``. Raises ``Refused`` (404) for what is not served now."""
        found = self._served.get(model)
        if found is None:
            raise unknown_model(model)
        return _encode(self._listed(found))

    def _listed(self, model: ServedModel) -> _Listed:
        return _Listed(model.id, self._created_s, "quartet", model.max_context, model.base or None)

    def _collect(self) -> None:
        served: dict[str, ServedModel] = {}
        for _, models in self._nodes.values():
            for model in models:
                known = served.get(model.id)
                if known is None or known.max_context < model.max_context:
                    served[model.id] = model
        self._served = served
        for name in served:
            if len(self._ever) >= MAX_NAMES:
                break
            self._ever[name] = None


def _models_of(inventory: NodeInventory) -> tuple[ServedModel, ...]:
    models: dict[str, ServedModel] = {}
    for worker in inventory.workers:
        if worker.role is Role.STORE:
            continue  # answers nobody
        for name, base in ((worker.model, ""), *((adapter, worker.model) for adapter in worker.adapters)):
            known = models.get(name)
            if known is None or known.max_context < worker.max_context:
                models[name] = ServedModel(name, worker.max_context, base)
    return tuple(models.values())
