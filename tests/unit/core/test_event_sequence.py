"""The order of KV events, against a publisher that keeps little, over a line that loses much."""

from hypothesis import given
from hypothesis import strategies as st

from quartet_core.event_sequence import Apply, EventSequence, Replay, Reset


class Publisher:
    """Says batches, keeps the last ``kept``, and may begin anew. Each payload is (life, number)."""

    def __init__(self, kept):
        self.kept, self.life, self.said = kept, 0, []

    def say(self):
        self.said.append(b"%d/%d" % (self.life, len(self.said)))
        return len(self.said) - 1, self.said[-1]

    def again(self):
        self.life, self.said = self.life + 1, []

    def replay(self, start):
        first = max(start, len(self.said) - self.kept, 0)
        return list(enumerate(self.said))[first:]


class Listener:
    """Applies what the sequence says, and answers its replays at once or never."""

    def __init__(self, publisher, *, replays=True):
        self.publisher, self.sequence = publisher, EventSequence(replays=replays)
        self.known = []

    def do(self, steps, *, answers=True):
        for step in steps:
            match step:
                case Apply(payload):
                    self.known.append(payload)
                case Reset():
                    self.known.clear()
                case Replay(start):
                    for number, payload in self.publisher.replay(start) if answers else ():
                        self.do(self.sequence.replayed(number, payload))
                    self.do(self.sequence.replay_ended())


actions = st.lists(st.sampled_from(["say", "say", "say", "lose", "again", "deaf"]), max_size=60)


@given(actions, st.integers(0, 8), st.booleans())
def test_what_is_known_is_always_the_newest_unbroken_part_of_what_was_said(history, kept, replays):
    publisher = Publisher(kept)
    listener = Listener(publisher, replays=replays)
    listener.do(listener.sequence.connected())
    heard_this_life = False
    for action in history:
        if action == "again":
            publisher.again()
            heard_this_life = False
            continue
        number, payload = publisher.say()
        if action == "lose":
            continue
        listener.do(listener.sequence.live(number, payload), answers=action != "deaf")
        heard_this_life = True
        # A publisher that began anew and has come as far as the old one cannot be told from it by numbers: the engine's
        # new life is told by its own start time. Everything else must be seen here.
        if any(not known.startswith(b"%d/" % publisher.life) for known in listener.known):
            return
        assert heard_this_life
        length = len(listener.known)
        assert listener.known == publisher.said[len(publisher.said) - length :]
        assert length >= 1


def test_a_hole_is_mended_by_a_replay_without_a_reset():
    publisher = Publisher(100)
    listener = Listener(publisher)
    listener.do(listener.sequence.connected())
    for lost in (False, True, True, False, False):
        number, payload = publisher.say()
        if not lost:
            listener.do(listener.sequence.live(number, payload))
    assert listener.known == publisher.said
    assert (listener.sequence.gaps, listener.sequence.resets) == (1, 0)


def test_a_hole_that_cannot_be_mended_voids_all_before_it():
    publisher = Publisher(1)
    listener = Listener(publisher)
    listener.do(listener.sequence.connected())
    for lost in (False, False, True, True, False):
        number, payload = publisher.say()
        if not lost:
            listener.do(listener.sequence.live(number, payload))
    assert listener.known == publisher.said[-1:]
    assert listener.sequence.resets == 1


def test_batches_that_come_while_a_replay_is_answered_are_applied_behind_it():
    sequence = EventSequence()
    assert sequence.connected() == [Replay(0)]
    assert sequence.live(2, b"2") == []
    assert sequence.replayed(0, b"0") == [Apply(b"0")]
    assert sequence.replayed(1, b"1") == [Apply(b"1")]
    assert sequence.live(3, b"3") == []
    assert sequence.replayed(2, b"2") == [Apply(b"2")]
    assert sequence.replay_ended() == [Apply(b"3")]
    assert sequence.live(4, b"4") == [Apply(b"4")]


def test_waiting_batches_are_bounded():
    sequence = EventSequence(max_waiting=3)
    sequence.connected()
    for number in range(5, 8):
        assert sequence.live(number, b"") == []
    assert len(sequence.live(8, b"")) == 4
    assert not sequence.replaying
