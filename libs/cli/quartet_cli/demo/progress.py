"""How far a pass is: one line that changes on a terminal, a line every few seconds elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from quartet_cli.demo.replay import Replay

_PLAIN_EVERY_S = 5.0


class PassProgress:
    """Shows one pass, as a context manager; ``tell`` it now and then."""

    def __init__(self, console: Console, name: str, seconds: float) -> None:
        self._console = console
        self._name = name
        self._seconds = seconds
        # Drawn when told, never by a thread of its own.
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._told_s = -_PLAIN_EVERY_S
        self._last = (0.0, 0)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, replay: Replay) -> None:
        """Show how far ``replay`` is."""
        now_s = replay.running_s
        if self._live is None and now_s - self._told_s < _PLAIN_EVERY_S:
            return
        self._told_s = now_s
        line = self._line(replay, now_s)
        if self._live is None:
            self._console.print(line)
        else:
            self._live.update(Text(line), refresh=True)

    def _line(self, replay: Replay, now_s: float) -> str:
        (before_s, before), self._last = self._last, (now_s, replay.tokens)
        rate = (replay.tokens - before) / (now_s - before_s) if now_s > before_s else 0.0
        where = f"{now_s:5.1f}/{self._seconds:g} s" if now_s <= self._seconds else f"{now_s:5.1f} s, the last end"
        return (
            f"{self._name}  {where}  sent {replay.sent}, running {replay.sent - replay.ended}, "
            f"ended {replay.ended}, faults {replay.faults}, {rate:,.0f} tokens/s"
        )
