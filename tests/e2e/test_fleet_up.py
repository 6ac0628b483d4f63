"""``quartet up``: what it prints works when it is pasted, and Ctrl-C leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from e2e.up import QUARTET, Up

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def processes_of(directory: Path) -> dict[int, str]:
    """The processes that were started for the fleet in ``directory``: command lines by process id."""
    lines = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if str(directory) in line:
            lines[int(entry.parent.name)] = line
    return lines


def quartet(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run another command of ours."""
    return subprocess.run([*QUARTET, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up") / "run")
    yield running
    if running.process.poll() is None:
        running.stop()


def test_every_snippet_streams_an_answer_when_it_is_pasted(up: Up):
    snippets = up.snippets()
    assert [snippet.split()[0].rpartition("/")[2][:6] for snippet in snippets] == ["curl", "python", "quarte", "python"]
    for snippet in snippets:
        pasted = snippet.replace("quartet publish", f"{sys.executable} -m quartet_cli publish")
        done = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert '"frame":"end"' in done.stdout


def test_the_openai_client_streams_and_is_told_of_a_model_that_is_not_there(up: Up):
    client = openai.OpenAI(base_url=up.address("gateway"), api_key="none", max_retries=0)
    assert {model.id for model in client.models.list()} == {"llama-8b", "llama-70b"}
    chunks = list(
        client.chat.completions.create(
            model="llama-70b", messages=[{"role": "user", "content": "Say"}], max_tokens=9, stream=True
        )
    )
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) == 9
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")


def test_a_request_can_be_explained_afterwards(up: Up):
    nats, admin = up.address("NATS"), up.address("admin gRPC")
    published = quartet("publish", "llama-8b", "tell me", "--id", "why", "--max-tokens", "4", "--nats", nats)
    assert published.returncode == 0
    explained = quartet("explain", "why", "--admin", admin, "--json")
    decision = json.loads(explained.stdout)["decisions"][0]
    assert decision["model"] == "llama-8b"
    assert decision["plans"]
    assert quartet("explain", "why", "--admin", admin).returncode == 0
    unknown = quartet("explain", "never-sent", "--admin", admin)
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (1, 1)


def test_the_fleet_is_shown_whole_and_the_policy_can_be_changed(up: Up):
    admin = up.address("admin gRPC")
    fleet = json.loads(quartet("fleet", "--admin", admin, "--json").stdout)
    assert len(fleet["nodes"]) == 3
    assert len(fleet["workers"]) == 15
    assert {worker["verdict"] for worker in fleet["workers"]} == {"VERDICT_UP"}
    assert "h100-0-0" in quartet("fleet", "--admin", admin).stdout
    assert "round-robin" in quartet("policy", "round-robin", "--admin", admin).stdout
    assert "router-0: round-robin" in quartet("policy", "--admin", admin).stdout
    assert quartet("policy", "finish-time", "--admin", admin).returncode == 0
    refused = quartet("policy", "no-such-policy", "--admin", admin)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (1, 1)


def test_the_ring_can_be_dumped(up: Up):
    dumped = quartet("ring", up.address("ring"), "--last", "1000")
    assert dumped.returncode == 0
    nodes = {stamp["node"] for line in dumped.stdout.splitlines() for stamp in json.loads(line)["stamps"]}
    assert nodes == {"h100-0", "l40s-0", "l40s-1"}


def test_a_process_that_dies_is_named_and_ctrl_c_leaves_nothing_behind(up: Up):
    lines = processes_of(up.directory)
    assert len(lines) >= 11  # nine services, the broker, and `up` itself
    (predictor,) = [pid for pid, line in lines.items() if "quartet_prefetch_predictor" in line]
    os.kill(predictor, signal.SIGKILL)
    up.wait_for("predictor (pid ")
    assert "was ended by signal 9" in up.text
    assert up.stop() == 0
    assert processes_of(up.directory) == {}
    assert not up.directory.exists()


def test_a_fleet_that_is_killed_leaves_no_process_behind(tmp_path: Path):
    up = Up(tmp_path / "run")
    assert len(processes_of(up.directory)) >= 11
    up.process.kill()
    up.process.wait(timeout=30)
    end_s = time.monotonic() + 30
    while left := processes_of(up.directory):
        assert time.monotonic() < end_s, left
        time.sleep(0.1)
