"""How large a message is for a broker."""

from quartet_bus.bus import Headers, PayloadTooLarge


def check_size(subject: str, data: bytes, headers: Headers | None, limit_bytes: int) -> None:
    """Raise ``PayloadTooLarge`` if the broker would. NATS counts headers, and ends the connection of who sends more."""
    size = len(data)
    if headers:
        # "NATS/1.0\r\n", then "key: value\r\n" each, then "\r\n"
        size += 12 + sum(len(key) + len(value.encode()) + 4 for key, value in headers.items())
    if size > limit_bytes:
        raise PayloadTooLarge(subject, size, limit_bytes)
