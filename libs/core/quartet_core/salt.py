"""What keeps cached prefixes apart that must not be shared: one rule for gateways, routers and agents."""


def salt_of(tenant: str, model: str, *, isolated: bool, adapter: bool) -> bytes:
    """The salt of a request's ladder and of its engine's prefix cache; b"" where everything may be shared.

    Under isolation (``[models.*] isolation``) tenants never meet, and an adapter's KV is not its base model's.
    """
    parts = [tenant if isolated else "", model if adapter else ""]
    return "\0".join(parts).encode() if any(parts) else b""
