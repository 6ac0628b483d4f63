"""What ``quartet doctor`` makes of agents that do not answer."""

import msgspec
import pytest

from quartet_bus.bus import Message
from quartet_bus.messages import ControlReply, FleetSnapshot, NodeStamp, WorkerState
from quartet_cli.commands.doctor import _Heard
from quartet_core.verdict import Verdict


def message(said: msgspec.Struct) -> Message:
    return Message("s", msgspec.msgpack.encode(said), None, "")


def snapshot(*workers: tuple[str, Verdict], stamps: tuple[str, ...] = ()) -> Message:
    return message(
        FleetSnapshot(
            "c", 1, 1, tuple(WorkerState(name, 1, 0, 1, verdict) for name, verdict in workers),
            tuple(NodeStamp(name, 1, 1, 0) for name in stamps),
        )
    )  # fmt: skip


def test_nodes_that_answer_are_not_silent() -> None:
    heard = _Heard()
    heard.fleet(snapshot(("gpu-a-0", Verdict.UP), ("gpu-b-0", Verdict.UP), stamps=("gpu-a", "gpu-b")))
    heard.answer(message(ControlReply(True, instance="gpu-a", payload=b"{}")))
    assert [each.node for each in heard.silent()] == ["gpu-b"]


@pytest.mark.parametrize(
    ("verdicts", "why"),
    [
        ((Verdict.UP, Verdict.DEAD), "its beats arrive"),
        ((Verdict.FROZEN,), "its beats arrive"),
        ((Verdict.SUSPECT,), "no beats either"),
        ((Verdict.DEAD, Verdict.DEAD), "no beats either"),
    ],
)
def test_why_is_told_by_what_collectors_believe(verdicts: tuple[Verdict, ...], why: str) -> None:
    heard = _Heard()
    heard.fleet(snapshot(*((f"n-{ordinal}", verdict) for ordinal, verdict in enumerate(verdicts)), stamps=("n",)))
    (silent,) = heard.silent()
    assert silent.silent.startswith(why)


def test_a_node_whose_engines_are_all_down_is_known_by_its_beats() -> None:
    heard = _Heard()
    heard.fleet(snapshot(stamps=("bare",)))
    assert [each.node for each in heard.silent()] == ["bare"]


def test_of_two_collectors_the_one_counts_that_hears_the_node() -> None:
    heard = _Heard()
    heard.fleet(snapshot(("n-0", Verdict.DEAD)))
    heard.fleet(snapshot(("n-0", Verdict.UP)))
    assert heard.silent()[0].silent.startswith("its beats arrive")


def test_what_is_no_message_is_passed_over() -> None:
    heard = _Heard()
    for take in (heard.fleet, heard.answer):
        take(Message("s", b"\xc1", None, ""))
    heard.answer(message(ControlReply(False, instance="a")))
    assert (heard.silent(), heard.replies) == ([], {})
