"""The file of keys and limits that is read again whenever it changes, so that a key can be revoked in a second."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from quartet_bus.config.check import ConfigError, check
from quartet_bus.config.schema import GatewaySection, LimitSection, TenantsFile
from quartet_gateway.tenants import ApiKeys

MAX_BYTES = 16 * 1024 * 1024
"""What the file may have: some 100,000 keys."""


class Tenants(Struct, frozen=True):
    """Who may call, and how much."""

    keys: ApiKeys
    limits: Mapping[str, LimitSection]


class TenantsSource:
    """Joins ``[gateway]``'s own keys and limits with those of ``gateway.tenants_file``, if there is one."""

    def __init__(self, section: GatewaySection) -> None:
        self._section = section
        self._file = Path(section.tenants_file) if section.tenants_file else None
        self._stamp: tuple[int, int, int] | None = None

    def read(self) -> Tenants:
        """Both together. Raises ``ConfigError``, naming file and key."""
        section, told = self._section, TenantsFile()
        if self._file is not None:
            self._stamp = _stamp(self._file)
            told = _parse(self._file)
        # A broken file must not open the door to everybody: keys that it had make keys required as long as it is set.
        keys = ApiKeys({**section.keys, **told.keys}, section.anonymous_tenant, required=self._file is not None)
        return Tenants(keys, {**section.limits, **told.limits})

    def changed(self) -> bool:
        """Whether the file is another one than was read last, or has gone."""
        return self._file is not None and _stamp(self._file) != self._stamp


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        seen = os.stat(file)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_ino, seen.st_size


def _parse(file: Path) -> TenantsFile:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(str(file), "", UNSET, f"must have at most {MAX_BYTES} bytes")
        table: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(str(file), "", UNSET, f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), "", UNSET, f"is not TOML: {error}") from None
    for key in table.get("keys", {}) if isinstance(table.get("keys"), dict) else ():
        ApiKeys.check(str(file), key)  # before ``check``, whose errors repeat what they do not like
    check(table, TenantsFile, (), {(): str(file), **{(name,): str(file) for name in table}})
    return msgspec.convert(table, TenantsFile)
