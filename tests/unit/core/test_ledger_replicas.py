"""Two routers' ledgers, fed by one another's notes and the workers' events: never negative, and empty in the end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.ledger import Ledger
from quartet_core.word import pack

SLOTS = (0, 1)
WORD = pack(free_kv=15, queue=0, batch=0, drift=0, accepting=True)


class Fleet:
    """What really happens: workers take, prefill and end requests; two routers hear of it, late, twice, or not yet."""

    def __init__(self):
        self.ledgers = (Ledger(), Ledger())
        self.beats = dict.fromkeys(SLOTS, 0)
        self.lives = dict.fromkeys(SLOTS, 1)
        self.requests = {}
        self.notes = []

    def key(self, number, slot):
        return ("t", f"r{number}", 1, 1, f"w{slot}", self.lives[slot])

    def open(self, ledger, key, slot, reserved=0.0):
        if key[5] == self.lives[slot]:  # a router ignores notes on another incarnation
            ledger.open(
                key, slot, prefill_ms=50.0, tokens=500, decodes=True, tpot_ms=50.0, total_ms=500.0, now_ms=0.0,
                reserved_for_ms=reserved,
            )  # fmt: skip

    def send(self, router, number, slot, *, reserve):
        if number in self.requests:
            return
        key = self.key(number, slot)
        self.requests[number] = {"key": key, "slot": slot, "stage": "sent"}
        reserved = 500.0 if reserve else 0.0
        self.open(self.ledgers[router], key, slot, reserved)
        if reserve:
            self.open(self.ledgers[router], key, slot)
        self.notes.append((1 - router, key, slot))

    def pass_notes(self, *, twice):
        for router, key, slot in self.notes:
            for _ in range(1 + twice):
                self.open(self.ledgers[router], key, slot)
        self.notes.clear()

    def happen(self, number, stage, *, twice):
        request = self.requests.get(number)
        order = ["sent", "accepted", "prefilled", "ended"]
        if request is None or order.index(stage) != order.index(request["stage"]) + 1:
            return
        # The broker keeps order per publisher: who sent it said so before the worker took it.
        self.pass_notes(twice=False)
        request["stage"] = stage
        beat = self.beats[request["slot"]] + 1
        for ledger in self.ledgers:
            for _ in range(1 + twice):
                getattr(ledger, stage)(request["key"], beat)

    def cancel(self, number):
        request = self.requests.get(number)
        if request is not None and request["stage"] == "sent":
            self.pass_notes(twice=False)
            request["stage"] = "ended"
            for ledger in self.ledgers:
                ledger.ended(request["key"], 0)

    def beat(self, slot):
        self.beats[slot] += 1
        for ledger in self.ledgers:
            ledger.heard(slot, self.beats[slot])

    def die(self, slot):
        self.pass_notes(twice=False)
        self.lives[slot] += 1
        self.beats[slot] = 0
        for ledger in self.ledgers:
            ledger.fence(slot)
        for request in self.requests.values():
            if request["slot"] == slot:
                request["stage"] = "ended"

    def check(self):
        for ledger in self.ledgers:
            for slot in SLOTS:
                belief = ledger.belief(slot, WORD, 0.0)
                assert belief.queue_ms >= 0.0
                assert belief.batch >= 0.0
                assert belief.reserved_ms >= 0.0
                assert belief.context > 0.0
                assert belief.urgency > 0.0


moves = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), st.integers(0, 9), st.sampled_from(SLOTS), st.booleans()),
    st.tuples(st.just("notes"), st.booleans()),
    st.tuples(st.just("happen"), st.integers(0, 9), st.sampled_from(["accepted", "prefilled", "ended"]), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("beat"), st.sampled_from(SLOTS)),
    st.tuples(st.just("die"), st.sampled_from(SLOTS)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(moves, max_size=80))
def test_ledgers_of_two_routers_never_go_negative_and_are_empty_after_a_drain(history):
    fleet = Fleet()
    for move in history:
        what, arguments = move[0], move[1:]
        if what == "send":
            fleet.send(arguments[0], arguments[1], arguments[2], reserve=arguments[3])
        elif what == "notes":
            fleet.pass_notes(twice=arguments[0])
        elif what == "happen":
            fleet.happen(arguments[0], arguments[1], twice=arguments[2])
        elif what == "cancel":
            fleet.cancel(arguments[0])
        elif what == "beat":
            fleet.beat(arguments[0])
        else:
            fleet.die(arguments[0])
        fleet.check()
    for number in list(fleet.requests):
        for stage in ("accepted", "prefilled", "ended"):
            fleet.happen(number, stage, twice=False)
    fleet.pass_notes(twice=False)
    for slot in SLOTS:
        fleet.beat(slot)
        fleet.beat(slot)
    for ledger in fleet.ledgers:
        assert len(ledger) == 0
        for slot in SLOTS:
            belief = ledger.belief(slot, WORD, 0.0)
            assert (belief.queue_ms, belief.batch, belief.reserved_ms) == (0.0, 0.0, 0.0)
