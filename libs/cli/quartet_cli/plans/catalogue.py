"""The catalogue of a plan: what ships, and tables of an operator's own."""

from pathlib import Path

import msgspec

from quartet_cli.errors import CommandFailed
from quartet_core.catalogue import Catalogue, WrongEntry, builtin


def catalogue_with(path: Path | None) -> Catalogue:
    """The built-in catalogue with the ``[hardware.*]`` and ``[models.*]`` tables of the file at ``path``.

    Raises ``CommandFailed`` with code 2, naming the file and the table.
    """
    if path is None:
        return builtin()
    try:
        tables = msgspec.toml.decode(path.read_bytes(), type=dict[str, dict[str, dict[str, object]]])
        return builtin().merge(tables)
    except (OSError, msgspec.DecodeError, WrongEntry, ValueError) as error:
        raise CommandFailed(f"--catalogue {path}: {error}", 2) from error
