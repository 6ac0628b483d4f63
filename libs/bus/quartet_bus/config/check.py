"""What may stand where: a configuration walked along its schema, until something is wrong."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import UNSET, inspect

_Path = tuple[str, ...]


class ConfigError(Exception):
    """A configuration that cannot be used. Its text is one line.

    ``file`` is a path or the name of an environment variable; ``key`` is dotted, "" when the file as a whole is wrong;
    ``value`` is what stands there, ``UNSET`` when nothing does; ``allowed`` says what may.
    """

    def __init__(self, file: str, key: str, value: Any, allowed: str) -> None:
        where = f"{file}: {key}" if key else file
        shown = "" if value is UNSET else f" = {_short(value)}"
        super().__init__(f"{where}{shown}: {allowed}")
        self.file = file
        self.key = key
        self.value = value
        self.allowed = allowed


def closest(name: str, known: Iterable[str]) -> str:
    """A question whether the one of ``known`` that is most like ``name`` was meant; "" when none is like it."""
    import difflib  # half a megabyte of every process, and only a wrong one needs it

    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]}?" if close else ""


def check(value: Any, kind: Any, path: _Path, sources: Mapping[_Path, str]) -> None:
    """Raise ``ConfigError`` at the first place where ``value`` is not what ``kind`` allows."""
    info = inspect.type_info(kind)
    if isinstance(info, inspect.StructType):
        _check_table(value, info, path, sources)
    elif isinstance(info, inspect.DictType) and kind is not dict:
        _expect(isinstance(value, dict), value, "must be a table", path, sources)
        for key, inner in value.items():
            check(inner, get_args(kind)[1], (*path, key), sources)
    elif isinstance(info, inspect.VarTupleType):
        _expect(isinstance(value, list), value, "must be an array", path, sources)
        for index, item in enumerate(value):
            check(item, get_args(kind)[0], (*path[:-1], f"{path[-1]}[{index}]"), sources)
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            _expect(False, value, f"must be {describe(info)}", path, sources)
        _expect(not isinstance(value, float) or math.isfinite(value), value, "must be finite", path, sources)


def spell(path: _Path) -> str:
    """``path`` as TOML writes a dotted key."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+(\[\d+\])*", part) else f'"{part}"' for part in path)


def describe(info: inspect.Type) -> str:
    """What values a leaf of the schema takes, in words; its own description, when it has one."""
    if isinstance(info, inspect.Metadata):
        own = (info.extra_json_schema or {}).get("description")
        return str(own) if own else describe(info.type)
    if isinstance(info, inspect.LiteralType):
        return "one of " + ", ".join(sorted(str(value) for value in info.values))
    if isinstance(info, inspect.BoolType):
        return "true or false"
    if isinstance(info, inspect.IntType | inspect.FloatType):
        noun = "an integer" if isinstance(info, inspect.IntType) else "a number"
        bounds = ((info.ge, "at least"), (info.gt, "above"), (info.le, "at most"), (info.lt, "below"))
        limits = [
            f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}"
            for bound, word in bounds
            if bound is not None
        ]
        return " ".join([noun, " and ".join(limits)]).strip()
    if isinstance(info, inspect.StrType):
        return "text"
    return "another value"


def _check_table(value: Any, info: inspect.StructType, path: _Path, sources: Mapping[_Path, str]) -> None:
    _expect(isinstance(value, dict), value, "must be a table", path, sources)
    hints = get_type_hints(info.cls, include_extras=True)
    names = [field.encode_name for field in info.fields]
    for key, inner in value.items():
        here = (*path, key)
        if key not in names:
            hint = closest(key, names) or f"allowed: {', '.join(sorted(names))}"
            _expect(False, UNSET, f"unknown key; {hint}", here, sources)
        check(inner, hints[key], here, sources)
    for field in info.fields:
        if field.required and field.encode_name not in value:
            here = (*path, field.encode_name)
            _expect(False, UNSET, f"is missing; it must be {describe(field.type)}", here, sources)


def _expect(good: bool, value: Any, allowed: str, path: _Path, sources: Mapping[_Path, str]) -> None:
    if not good:
        raise ConfigError(source(path, sources), spell(path), value, allowed)


def source(path: _Path, sources: Mapping[_Path, str]) -> str:
    """The file of ``path``, or of the innermost table around it that a file has."""
    plain = tuple(re.sub(r"(\[\d+\])+$", "", part) for part in path)
    while plain and plain not in sources:
        plain = plain[:-1]
    return sources.get(plain, "configuration")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
