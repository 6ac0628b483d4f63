"""A million datagrams that no agent sent: random bytes, and genuine beats with something changed."""

from collections import Counter

import numpy as np
import pytest

from quartet_core import heartbeat
from quartet_core.heartbeat import MalformedBeat, node_key
from quartet_core.verdict import VerdictLimits
from quartet_heartbeat_collector.batch import ROW_WORDS, decode
from quartet_heartbeat_collector.fleet import Fleet

HALF = 500_000
BATCH = 1_000
NODES = 20
MASTER = b"m" * 16
HEADER_BYTES = heartbeat.WORKERS_OFFSET


class Forger:
    """Makes batches out of genuine datagrams that it has overheard, as a receiver would have them in its rows."""

    def __init__(self, genuine: list[bytes], seed: int):
        self._random = np.random.default_rng(seed)
        self._genuine = np.zeros((len(genuine), ROW_WORDS * 8), dtype=np.uint8)
        self._lengths = np.array([len(data) for data in genuine], dtype=np.uint32)
        for row, data in zip(self._genuine, genuine, strict=True):
            row[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self.kinds = (self.noise, self.cut, self.longer, self.changed, self.incarnation, self.later, self.again)

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and lengths of ``BATCH`` forged datagrams, of all kinds."""
        which = self._random.integers(0, len(self._genuine), BATCH)
        rows, lengths = self._genuine[which].copy(), self._lengths[which].copy()
        kinds = self._random.integers(0, len(self.kinds), BATCH)
        for kind, forge in enumerate(self.kinds):
            at = (kinds == kind).nonzero()[0]
            forge(rows, lengths, at)
        return rows.view("<u8"), lengths

    def noise(self, rows, lengths, at):
        rows[at, :200] = self._random.integers(0, 256, (at.size, 200), dtype=np.uint8)
        lengths[at] = self._random.integers(0, 200, at.size)

    def cut(self, rows, lengths, at):
        lengths[at] = self._random.integers(0, lengths[at])

    def longer(self, rows, lengths, at):
        lengths[at] += self._random.integers(1, 64, at.size).astype(np.uint32)

    def changed(self, rows, lengths, at):
        """One byte, anywhere."""
        rows[at, self._random.integers(0, lengths[at])] ^= self._random.integers(1, 256, at.size, dtype=np.uint8)

    def incarnation(self, rows, lengths, at):
        """One byte of the agent's incarnation."""
        rows[at, 4 + self._random.integers(0, 4, at.size)] ^= self._random.integers(1, 256, at.size, dtype=np.uint8)

    def later(self, rows, lengths, at):
        """A later sequence and other words, by somebody without a key."""
        rows[at, 16] ^= self._random.integers(1, 256, at.size, dtype=np.uint8)
        rows[at, HEADER_BYTES + 4] ^= self._random.integers(1, 256, at.size, dtype=np.uint8)

    def again(self, rows, lengths, at):
        """As it was overheard."""


def _overheard(beat, state_word, key_of):
    """A first beat of every node, with 1 to 8 workers."""
    return [
        heartbeat.encode(beat(f"n{at}", 1_000, *[state_word(batch=at)] * (1 + at % 8)), key_of(f"n{at}"))
        for at in range(NODES)
    ]


def _fleet(inventory, masters=()):
    fleet = Fleet(VerdictLimits(), masters)
    for at in range(NODES):
        fleet.announce(inventory(f"n{at}", workers=tuple((worker, 1) for worker in range(1 + at % 8))), 0)
    return fleet


def _accounted(board):
    return board.taken + board.superseded + board.dropped.total()


def _storm(fleet, forger, number):
    for at in range(number // BATCH):
        rows, lengths = forger.batch()
        fleet.hear(decode(rows, lengths), at * 2_000_000)
        if at % 3 == 0:
            fleet.tick(at * 2_000_000)


def test_half_a_million_forged_datagrams_change_nothing_where_nodes_have_keys(inventory, beat, state_word, received):
    fleet = _fleet(inventory, [b"o" * 16, MASTER])
    genuine = _overheard(beat, state_word, lambda name: node_key(MASTER, name))
    fleet.hear(received(*genuine), 0)
    fleet.tick(0)
    fleet.take_changes()
    known = fleet.states()
    _storm(fleet, Forger(genuine, seed=1), HALF)
    board = fleet.board
    assert [(state.worker, state.state, state.beat) for state in fleet.states()] == [
        (state.worker, state.state, state.beat) for state in known
    ]
    assert (board.taken, board.superseded, fleet.foreign_entries) == (NODES, 0, 0)
    assert board.received == _accounted(board) == HALF + NODES
    assert (+board.dropped).keys() == {
        *("magic", "version", "length", "tag"),
        *("unknown_node", "incarnation", "replay", "jump"),
    }


def test_half_a_million_forged_datagrams_are_counted_by_reason_where_nodes_have_none(
    inventory, beat, state_word, received
):
    fleet = _fleet(inventory)
    genuine = _overheard(beat, state_word, lambda name: None)
    fleet.hear(received(*genuine), 0)
    _storm(fleet, Forger(genuine, seed=2), HALF)
    assert fleet.board.received == _accounted(fleet.board) == HALF + NODES
    assert (+fleet.board.dropped).keys() >= {"magic", "version", "length", "unknown_node", "incarnation", "replay"}
    assert len(fleet.states()) == sum(1 + at % 8 for at in range(NODES))


def test_a_forged_incarnation_changes_nothing_without_keys_either(inventory, beat, state_word, received):
    fleet = _fleet(inventory)
    genuine = _overheard(beat, state_word, lambda name: None)
    fleet.hear(received(*genuine), 0)
    fleet.tick(0)
    fleet.take_changes()
    forger = Forger(genuine, seed=3)
    forger.kinds = (forger.incarnation,)
    _storm(fleet, forger, 20 * BATCH)
    assert fleet.board.dropped["incarnation"] == 20 * BATCH
    assert fleet.board.taken == NODES


@pytest.mark.parametrize("seed", range(5))
def test_the_forged_are_malformed_for_the_reasons_that_decoding_one_by_one_gives(beat, state_word, seed):
    rows, lengths = Forger(_overheard(beat, state_word, lambda name: None), seed).batch()
    expected = Counter()
    for row, length in zip(rows, lengths.tolist(), strict=True):
        try:
            heartbeat.decode(row.tobytes()[:length])
        except MalformedBeat as error:
            expected[error.reason] += 1
    assert decode(rows, lengths).malformed == expected
