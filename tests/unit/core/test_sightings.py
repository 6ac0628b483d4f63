from hypothesis import given
from hypothesis import strategies as st

from quartet_core.sightings import Sightings
from quartet_core.verdict import Verdict

UP, DEAD = -Verdict.UP, -Verdict.DEAD


def test_the_word_that_names_the_higher_beat_wins_and_on_a_tie_the_more_alive():
    sightings = Sightings()
    assert sightings.best("n", {"a": (5, UP, 1), "b": (6, DEAD, 2)}) == (6, DEAD, 2)
    assert sightings.best("n", {"a": (6, UP, 1), "b": (6, DEAD, 2)}) == (6, UP, 1)


def test_a_collector_that_still_hears_a_quiet_node_outweighs_one_that_lost_sight_of_it():
    sightings = Sightings()
    words = {"hears": (5, UP, 1), "lost": (900, DEAD, 2)}
    assert sightings.best("n", words)[1] == DEAD
    sightings.note("hears", "n", 1_050)
    assert sightings.best("n", words) == (1_050, UP, 1)
    sightings.forget_collector("hears")
    assert sightings.best("n", words)[1] == DEAD


def test_a_stamp_says_nothing_of_other_nodes():
    sightings = Sightings()
    sightings.note("a", "other", 1_050)
    assert sightings.best("n", {"a": (5, UP, 1), "b": (900, DEAD, 2)})[1] == DEAD


def test_a_restarted_agents_stamps_start_over():
    sightings = Sightings()
    sightings.note("a", "n", 1_000_000)
    sightings.note("a", "n", 3)
    assert sightings.best("n", {"a": (2, UP, 1), "b": (9, DEAD, 2)})[1] == DEAD


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 100)), max_size=80))
def test_it_is_bounded_by_collectors_and_forgets_nodes(stamps):
    sightings = Sightings()
    for collector, node, sequence in stamps:
        sightings.note(f"c{collector}", f"n{node}", sequence)
    assert len(sightings._stamps) <= 16
    sightings.forget_node("n0")
    words = {f"c{number}": (0, DEAD, 0) for number in range(41)}
    assert sightings.best("n0", words)[0] == 0
