"""``docs/planning.md`` shows what the commands print: every line of a console block is in the output, in this order."""

import re
import shlex
from pathlib import Path

import pytest

from quartet_cli.__main__ import main

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0][2:60] for block in BLOCKS])
def test_the_page_shows_what_is_printed(block, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = block.rstrip("\n").split("\n")
    printed = ""
    for line in lines:
        if line.startswith("$ quartet "):
            command, _, file = line.removeprefix("$ quartet ").partition(" > ")
            with pytest.raises(SystemExit):
                main(shlex.split(command))
            output = capsys.readouterr()
            printed = output.out + output.err
            if file:
                (tmp_path / file).write_text(output.out)
    shown = [line.lstrip("…").rstrip() for line in lines if not line.startswith("$ ")]
    place = 0
    for line in shown:
        found = printed.find(line, place)
        assert found >= 0, f"not printed, or not in this order: {line!r} in\n{printed}"
        place = found + len(line)
