"""``make load-test``: aiperf, a load tool of the field, against a whole fleet; its own report must show no errors.

    python tests/load/run.py [--requests N] [--concurrency N]

aiperf gets a virtual environment of its own, ``.venv-load`` (a few minutes and some 900 MB, once). Where it cannot be
installed the test is skipped and says why. Engines are simulated, so its latencies say nothing about any card.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AIPERF = "aiperf==0.13.0"
ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-load"
TOKENIZER = ROOT / "tests" / "unit" / "gateway" / "tokenizer"
"""Only shapes the prompts: what counts is what the server says it counted."""

MODEL = "llama-8b"
START_S = 120.0
RUNS = (
    ("chat, streamed", ["--endpoint-type", "chat", "--streaming"]),
    ("chat, in one piece", ["--endpoint-type", "chat"]),
    ("completions, streamed", ["--endpoint-type", "completions", "--streaming"]),
)


def _installed() -> str | None:
    """Why aiperf cannot be run here, None when it can."""
    if (VENV / "bin" / "aiperf").exists():
        return None
    print(f"installing {AIPERF} into {VENV.name} (once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    command = [str(VENV / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", AIPERF]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    (VENV / "bin" / "aiperf").unlink(missing_ok=True)
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip said nothing")


def _address(out: Path, process: "subprocess.Popen[bytes]") -> str:
    """Where the gateways listen, once the fleet is up."""
    end_s = time.monotonic() + START_S
    while "Ctrl-C stops all of it." not in out.read_text():
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"the fleet did not start:\n{out.read_text()}")
        time.sleep(0.1)
    found = re.search(r"http://[0-9.:]+", out.read_text())
    assert found is not None
    return found[0]


def _loaded(address: str, options: list[str], requests: int, concurrency: int, directory: Path) -> dict[str, object]:
    """What aiperf reports of one run, in figures. Raises ``RuntimeError`` when it made no report."""
    command = [str(VENV / "bin" / "aiperf"), "profile", "--model", MODEL, "--url", address, *options]
    command += ["--concurrency", str(concurrency), "--request-count", str(requests), "--isl", "400", "--osl", "32"]
    command += ["--tokenizer", str(TOKENIZER), "--use-server-token-count", "--ui", "none"]
    done = subprocess.run(
        [*command, "--artifact-dir", str(directory)], capture_output=True, text=True, timeout=600, check=False
    )
    report = directory / "profile_export_aiperf.json"
    if done.returncode or not report.exists():
        raise RuntimeError(f"aiperf ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    told = json.loads(report.read_text())
    figures = {name: told[name]["avg"] for name in ("request_count", "request_error_rate")}
    figures |= {name: told[name] for name in ("error_summary", "was_cancelled", "is_complete")}
    for name in ("request_throughput", "request_latency", "time_to_first_token", "inter_token_latency"):
        if told.get(name):
            figures[f"{name} ({told[name]['unit']})"] = round(told[name]["avg"], 2)
    return figures


def main(arguments: list[str]) -> int:
    """Run it; 0 when every report shows no errors, or when aiperf cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="requests of each run [300]")
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="how many at once [32]")
    options = parser.parse_args(arguments)
    reason = _installed()
    if reason is not None:
        print(f"load test SKIPPED: {AIPERF} cannot be installed here: {reason}")
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "up.out"
        command = [sys.executable, "-m", "quartet_cli", "up", "--ports", "any", "--gateways", "2"]
        with out.open("wb") as written:
            fleet = subprocess.Popen([*command, "--dir", f"{directory}/run"], stdout=written, stderr=subprocess.STDOUT)
        try:
            address = _address(out, fleet)
            for number, (name, flags) in enumerate(RUNS):
                artifacts = Path(directory) / f"aiperf-{number}"
                figures = _loaded(address, flags, options.requests, options.concurrency, artifacts)
                wanted = {"request_count": options.requests, "request_error_rate": 0, "error_summary": []}
                wanted |= {"was_cancelled": False, "is_complete": True}
                clean = {name: figures[name] for name in wanted} == wanted
                failed |= not clean
                print(f"{'ok' if clean else 'FAILED'}  {name}: {json.dumps(figures)}", flush=True)
        finally:
            fleet.send_signal(signal.SIGINT)
            fleet.wait(timeout=60)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
