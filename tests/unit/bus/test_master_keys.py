"""Master keys from configuration and from a file that changes."""

import os

import pytest

from quartet_bus.config.check import ConfigError
from quartet_bus.config.keys import MasterKeys
from quartet_bus.config.schema import FleetSection


def of(file) -> MasterKeys:
    return MasterKeys(FleetSection(master_keys_file=str(file)))


def rewrite(file, text: str) -> None:
    """Write so that the change shows even within one tick of the file system's clock."""
    file.write_text(text)
    os.utime(file, ns=(1, os.stat(file).st_mtime_ns + 1_000_000))


def test_keys_stand_in_the_configuration_or_in_a_file_one_a_line(tmp_path):
    assert MasterKeys(FleetSection()).keys == ()
    assert MasterKeys(FleetSection(master_keys=("0a", "0B"))).keys == (b"\x0a", b"\x0b")
    (tmp_path / "keys").write_text("0a\n0B\n\n")
    assert of(tmp_path / "keys").keys == (b"\x0a", b"\x0b")


def test_a_file_is_read_again_when_it_changed_and_only_then(tmp_path):
    file = tmp_path / "keys"
    file.write_text("0a")
    keys = of(file)
    assert not keys.look()
    rewrite(file, "0b\n0a")
    assert keys.look()
    assert (keys.keys, keys.look()) == ((b"\x0b", b"\x0a"), False)
    rewrite(file, "0b 0a")
    assert not keys.look(), "the same keys, written otherwise"


@pytest.mark.parametrize("content", ["", "zz", "0", "0a\n0b\n0c", "0a" * 33, "\xff"])
def test_a_file_that_is_no_good_stops_the_start_and_later_changes_nothing_and_is_never_shown(tmp_path, content):
    file = tmp_path / "keys"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"fleet.master_keys_file") as error:
        of(file)
    assert not content or content not in str(error.value)
    rewrite(file, "0a")
    keys = of(file)
    file.write_bytes(content.encode("latin-1") + b" bad")
    os.utime(file, ns=(1, 5))
    assert (keys.look(), keys.keys, bool(keys.trouble)) == (False, (b"\x0a",), True)
    rewrite(file, "0c")
    assert (keys.look(), keys.keys, keys.trouble) == (True, (b"\x0c",), "")
    file.unlink()
    assert (keys.look(), keys.keys, "cannot be read" in keys.trouble) == (False, (b"\x0c",), True)


def test_a_file_beside_keys_in_the_configuration_is_a_contradiction(tmp_path):
    with pytest.raises(ConfigError, match="cannot stand beside master_keys"):
        MasterKeys(FleetSection(master_keys=("0a",), master_keys_file=str(tmp_path / "keys")))
