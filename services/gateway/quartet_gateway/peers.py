"""The other gateways that live, as they say once a second."""

from quartet_bus.messages import GatewayLife, TenantClaim

MAX_PEERS = 1024
"""Gateways that are followed; further ones are not."""


class Peers:
    """Follows ``GatewayLife``. A gateway not heard for ``silence_ns`` is gone."""

    def __init__(self, own: str, silence_ns: int) -> None:
        self._own = own
        self._silence_ns = silence_ns
        self._heard: dict[str, tuple[int, dict[str, TenantClaim]]] = {}

    def heard(self, life: GatewayLife, now_ns: int) -> bool:
        """Take one gateway's word; return whether there are other gateways now than before."""
        if life.gateway == self._own:
            return False
        if life.leaving:
            return self._heard.pop(life.gateway, None) is not None
        known = life.gateway in self._heard
        if known or len(self._heard) < MAX_PEERS:
            self._heard[life.gateway] = (now_ns, life.claims)
        return not known

    def alive(self, now_ns: int) -> dict[str, dict[str, TenantClaim]]:
        """What every other living gateway claims."""
        silent = [name for name, (heard_ns, _) in self._heard.items() if now_ns - heard_ns > self._silence_ns]
        for name in silent:
            del self._heard[name]
        return {name: claims for name, (_, claims) in self._heard.items()}
