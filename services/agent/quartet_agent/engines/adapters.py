"""LoRA adapters of one server: which it has loaded, and loading and unloading them while it runs."""

from collections.abc import Callable

import msgspec
from msgspec import Struct

from quartet_agent.engines import bodies
from quartet_agent.engines.base import CannotLoad
from quartet_agent.engines.server import EngineAway, EngineServer
from quartet_bus.config.schema import EngineSection

_LOAD_MS = 60_000.0
"""What a server gets for loading one: it reads the weights from its own disk, or from a network share."""

_encode = msgspec.json.Encoder().encode


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class Adapters:
    """The adapters that ``[[agent.engines]]`` names, on its server. ``changed`` is called whenever ``loaded`` did."""

    def __init__(self, section: EngineSection, server: EngineServer, able: bool, changed: Callable[[], None]) -> None:
        self._section = section
        self._server = server
        self._able = able
        self._changed = changed
        self.loaded: tuple[str, ...] = ()

    @property
    def loadable(self) -> tuple[str, ...]:
        """Those that can be loaded at run time."""
        return tuple(self._section.adapter_paths)

    def found(self, models: tuple[str, ...]) -> tuple[str, ...]:
        """A life of the server begins, which answers to ``models``; returns what must be loaded now."""
        section = self._section
        self.loaded = tuple(name for name in section.adapters if name in models)
        return tuple(name for name in section.adapters if name not in self.loaded and name in section.adapter_paths)

    async def load(self, name: str) -> None:
        """Load one, which it may have already. Raises ``CannotLoad``."""
        path = self._section.adapter_paths.get(name)
        if path is None or not self._able:
            raise CannotLoad(f"[[agent.engines]] adapter_paths has no {name!r}")
        await self._order("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, there=True)
        self._set((*self.loaded, name))

    async def unload(self, name: str) -> None:
        """Unload one, which need not be there any more. Raises ``CannotLoad``."""
        if name not in self._section.adapter_paths or not self._able:
            raise CannotLoad(f"{name!r} was not loaded by this agent")
        # First nobody is sent there any more, then it goes.
        self._set(tuple(other for other in self.loaded if other != name))
        await self._order("/v1/unload_lora_adapter", {"lora_name": name}, there=False)

    async def _order(self, path: str, fields: dict[str, str], *, there: bool) -> None:
        try:
            status, data = await self._server.post(path, _encode(fields), _LOAD_MS)
            # Refused where another worker of the same server (a rank), or somebody else, was first.
            if status != 200 and await self._serves(fields["lora_name"]) is not there:
                raise CannotLoad(bodies.refusal(status, data).body.message)
        except EngineAway as away:
            raise CannotLoad(str(away)) from None

    async def _serves(self, name: str) -> bool | None:
        status, data = await self._server.get("/v1/models", self._section.probe_timeout_ms)
        try:
            models = msgspec.json.decode(data, type=_Models).data if status == 200 else None
        except msgspec.DecodeError:
            models = None
        return None if models is None else any(model.id == name for model in models)

    def _set(self, loaded: tuple[str, ...]) -> None:
        self.loaded = tuple(dict.fromkeys(loaded))
        self._changed()
