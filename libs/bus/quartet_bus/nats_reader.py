"""Reading what a NATS broker sends, with a short way for messages.

nats-py's parser tries its patterns one by one, cuts what it has read off its buffer and starts a coroutine, for every
message. Nearly all that comes are whole messages for handlers that are plain calls: these are found and handed over
here, and everything else (pings, errors, what is large or came in pieces) is left to nats-py's.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from quartet_bus.bus import Headers, Message
from quartet_bus.lean import hidden

with hidden("aiohttp"):
    from nats.protocol.parser import AWAITING_CONTROL_LINE, MAX_CONTROL_LINE_SIZE, Parser

PLAIN_HEADERS: Final = b"NATS/1.0\r\n"
"""How headers begin that carry no status of the broker's."""

_KEPT_BYTES: Final = 64 * 1024
"""Of a message that came in part, as much is put before what comes next; a larger one is nats-py's to collect."""


class DirectParser(Parser):
    """nats-py's parser, which hands messages of subscriptions in ``handlers`` (by their number) over itself.

    Handlers must not raise.
    """

    def __init__(self, client: Any, handlers: Mapping[int, Callable[[Message], None]]) -> None:
        super().__init__(client)
        self._handlers = handlers

    async def parse(self, data: bytes = b"") -> None:
        """Take the next bytes. Raises nats-py's ``ProtocolError``."""
        if self.state == AWAITING_CONTROL_LINE:
            if self.buf:
                data = bytes(self.buf) + data
                self.buf.clear()
            taken = self._deliver(data)
            data = data[taken:] if taken else data
            if len(data) < _KEPT_BYTES and _is_part(data):
                self.buf.extend(data)
                return
        if data:
            await super().parse(data)

    def _deliver(self, data: bytes) -> int:
        """Hand over the whole messages that ``data`` begins with; return how many bytes they took."""
        handlers, size = self._handlers, len(data)
        at = 0
        while True:
            headed = data.startswith(b"HMSG ", at)
            if not headed and not data.startswith(b"MSG ", at):
                return at
            line_end = data.find(b"\r\n", at, at + MAX_CONTROL_LINE_SIZE)
            if line_end < 0:
                return at
            parts = data[at:line_end].split(b" ")
            try:
                handler = handlers.get(int(parts[2]))
                begin = line_end + 2
                end = begin + int(parts[-1])
                body = begin + int(parts[-2]) if headed else begin
            except (ValueError, IndexError):
                return at
            if handler is None or end + 2 > size or not 4 <= len(parts) - headed <= 5:
                return at
            said: Headers | None = None
            if headed:
                block = data[begin:body]
                if not block.startswith(PLAIN_HEADERS):
                    return at
                said = read_headers(block)
            reply = parts[3].decode() if len(parts) - headed == 5 else ""
            at = end + 2
            handler(Message(parts[1].decode(), data[body:end], said, reply))


def _is_part(data: bytes) -> bool:
    """Whether ``data`` is the beginning of a message, and not all of it."""
    if not data.startswith((b"MSG ", b"HMSG ")):
        return not data
    line_end = data.find(b"\r\n", 0, MAX_CONTROL_LINE_SIZE)
    if line_end < 0:
        return len(data) < MAX_CONTROL_LINE_SIZE
    parts = data[:line_end].split(b" ")
    if not 4 <= len(parts) - (parts[0] == b"HMSG") <= 5 or not parts[-1].isdigit():
        return False
    return line_end + 2 + int(parts[-1]) + 2 > len(data)


def read_headers(block: bytes) -> dict[str, str] | None:
    """The headers of a block without a status. Lines that are none are left out; of a repeated name the last counts."""
    said: dict[str, str] = {}
    for line in block.decode("utf-8", "replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            said[name.strip()] = value.strip()
    return said or None
