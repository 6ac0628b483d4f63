import io
import json

import msgspec
import pytest

from quartet_bus.messages import FleetDelta, NodeStamp, WorkerState
from quartet_bus.ring import RingWriter
from quartet_cli.__main__ import main
from quartet_cli.fleet.ports import free_tcp_ports
from quartet_cli.fleet.progress import StartLine


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(list(arguments))
    return ending.value.code


def test_ring_prints_every_record_by_the_names_of_its_fields(tmp_path, capsys):
    path = str(tmp_path / "ring")
    with RingWriter(path, 1 << 16, incarnation=5) as ring:
        for number in (1, 2):
            delta = FleetDelta("c", 5, number, (WorkerState("h-0", 7, 3, 99, 0),), (NodeStamp("h", 1, 99, 123),))
            ring.append(msgspec.msgpack.encode(delta))
        assert ran("ring", path) == 0
    printed = capsys.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]
    assert [record["number"] for record in records] == [1, 2]
    assert records[0]["changes"] == [{"worker": "h-0", "incarnation": 7, "state": 3, "beat": 99, "verdict": 0}]
    assert records[0]["stamps"][0]["node"] == "h"
    assert "2 records of incarnation 5" in printed.err


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("ring", "/nowhere/ring"), 1, "quartet: no ring at /nowhere/ring"),
        (("demo", "--seconds", "0"), 2, "quartet: --seconds must be above 0"),
        (("demo", "--json", "/nowhere/x.json"), 2, "quartet: --json /nowhere/x.json: there is no such directory"),
        (("publish", "m", ""), 2, "quartet: the prompt is empty"),
    ],
)
def test_what_cannot_be_done_gets_one_line(arguments, code, line, capsys):
    assert ran(*arguments) == code
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("command", [("fleet",), ("policy",), ("explain", "x")])
def test_an_admin_that_is_not_there_is_named(command, capsys):
    (port,) = free_tcp_ports(1)
    assert ran(*command, "--admin", f"127.0.0.1:{port}") == 1
    assert capsys.readouterr().err.splitlines() == [f"quartet: no admin at 127.0.0.1:{port}"]


def test_a_start_is_told_in_a_line_for_every_part_that_gets_ready():
    out = io.StringIO()
    line = StartLine(out)
    for waiting in ({"a": "starting", "b": "starting"}, {"a": "no broker", "b": "starting"}, {"b": "x"}, {}):
        line(2, waiting)
    assert out.getvalue().splitlines() == [
        "0/2 ready; a: starting, b: starting",
        "1/2 ready; b: x",
        "2 processes are ready",
    ]
