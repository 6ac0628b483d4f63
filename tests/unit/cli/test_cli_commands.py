import asyncio
import io
import json
import subprocess
import sys

import grpc.aio
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


def _in_a_process(*arguments: str) -> tuple[int, str]:
    """The exit code and what is on standard error, for commands that a server of the test must answer meanwhile."""
    command = [sys.executable, "-m", "quartet_cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


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
    ("options", "numbers"), [((), range(11, 31)), (("--last", "2"), (29, 30)), (("--last", "0"), range(1, 31))]
)
def test_ring_prints_the_newest_records_and_says_how_many_there_are(tmp_path, capsys, options, numbers):
    path = str(tmp_path / "ring")
    with RingWriter(path, 1 << 16, incarnation=5) as ring:
        for number in range(1, 31):
            ring.append(msgspec.msgpack.encode(FleetDelta("c", 5, number, (), ())))
        assert ran("ring", path, *options) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["number"] for line in printed.out.splitlines()] == list(numbers)
    assert printed.err.startswith("30 records" if len(numbers) == 30 else f"{len(numbers)} of 30 records")


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("ring", "/nowhere/ring"), 1, "quartet: no ring at /nowhere/ring"),
        (("demo", "--seconds", "0"), 2, "quartet: --seconds must be above 0"),
        (("demo", "--json", "/nowhere/x.json"), 2, "quartet: --json /nowhere/x.json: there is no such directory"),
        (("publish", "m", ""), 2, "quartet: the prompt is empty"),
        (("fleet", "--admin", "foo"), 2, "quartet: --admin foo: HOST:PORT expected"),
        (("policy", "--admin", "foo:70000"), 2, "quartet: --admin foo:70000: HOST:PORT expected"),
        (("watch", "--admin", "http://foo:1"), 2, "quartet: --admin http://foo:1: HOST:PORT expected"),
    ],
)
def test_what_cannot_be_done_gets_one_line(arguments, code, line, capsys):
    assert ran(*arguments) == code
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("command", [("fleet",), ("policy",), ("explain", "x"), ("watch",)])
def test_an_admin_that_is_not_there_is_named(command, capsys):
    (port,) = free_tcp_ports(1)
    assert ran(*command, "--admin", f"127.0.0.1:{port}") == 1
    assert capsys.readouterr().err.splitlines() == [f"quartet: no admin at 127.0.0.1:{port}"]


@pytest.mark.parametrize("command", [("fleet",), ("watch",)])
async def test_another_grpc_service_is_not_taken_for_an_admin(command):
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await asyncio.to_thread(_in_a_process, *command, "--admin", f"127.0.0.1:{port}") == (
            1,
            f"quartet: 127.0.0.1:{port} is not a Quartet admin\n",
        )
    finally:
        await server.stop(None)


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
