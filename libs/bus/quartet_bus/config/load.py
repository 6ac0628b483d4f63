"""Reading ``quartet.toml``: files merged, overrides from the environment, and errors that say what to write instead.

Later files win key by key; tables merge. Then every ``QUARTET_<SECTION>__<KEY>`` is set, levels joined by two
underscores, its value read as a TOML value or else taken as text: ``QUARTET_NATS__URL=nats://broker:4222``,
``QUARTET_AGENT__NODE=h1``, ``QUARTET_MODELS__chat__TTFT_MS=500``.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import UNSET, inspect

from quartet_bus.config.check import ConfigError, check, source, spell
from quartet_bus.config.schema import Config

__all__ = ["PREFIX", "ConfigError", "load"]

PREFIX = "QUARTET_"

_Path = tuple[str, ...]


def load(files: Iterable[Path | str], env: Mapping[str, str] | None = None) -> Config:
    """The configuration in ``files`` (later ones win) and ``env`` (the process's own by default).

    Raises ``ConfigError`` for a file that cannot be read, an unknown key, or a wrong value, naming its file and key.
    """
    merged: dict[str, Any] = {}
    sources: dict[_Path, str] = {}
    for file in files:
        _merge(merged, _read(Path(file)), (), str(file), sources)
    for name, text in sorted((os.environ if env is None else env).items()):
        if name.startswith(PREFIX):
            _override(merged, sources, name, text)
    check(merged, Config, (), sources)
    config = msgspec.convert(merged, Config)
    for path, value, right, allowed in _more_than_types_say(config):
        if not right:
            raise ConfigError(source(path, sources), spell(path), value, allowed)
    return config


def _more_than_types_say(config: Config) -> Iterable[tuple[_Path, Any, bool, str]]:
    """(key, value, whether it is right, what is allowed)."""
    router, kv = config.router, config.kv
    rows = router.affinity_rows
    yield ("router", "affinity_rows"), rows, rows.bit_count() == 1, "must be a power of two"
    yield ("kv", "page_high"), kv.page_high, kv.page_low < kv.page_high, f"must be above page_low, {kv.page_low:g}"
    idle_ms, horizon_ms = kv.page_min_idle_ms, kv.page_horizon_ms
    yield ("kv", "page_horizon_ms"), horizon_ms, idle_ms < horizon_ms, f"must be above page_min_idle_ms, {idle_ms:g}"
    yield ("kv", "store_bytes"), kv.store_bytes, kv.pool or not kv.store_bytes, "lends nothing while kv.pool is false"


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(str(file), "", UNSET, f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), "", UNSET, f"is not TOML: {error}") from None


def _merge(into: dict[str, Any], table: dict[str, Any], path: _Path, file: str, sources: dict[_Path, str]) -> None:
    for key, value in table.items():
        here = (*path, key)
        sources[here] = file
        known = into.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            _merge(known, value, here, file, sources)
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value, here, file, sources)
        else:
            into[key] = value


def _override(merged: dict[str, Any], sources: dict[_Path, str], name: str, text: str) -> None:
    parts = name.removeprefix(PREFIX).split("__")
    if len(parts) == 1:
        # Other programs may have QUARTET_ variables, too; but QUARTET_NATS_URL is surely a slip.
        section, _, key = parts[0].partition("_")
        if key and section.lower() in Config.__struct_fields__:
            raise ConfigError(name, "", UNSET, f"sets nothing; write {PREFIX}{section}__{key} (two underscores)")
        return
    table = merged
    kind: Any = Config
    path: _Path = ()
    for index, part in enumerate(parts):
        key, kind = _step(part, table, kind)
        path = (*path, key)
        sources[path] = name
        if index == len(parts) - 1:
            table[key] = _value(text, kind)
            return
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(name, spell(path), inner, "is no table, so nothing can be set inside it")
        table = inner


def _step(part: str, table: dict[str, Any], kind: Any) -> tuple[str, Any]:
    """The key that ``part`` of a variable's name means in a table of type ``kind``, and the type of its value.

    Fields are lower case; names of models and hardware are as they are, or as the file has them when they differ only
    in case and in characters that a variable's name cannot have.
    """
    info = inspect.type_info(kind) if kind is not None else None
    if isinstance(info, inspect.StructType):
        key = part.lower()
        return key, get_type_hints(info.cls, include_extras=True).get(key)
    inner = get_args(kind)[1] if isinstance(info, inspect.DictType) else None
    for known in table:
        if _plain(known) == _plain(part):
            return known, inner
    return part, inner


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _value(text: str, kind: Any) -> Any:
    if kind is not None and isinstance(inspect.type_info(kind), inspect.StrType | inspect.LiteralType):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
