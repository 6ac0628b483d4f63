"""Faults that users of other routers reported, played against ours: one file each, beside this one."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from scenarios import story
from scenarios.broker import play_broker
from scenarios.plot import Unmet, play

from quartet_bus.loop import run_virtual

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, tmp_path: Path) -> None:
    told = story.read(path)
    try:
        if told.broker is not None:
            asyncio.run(play_broker(told.broker, tmp_path))
        elif told.real_time:
            asyncio.run(play(told))
        else:
            run_virtual(play(told))
        return
    except Unmet as unmet:
        wrong = str(unmet)
    pytest.fail(f"{told.title} ({told.source.report})\n{wrong}", pytrace=False)


def test_the_table_names_every_story_and_no_other() -> None:
    table = (HERE / "README.md").read_text()
    told = {path.relative_to(HERE).as_posix() for path in FILES}
    assert {name for name in told if f"({name})" in table} == told
    linked = [part.partition(")")[0] for part in table.split("](")[1:]]
    assert {link for link in linked if link.endswith(".toml")} == told


def test_a_story_that_says_what_nobody_understands_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(FILES[0].read_text() + '\nexpekt = "x"')
    with pytest.raises(msgspec.ValidationError, match="expekt"):
        story.read(wrong)
