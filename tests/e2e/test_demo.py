"""``quartet demo``, shortened: the whole way from a real trace to the final screen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_short_demo_answers_every_request_right_and_accounts_for_it(tmp_path: Path):
    command = [sys.executable, "-m", "quartet_cli", "demo", "--seconds", "12", "--json", "figures.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Pools while requests came" in done.stdout
    assert "A pass ends at most 120 s (finish-time) and 15 s (round-robin) after its last arrival" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    ours, other = figures["ours"], figures["other"]
    assert figures["problems"] == []
    assert ours["sent"] == ours["right"] == other["sent"] > 50
    assert (ours["policy"], other["policy"]) == ("finish-time", "round-robin")
    assert (ours["grace_s"], other["grace_s"]) == (120, 15)
    assert min(ours["routing"][name] for name in ("splits", "holds", "affinity_hits")) > 0
    assert ours["kv"]["verified_blocks"] > 0
    assert ours["kv"]["unverified"] == []
    # 64 real bytes a token, charged as the models' full KV.
    assert ours["kv"]["charged_bytes"] > 1000 * ours["kv"]["real_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
