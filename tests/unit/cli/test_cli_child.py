import asyncio
import os
from pathlib import Path

import pytest

from quartet_cli.fleet.child import Child


def script(directory: Path, text: str) -> dict[str, str]:
    """The environment in which ``python -m program`` runs ``text``."""
    (directory / "program.py").write_text(text)
    return {**os.environ, "PYTHONPATH": str(directory), "PYTHONUNBUFFERED": "1"}


async def says(child: Child, text: str) -> None:
    """Return when ``child`` has printed ``text``."""
    async with asyncio.timeout(20):
        while text not in "\n".join(child.last_words()):  # noqa: ASYNC110 (another process is waited for)
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether there is no such process, or only what is left of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.fixture
def child(tmp_path):
    def make(text: str) -> Child:
        return Child("part", "program", [], env=script(tmp_path, text), log=tmp_path / "part.log")

    return make


async def test_a_child_that_heeds_sigterm_ends_at_once(child):
    one = child("import signal\nprint('up')\nsignal.pause()")
    await one.start()
    await says(one, "up")
    await one.stop(timeout_s=30)
    assert one.ended == -15


async def test_a_child_that_does_not_is_killed_after_its_time(child):
    one = child("import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\nwhile True: signal.pause()")
    await one.start()
    await says(one, "up")
    await one.stop(timeout_s=0.05)
    assert one.ended == -9


async def test_what_a_child_started_ends_with_it(child):
    one = child("import subprocess, signal\nprint(subprocess.Popen(['sleep', '600']).pid)\nprint('up')\nsignal.pause()")
    await one.start()
    await says(one, "up")
    grandchild = int(one.last_words()[0])
    await one.stop(timeout_s=30)
    async with asyncio.timeout(20):
        while not gone(grandchild):  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.01)


async def test_an_obituary_says_how_it_ended_and_what_it_said_last(child):
    one = child("import sys\nfor n in range(100): print('line', n)\nsys.exit('quartet part: no room')")
    await one.start()
    assert await one.wait() == 1
    lines = one.obituary().splitlines()
    assert lines[0] == f"part (pid {one.pid}) ended with exit code 1"
    assert lines[-1] == "    quartet part: no room"
    assert len(lines) == 9
    await one.stop(timeout_s=1)  # stopping what has ended is no error


async def test_a_child_that_was_never_started_can_be_stopped(child):
    await child("").stop(timeout_s=1)
