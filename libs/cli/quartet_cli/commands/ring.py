"""``quartet ring``: the newest records in a collector's shared-memory ring, oldest first, one JSON object each."""

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from quartet_bus.messages import FleetDelta
from quartet_bus.ring import RingReader
from quartet_cli.commands import options
from quartet_cli.errors import CommandFailed
from quartet_cli.running import until_done

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_POLL_S = 0.005
_LAST = 20

_decode = msgspec.msgpack.Decoder(FleetDelta).decode


def add_to(commands: "Commands") -> None:
    """Declare ``ring``."""
    parser = commands.add_parser(
        "ring", help="show the newest records in a collector's shared-memory ring", description=__doc__
    )
    parser.add_argument("path", help="the ring's file, [fleet] ring_path")
    parser.add_argument(
        "--last", type=options.not_negative, default=_LAST, metavar="N",
        help=f"as many records of those that are there, 0 for all [{_LAST}]",
    )  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="go on with what is written from now on, until Ctrl-C")
    parser.set_defaults(run=lambda arguments: until_done(_ring(arguments), interrupted=0))


async def _ring(arguments: argparse.Namespace) -> int:
    with RingReader(arguments.path, from_oldest=True) as reader:
        if not reader.attached:
            raise CommandFailed(str(reader.problem or f"no ring at {arguments.path}"))
        incarnation, pid = reader.incarnation, reader.writer_pid
        alive = "alive" if reader.writer_alive() else "gone"
        there = reader.poll()
        shown = deque(there, maxlen=arguments.last or None)
        count = f"{len(shown)} of {len(there)}" if len(shown) < len(there) else f"{len(there)}"
        _print(shown)
        print(f"{count} records of incarnation {incarnation} (pid {pid}, {alive})", file=sys.stderr)
        while arguments.follow:
            await asyncio.sleep(_POLL_S)
            _print(reader.poll())
    return 0


def _print(records: Iterable[bytes]) -> None:
    for record in records:
        sys.stdout.write(_line(record) + "\n")
    sys.stdout.flush()


def _line(record: bytes) -> str:
    """A record by the names of its fields."""
    delta = _decode(record)
    named = {
        "collector": delta.collector,
        "number": delta.number,
        "changes": [_fields(change) for change in delta.changes],
        "stamps": [_fields(stamp) for stamp in delta.stamps],
    }
    return msgspec.json.encode(named).decode()


def _fields(record: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
