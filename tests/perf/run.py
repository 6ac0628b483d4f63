"""``make bench``: runs every ``bench_*.py`` here, or the one named, and prints one JSON line a configuration.

    python tests/perf/run.py [NAME]

Lines go to standard output as they come, so that they can be piped; what is going on goes to standard error. Exits with
1 for a name that is none, and when a bench could not measure what it is there to measure.
"""

import importlib
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
BENCHES = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _machine() -> str:
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def _run(name: str) -> bool:
    """Print a bench's lines; return whether it came to its end."""
    _tell(f"{name}: running ({_machine()})")
    started_s = time.monotonic()
    try:
        for line in importlib.import_module(f"bench_{name}").run():
            print(json.dumps(line), flush=True)
    except Exception:
        _tell(traceback.format_exc())
        _tell(f"{name}: failed")
        return False
    _tell(f"{name}: done in {time.monotonic() - started_s:.0f} s (load {os.getloadavg()[0]:.1f})")
    return True


def main(arguments: list[str]) -> int:
    """Run the benches named, all if none is; return the exit code."""
    unknown = [name for name in arguments if name not in BENCHES]
    if unknown:
        _tell(f"no bench {', '.join(unknown)}; there are: {', '.join(BENCHES)}")
        return 1
    done = [_run(name) for name in arguments or BENCHES]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main(sys.argv[1:]))
