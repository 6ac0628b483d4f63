"""Logs are JSON lines, metrics belong to one service, and neither grows with what senders choose."""

import json
import subprocess
import sys

import pytest

from quartet_bus import metrics as metrics_module
from quartet_bus.metrics import Metrics

PROGRAM = """
from quartet_bus import logs
early = logs.logger(where="early")
logs.configure("info", service="router", instance="r-1")
early.info("first", frm={1, 2}.__class__, data=b"\\xff")
logs.logger().debug("not said")
try:
    1 / 0
except ZeroDivisionError:
    logs.logger().exception("failed")
"""


def test_logs_are_one_json_object_a_line_on_standard_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True)
    assert done.stdout == ""
    first, failed = (json.loads(line) for line in done.stderr.splitlines())
    assert (first["message"], first["where"], first["level"]) == ("first", "early", "info")
    assert (first["service"], first["instance"]) == ("router", "r-1")
    assert first["timestamp"].endswith("Z")
    assert "ZeroDivisionError" in failed["exception"]


def test_libraries_that_we_do_not_use_are_not_loaded() -> None:
    program = (
        "import sys, quartet_bus.process; print([m for m in ('aiohttp', 'rich', 'numpy', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_what_was_hidden_can_be_loaded_afterwards() -> None:
    program = "import quartet_bus.process, aiohttp, rich; print(aiohttp.ClientSession.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "ClientSession"


def test_names_carry_the_service_and_two_services_do_not_mix() -> None:
    router, agent = Metrics("router"), Metrics("agent")
    router.counter("seen", "Seen.").inc()
    agent.counter("seen", "Seen.")
    assert b"quartet_router_seen_total 1.0" in router.exposition()
    assert b"quartet_agent_seen_total 0.0" in agent.exposition()


def test_label_values_beyond_the_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SERIES", 3)
    metrics = Metrics("router")
    counter = metrics.counter("by_model", "By model.", ("model", "class"))
    histogram = metrics.histogram("wait_s", "Wait.", ("model",))
    for number in range(10):
        counter.labels(f"m{number}", "c").inc()
        counter.labels(**{"model": f"m{number}", "class": "c"}).inc()
        histogram.labels(f"m{number}").observe(0.1)
    text = metrics.exposition().decode()
    assert 'by_model_total{class="c",model="m2"} 2.0' in text
    assert 'by_model_total{class="other",model="other"} 14.0' in text
    assert 'wait_s_count{model="other"} 7.0' in text
    assert "m3" not in text
