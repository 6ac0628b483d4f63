"""The fleet's master keys: from ``[fleet] master_keys``, or from a file that is read again whenever it changes.

The first key signs, all are believed. So a key is changed without a gap: collectors get old and new, then agents new
before old, then collectors the new one alone.
"""

import re
from pathlib import Path

from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import FleetSection

MAX_KEYS = 2
"""Keys in a file: the one that is used, and the one before or after it."""

_WHERE = "fleet.master_keys_file"
_KEY = re.compile(r"([0-9a-fA-F]{2}){1,32}")


class MasterKeys:
    """The keys as they are now. Raises ``ConfigError`` for a file that cannot be read or holds no keys."""

    def __init__(self, fleet: FleetSection) -> None:
        self._file = Path(fleet.master_keys_file) if fleet.master_keys_file else None
        self._seen: tuple[int, int, int] | None = None
        self.trouble = ""
        """Why the file's present content is not used, "" when it is."""
        self.keys: tuple[bytes, ...] = tuple(bytes.fromhex(key) for key in fleet.master_keys)
        if self._file is not None:
            if fleet.master_keys:
                raise ConfigError("configuration", _WHERE, fleet.master_keys_file, "cannot stand beside master_keys")
            self._seen = self._state(self._file)
            self.keys = _read(self._file)

    def look(self) -> bool:
        """Read the file again if it changed; return whether the keys did. Keys stay while a new file is no good."""
        if self._file is None:
            return False
        try:
            state = self._state(self._file)
            if state == self._seen:
                return False
            self._seen = state
            keys = _read(self._file)
        except ConfigError as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        changed = keys != self.keys
        self.keys = keys
        return changed

    @staticmethod
    def _state(file: Path) -> tuple[int, int, int]:
        try:
            found = file.stat()
        except OSError as error:
            raise ConfigError("configuration", _WHERE, str(file), f"cannot be read: {error.strerror}") from None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _read(file: Path) -> tuple[bytes, ...]:
    try:
        lines = file.read_text("ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise ConfigError("configuration", _WHERE, str(file), f"cannot be read: {why}") from None
    if not 1 <= len(lines) <= MAX_KEYS or not all(_KEY.fullmatch(line) for line in lines):
        # the content is secret, and so not shown
        raise ConfigError(
            "configuration", _WHERE, str(file), f"must hold 1 to {MAX_KEYS} keys, one a line, each 1 to 32 bytes in hex"
        )
    return tuple(bytes.fromhex(line) for line in lines)
