"""Server-sent events, cut out of a body that comes in pieces of any size. No I/O.

Each event's data is copied out of the body once, and not looked into.
"""

DONE = b"[DONE]"
"""What OpenAI's streams say at their end."""

MAX_EVENT_BYTES = 8 * 1024 * 1024


class EventTooLarge(Exception):
    """An event's data is larger than is taken."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"an event of more than {limit_bytes} bytes")


class EventSplitter:
    """Takes the body's bytes, gives the data of the events that they complete."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    @property
    def inside(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._rest or self._data)

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that ``piece`` completes, in order. Raises ``EventTooLarge``."""
        if self._rest:
            piece = self._rest + piece
        events: list[bytes] = []
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            stop = end - 1 if end > start and piece[end - 1] == 0x0D else end
            if stop == start:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data.clear()
                    self._data_bytes = 0
            elif piece.startswith(b"data:", start, stop):
                begin = start + 6 if piece.startswith(b" ", start + 5, stop) else start + 5
                self._data.append(piece[begin:stop])
                self._data_bytes += stop - begin
            start = end + 1
        self._rest = piece[start:]
        if len(self._rest) + self._data_bytes > self._max:
            raise EventTooLarge(self._max)
        return events
