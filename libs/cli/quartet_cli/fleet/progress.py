"""One line that says how far a starting fleet is."""

import sys
from collections.abc import Mapping
from typing import TextIO


class StartLine:
    """Tells of a start: on a terminal one line that changes, else a line whenever another part is ready."""

    def __init__(self, out: TextIO = sys.stderr) -> None:
        self._out = out
        self._live = out.isatty()
        self._ready = -1

    def __call__(self, parts: int, waiting: Mapping[str, str]) -> None:
        """``waiting`` are the parts that are not ready, and why, of ``parts``."""
        ready = parts - len(waiting)
        if not waiting:
            text = f"{parts} processes are ready"
        else:
            text = f"{ready}/{parts} ready; " + ", ".join(f"{name}: {reason}" for name, reason in waiting.items())
        if self._live:
            self._out.write(f"\r\x1b[K{text[:150]}" + ("" if waiting else "\n"))
        elif ready != self._ready:
            self._out.write(text + "\n")
        self._ready = ready
        self._out.flush()
