"""A running ``quartet up``, for tests that ask it something."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

QUARTET = [sys.executable, "-m", "quartet_cli"]
START_S = 100.0


class Up:
    """A running ``quartet up`` and what it printed."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self._out = directory.parent / f"{directory.name}.out"
        with self._out.open("wb") as out:
            command = [*QUARTET, "up", "--ports", "any", "--dir", str(directory), *options]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.wait_for("Ctrl-C stops all of it.")

    @property
    def text(self) -> str:
        """All it printed so far."""
        return self._out.read_text()

    def wait_for(self, text: str) -> None:
        """Return when it has printed ``text``; fail when it ends before."""
        end_s = time.monotonic() + START_S
        while text not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end_s, self.text
            time.sleep(0.1)

    def address(self, name: str) -> str:
        """The address printed behind ``name``."""
        found = re.search(rf"^  {name} +(\S+)", self.text, re.MULTILINE)
        assert found is not None, self.text
        return found[1]

    def snippets(self) -> list[str]:
        """The commands it shows, as one would paste them."""
        shown = self.text[self.text.index("Ask it with curl") : self.text.index("See it with")]
        return [block for block in shown.split("\n\n") if "localhost" in block or "127.0.0.1" in block]

    def stop(self) -> int:
        """Press Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)
