"""The ledger: belief about a worker is its word, corrected by what the word cannot know."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.ledger import Ledger
from quartet_core.word import batch_level, batch_size, pack, queue_level, queue_ms

SLOT = 3


def key(number, worker="w", incarnation=1):
    return ("t", f"r{number}", 1, 1, worker, incarnation)


def word(queue=0.0, batch=0):
    return pack(free_kv=10, queue=queue_level(queue), batch=batch_level(batch), drift=0, accepting=True)


def opened(ledger, number, prefill_ms=100.0, *, decodes=True, now_ms=0.0, **more):
    return ledger.open(
        key(number), SLOT, prefill_ms=prefill_ms, tokens=1000, decodes=decodes, tpot_ms=50.0, total_ms=1000.0,
        now_ms=now_ms, **more,
    )  # fmt: skip


def test_a_worker_without_entries_is_what_its_word_says():
    belief = Ledger().belief(SLOT, word(queue=300.0, batch=7), 0.0)
    assert belief.queue_ms == queue_ms(queue_level(300.0))
    assert belief.batch == 7


def test_work_counts_from_the_moment_it_is_sent():
    ledger = Ledger()
    opened(ledger, 1)
    opened(ledger, 2)
    belief = ledger.belief(SLOT, word(), 0.0)
    assert belief.queue_ms == pytest.approx(200.0)
    assert belief.batch == 2


def test_sequences_of_which_only_the_word_tells_are_typical_ones():
    ledger = Ledger(typical_context=2000.0, urgency=0.01)
    opened(ledger, 1)  # 1,000 tokens, 1/50 ms
    belief = ledger.belief(SLOT, word(batch=4), 0.0)
    assert belief.batch == 5
    assert belief.context == pytest.approx((1000 + 4 * 2000) / 5)
    assert belief.urgency == pytest.approx((0.02 + 4 * 0.01) / 5)


def test_work_that_the_word_includes_is_not_counted_twice():
    ledger = Ledger()
    opened(ledger, 1, 120.0)
    ledger.accepted(key(1), beat=5)
    ledger.heard(SLOT, 5)
    belief = ledger.belief(SLOT, word(queue=120.0), 0.0)
    assert belief.queue_ms == pytest.approx(120.0, rel=0.1)
    assert belief.batch == 1


def test_work_accepted_after_the_last_beat_comes_on_top():
    ledger = Ledger()
    ledger.heard(SLOT, 4)
    opened(ledger, 1, 120.0)
    ledger.heard(SLOT, 4)
    ledger.accepted(key(1), beat=5)
    assert ledger.belief(SLOT, word(queue=50.0), 0.0).queue_ms == pytest.approx(50.0 + 120.0, rel=0.1)


def test_a_first_token_after_the_last_beat_takes_its_prefill_off():
    ledger = Ledger()
    opened(ledger, 1, 120.0)
    ledger.accepted(key(1), beat=5)
    ledger.heard(SLOT, 5)
    ledger.prefilled(key(1), beat=6)
    told = word(queue=120.0)
    belief = ledger.belief(SLOT, told, 0.0)
    assert belief.queue_ms < 20.0
    assert belief.batch == 1
    ledger.heard(SLOT, 6)
    assert ledger.belief(SLOT, word(batch=1), 0.0).batch == 1


def test_an_end_after_the_last_beat_takes_its_sequence_off():
    ledger = Ledger()
    opened(ledger, 1)
    ledger.accepted(key(1), beat=5)
    ledger.prefilled(key(1), beat=6)
    ledger.heard(SLOT, 7)
    assert ledger.belief(SLOT, word(batch=1), 0.0).batch == 1
    ledger.ended(key(1), beat=8)
    assert ledger.belief(SLOT, word(batch=1), 0.0).batch == 0
    ledger.heard(SLOT, 8)
    assert len(ledger) == 0


def test_an_entry_that_was_never_accepted_ends_at_once():
    ledger = Ledger()
    opened(ledger, 1)
    assert ledger.ended(key(1), beat=0) == SLOT
    assert len(ledger) == 0
    assert ledger.ended(key(1), beat=0) is None


def test_a_reservation_is_apart_from_the_queue_and_becomes_work():
    ledger = Ledger()
    opened(ledger, 1, 80.0, reserved_for_ms=500.0)
    belief = ledger.belief(SLOT, word(), 0.0)
    assert (belief.queue_ms, belief.reserved_ms, belief.batch) == (0.0, 80.0, 0.0)
    assert opened(ledger, 1, 80.0)
    belief = ledger.belief(SLOT, word(), 0.0)
    assert (belief.queue_ms, belief.reserved_ms, belief.batch) == (80.0, 0.0, 1.0)


def test_a_reservation_expires_soon_after_its_hold_and_work_after_three_predictions_and_five_seconds():
    ledger = Ledger()
    opened(ledger, 1, reserved_for_ms=500.0)
    opened(ledger, 2)
    assert ledger.expire(601.0) == [SLOT]
    assert len(ledger) == 1
    assert ledger.expired == 0
    assert ledger.expire(8_001.0) == [SLOT]
    assert ledger.expired == 1


def test_a_second_copy_of_a_note_changes_nothing():
    ledger = Ledger()
    assert opened(ledger, 1)
    assert not opened(ledger, 1)
    assert ledger.belief(SLOT, word(), 0.0).queue_ms == 100.0


def test_fencing_ends_all_entries_of_the_slot_and_of_no_other():
    ledger = Ledger()
    opened(ledger, 1)
    ledger.open(key(2, "v"), 4, prefill_ms=1.0, tokens=1, decodes=True, tpot_ms=50.0, total_ms=1.0, now_ms=0.0)
    assert ledger.fence(SLOT) == [key(1)]
    assert key(2, "v") in ledger


def test_the_ledger_is_bounded():
    ledger = Ledger(max_entries=1)
    assert opened(ledger, 1)
    assert not opened(ledger, 2)
    assert ledger.refused == 1


def test_prefill_share_decays():
    ledger = Ledger()
    opened(ledger, 1, 1000.0)
    early = ledger.belief(SLOT, word(), 0.0).phi
    assert early == pytest.approx(0.5)
    assert ledger.belief(SLOT, word(), 2000.0).phi == pytest.approx(early / math.e)


class Model:
    """The simplest thing that could be right: every entry remembered whole, belief summed from scratch."""

    def __init__(self):
        self.entries = {}
        self.beat = 0

    def truth(self):
        """What the worker really carries, given that its events come at once and only its word is late."""
        live = [e for e in self.entries.values() if not e["ended"]]
        queue = sum(e["prefill"] for e in live if not e["prefilled"])
        return queue, len(live)

    def told(self):
        """What a word of beat ``self.beat`` says."""
        by = self.beat
        there = [
            e
            for e in self.entries.values()
            if e["accepted"] and e["accepted"] <= by and not (e["ended"] and e["ended"] <= by)
        ]
        running = [e for e in there if e["prefilled"] and e["prefilled"] <= by]
        return sum(e["prefill"] for e in there if e not in running), len(running)


steps = st.lists(
    st.tuples(st.sampled_from(["open", "accept", "prefill", "end", "beat"]), st.integers(0, 6)), max_size=60
)


@given(steps)
def test_belief_equals_truth_whatever_the_word_has_not_heard_yet(history):
    ledger, model, sequence = Ledger(), Model(), 0
    for what, number in history:
        entry = model.entries.get(number)
        if what == "open" and entry is None:
            opened(ledger, number, 100.0 * (number + 1))
            model.entries[number] = {"prefill": 100.0 * (number + 1), "accepted": 0, "prefilled": 0, "ended": 0}
        elif what == "accept" and entry and not entry["accepted"] and not entry["ended"]:
            entry["accepted"] = sequence + 1
            ledger.accepted(key(number), sequence + 1)
        elif what == "prefill" and entry and entry["accepted"] and not entry["prefilled"] and not entry["ended"]:
            entry["prefilled"] = sequence + 1
            ledger.prefilled(key(number), sequence + 1)
        elif what == "end" and entry and entry["prefilled"] and not entry["ended"]:
            entry["ended"] = sequence + 1
            ledger.ended(key(number), sequence + 1)
        elif what == "beat":
            sequence += 1
            model.beat = sequence
            ledger.heard(SLOT, sequence)
        queue, running = model.told()
        belief = ledger.belief(SLOT, word(queue, running), 0.0)
        true_queue, true_batch = model.truth()
        # The word is quantized, our own sums are not: within the level's bounds they win.
        assert belief.queue_ms == pytest.approx(true_queue, abs=1e-6)
        assert belief.batch == true_batch
        assert belief.batch >= 0
        assert belief.queue_ms >= 0
    for number, entry in model.entries.items():
        if not entry["ended"]:
            ledger.ended(key(number), sequence)
    ledger.heard(SLOT, sequence + 2)
    assert len(ledger) == 0
    assert ledger.belief(SLOT, word(), 0.0).batch == 0


@given(st.integers(0, 500), st.integers(0, 200_000))
def test_a_router_that_just_started_believes_the_word(batch, queue):
    belief = Ledger().belief(SLOT, word(queue, batch), 0.0)
    assert belief.batch == batch_size(batch_level(batch))
    assert belief.queue_ms == queue_ms(queue_level(queue))


def test_two_tries_of_a_request_on_one_worker_are_two_entries():
    ledger = Ledger()
    for try_ in (1, 2):
        ledger.open(
            ("t", "r", 1, try_, "w", 1), SLOT, prefill_ms=100.0, tokens=1000, decodes=True, tpot_ms=50.0,
            total_ms=1000.0, now_ms=0.0,
        )  # fmt: skip
    ledger.accepted(("t", "r", 1, 2, "w", 1), 5)
    ledger.ended(("t", "r", 1, 1, "w", 1), 0)  # the first try's late end
    assert ledger.belief(SLOT, word(), 0.0).queue_ms == pytest.approx(100.0)
    ledger.ended(("t", "r", 1, 2, "w", 1), 0)
    assert len(ledger) == 0
