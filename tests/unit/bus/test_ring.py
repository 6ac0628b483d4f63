import fcntl
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_bus.ring import RecordTooLarge, RingInUse, RingReader, RingUnusable, RingWriter

SMALL = 4096


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "ring")


@pytest.fixture
def writer(path):
    with RingWriter(path, SMALL, incarnation=7) as ring:
        yield ring


def test_a_reader_gets_every_record_in_order_once(path, writer):
    reader = RingReader(path)
    writer.append(b"one")
    writer.append(b"")
    assert reader.poll() == [b"one", b""]
    assert reader.poll() == []
    writer.append(b"three")
    assert reader.poll() == [b"three"]
    assert (reader.lost, reader.incarnation, reader.writer_pid) == (0, 7, os.getpid())


def test_a_late_reader_starts_with_the_next_record_unless_it_asks_for_the_oldest(path, writer):
    writer.append(b"old")
    late, curious = RingReader(path), RingReader(path, from_oldest=True)
    writer.append(b"new")
    assert late.poll() == [b"new"]
    assert curious.poll() == [b"old", b"new"]


def test_an_overtaken_reader_knows_exactly_how_many_records_it_lost(path, writer):
    reader = RingReader(path)
    writer.append(b"seen")
    assert reader.poll() == [b"seen"]
    for number in range(1000):
        writer.append(b"%04d" % number)
    got = reader.poll()
    assert got == [b"%04d" % number for number in range(1000 - len(got), 1000)]
    assert len(got) > 50
    assert reader.lost == 1000 - len(got)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=900) | st.none(), max_size=80), st.integers(SMALL, SMALL + 100))
def test_what_readers_get_and_lose_adds_up_for_any_sizes(tmp_path_factory, steps, size):
    path = str(tmp_path_factory.mktemp("ring") / "ring")
    with RingWriter(path, size, 1) as writer, RingReader(path) as reader:
        written = []
        got = []
        writer.append(b"first")
        assert reader.poll() == [b"first"]
        for step in [*steps, None]:
            if step is not None:
                writer.append(step)
                written.append(step)
                continue
            lost = reader.lost
            records = reader.poll()
            lost = reader.lost - lost
            start = len(got)
            assert lost + len(records) == len(written) - start
            assert records == written[start + lost :]
            got.extend(written[start:])
            if lost == 0:
                continue
            # It lost no more than it had to: what is left fills the ring but for one largest record and the wrap.
            kept = sum(24 + (len(record) + 7) // 8 * 8 for record in records)
            assert kept >= size - 2 * (24 + 904)


def test_a_record_that_is_too_large_is_refused_and_breaks_nothing(path, writer):
    reader = RingReader(path)
    with pytest.raises(RecordTooLarge) as refused:
        writer.append(bytes(writer.limit_bytes + 1))
    assert (refused.value.size_bytes, refused.value.limit_bytes) == (writer.limit_bytes + 1, writer.limit_bytes)
    largest = bytes(range(256)) * 4
    writer.append(largest[: writer.limit_bytes])
    assert reader.poll() == [largest[: writer.limit_bytes]]


def test_the_file_is_private_and_goes_away_with_its_writer(path):
    writer = RingWriter(path, SMALL, 1)
    assert os.stat(path).st_mode & 0o777 == 0o600
    reader = RingReader(path)
    writer.append(b"last words")
    writer.close()
    writer.close()
    assert not os.path.exists(path)
    assert reader.poll() == [b"last words"]
    assert reader.poll() == []
    assert not reader.attached


def test_a_living_writer_keeps_its_ring(path, writer):
    with pytest.raises(RingInUse) as refused:
        RingWriter(path, SMALL, 8)
    assert refused.value.pid == os.getpid()
    assert "another [fleet] ring_path" in str(refused.value)
    reader = RingReader(path)
    writer.append(b"still here")
    assert reader.poll() == [b"still here"]


def test_a_dead_writers_file_is_replaced_and_readers_follow(path):
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from quartet_bus.ring import RingWriter\n"
            "ring = RingWriter(sys.argv[1], 4096, 1); ring.append(b'from the dead'); os._exit(9)",
            path,
        ],
        check=False,
    )
    assert killed.returncode == 9
    reader = RingReader(path, from_oldest=True)
    assert reader.poll() == [b"from the dead"]
    assert not reader.writer_alive()
    with RingWriter(path, SMALL, 2) as writer:
        writer.append(b"alive")
        records = [record for _ in range(20) for record in reader.poll()]
        assert records == [b"alive"]
        assert (reader.incarnation, reader.reopened, reader.lost) == (2, 1, 0)
        assert reader.writer_alive()


