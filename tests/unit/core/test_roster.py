"""Rosters: kept ones are what a fresh look at the fleet would find, whatever happened to it."""

import random

import fleets
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_core.plan import Reason
from quartet_core.roster import Rosters
from quartet_core.verdict import Verdict


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_kept_roster_is_what_a_fresh_look_would_find(seed):
    rng = random.Random(seed)
    workers = [
        fleets.facts(f"n{number}-0", rng.choice(("H100_SXM5", "L40S_PCIE")), adapters=rng.choice(((), ("adapter",))))
        for number in range(9)
    ]
    routing = fleets.routing([])
    kept = Rosters(routing.fleet)
    for beat in range(1, 60):
        number = rng.randrange(9)
        match rng.choice(("learn", "hear", "hear", "hear", "forget")):
            case "learn":
                workers[number].role = rng.choice(("both", "both", "prefill", "decode"))
                workers[number].cordoned = rng.random() < 0.2
                workers[number].incarnation = rng.choice((1, 1, 2))
                routing.learn(f"n{number}", [fleets.SimpleNamespace(**vars(workers[number]))], 0.0)
            case "hear":
                verdict = rng.choice((Verdict.UP, Verdict.UP, Verdict.SUSPECT, Verdict.DEAD))
                told = fleets.busy_word(rng)
                routing.hear("c", f"n{number}-0", workers[number].incarnation, told, beat, verdict, 0.0)
            case "forget":
                routing.forget_node(f"n{number}")
        routing.sweep()
        for model in (fleets.MODEL, "adapter", "nobody's"):
            assert kept.of(model) == Rosters(routing.fleet).of(model)


def test_a_model_that_is_announced_after_it_was_asked_for_is_known():
    routing = fleets.routing([])
    ask = fleets.ask(list(range(64)))
    assert routing.decide(ask).reason is Reason.UNKNOWN_MODEL
    routing.learn("n0", [fleets.facts("w0", "H100_SXM5")], 0.0)
    assert routing.decide(ask).plan is not None