def test_a_reader_may_come_before_its_writer(path):
    reader = RingReader(path)
    assert not reader.attached
    assert reader.poll() == []
    with RingWriter(path, SMALL, 1) as writer:
        for _ in range(20):
            reader.poll()
        assert reader.attached
        writer.append(b"hello")
        assert reader.poll() == [b"hello"]


def test_somebody_elses_file_is_neither_read_nor_removed(path):
    with open(path, "wb") as file:
        file.write(b"my thesis, the only copy".ljust(4096))
    with pytest.raises(RingUnusable):
        RingWriter(path, SMALL, 1)
    assert Path(path).read_bytes().startswith(b"my thesis")
    reader = RingReader(path)
    assert reader.poll() == []
    assert "not a ring" in str(reader.problem)


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"")
    link = tmp_path / "ring"
    link.symlink_to(target)
    with pytest.raises(RingUnusable):
        RingWriter(str(link), SMALL, 1)
    assert RingReader(str(link)).problem is not None
    assert target.exists()


def test_an_unfinished_file_of_a_starter_that_died_is_replaced(path):
    with open(path, "wb") as file:
        file.write(bytes(500))
    with RingWriter(path, SMALL, 3) as writer:
        writer.append(b"x")
        assert RingReader(path, from_oldest=True).poll() == [b"x"]


def test_a_file_that_another_starter_has_just_locked_is_in_use(path):
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RingInUse):
            RingWriter(path, SMALL, 3)


def test_a_missing_folder_is_one_clear_error(tmp_path):
    with pytest.raises(RingUnusable, match="cannot be created"):
        RingWriter(str(tmp_path / "nowhere" / "ring"), SMALL, 1)


def test_a_damaged_record_is_never_delivered_and_counts_as_lost(path, writer):
    reader = RingReader(path)
    writer.append(b"before")
    assert reader.poll() == [b"before"]
    writer.append(b"damaged")
    writer.append(b"after it")
    with open(path, "r+b") as file:
        content = file.read()
        file.seek(content.index(b"damaged"))
        file.write(b"D")
    for _ in range(20):
        assert b"Damaged" not in reader.poll()
    writer.append(b"later")
    assert reader.poll() == [b"later"]
    assert reader.lost == 2


def test_the_layout_is_the_documented_one(path, writer):
    writer.append(b"payload")
    content = Path(path).read_bytes()
    assert len(content) == 128 + SMALL
    assert struct.unpack_from("<8s7Q", content) == (b"QRTRING\n", 1, SMALL, os.getpid(), 7, 32, 0, 0)
    first, length, crc, payload, last = struct.unpack_from("<QII8sQ", content, 128)
    assert (first, length, payload, last) == (1, 7, b"payload\0", 1)
    assert crc == zlib.crc32(b"payload", 1)


_READER = """
import sys, time
from quartet_bus.ring import RingReader
reader = RingReader(sys.argv[1], from_oldest=True)
assert reader.poll() == [b"%08d" % 1]
print("ready", flush=True)
last, got = 1, 1
while last != int(sys.argv[2]):
    for record in reader.poll():
        number = int(record[:8])
        assert number > last and record == record[:8] * (len(record) // 8), record
        last, got = number, got + 1
print(got, reader.lost)
"""


def test_a_reader_in_another_process_sees_only_whole_records_while_being_overtaken(path):
    total = 60_000
    with RingWriter(path, SMALL, 1) as writer:
        writer.append(b"%08d" % 1)
        child = subprocess.Popen(
            [sys.executable, "-c", _READER, path, str(total)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout.readline() == "ready\n"
            for number in range(2, total + 1):
                writer.append(b"%08d" % number * (1 + number % 40))
            out, errors = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 0, errors
    got, lost = map(int, out.split())
    assert got + lost == total
    assert got > 1
