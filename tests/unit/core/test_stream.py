"""The receiving end of a stream keeps one whole try, or says why it cannot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.stream import MAX_ATTEMPTS, MAX_TRIES, Kind, Step, StreamReceiver

CONCLUDING = {Step.DONE, Step.REFUSED, Step.GAP, Step.LOST, Step.EXPIRED}


def test_a_stream_from_accepted_to_end_is_delivered_whole() -> None:
    receiver = StreamReceiver(0.0)
    steps = [
        receiver.hear(Kind.SIGN, 1, 1, None, 1.0),
        receiver.hear(Kind.SIGN, 1, 1, 0, 2.0),
        receiver.hear(Kind.CHUNK, 1, 1, 1, 3.0),
        receiver.hear(Kind.SIGN, 1, 1, 2, 4.0),
        receiver.hear(Kind.CHUNK, 1, 1, 3, 5.0),
        receiver.hear(Kind.END, 1, 1, 4, 6.0),
    ]
    assert steps == [Step.NOTHING, Step.NOTHING, Step.DELIVER, Step.NOTHING, Step.DELIVER, Step.DONE]
    assert receiver.take_cancels() == []


def test_an_answer_without_chunks_is_whole_at_its_end() -> None:
    receiver = StreamReceiver(0.0)
    receiver.hear(Kind.SIGN, 1, 1, 0, 1.0)
    assert receiver.hear(Kind.END, 1, 1, 1, 2.0) is Step.DONE


def test_silence_before_the_first_chunk_sends_again_at_most_three_times_in_all() -> None:
    receiver = StreamReceiver(0.0)
    assert receiver.due_ms == 2000.0
    assert receiver.tick(1999.0) is Step.NOTHING
    assert receiver.tick(2000.0) is Step.RESEND
    assert receiver.attempt == 2
    assert receiver.tick(3999.0) is Step.NOTHING
    assert receiver.tick(4000.0) is Step.RESEND
    assert receiver.tick(6000.0) is Step.LOST
    assert receiver.attempt == MAX_ATTEMPTS


def test_a_sign_of_life_from_any_try_puts_silence_off() -> None:
    receiver = StreamReceiver(0.0)
    receiver.hear(Kind.SIGN, 1, 1, None, 1500.0)
    assert receiver.tick(3000.0) is Step.NOTHING
    assert receiver.due_ms == 3500.0


def test_silence_after_the_first_chunk_is_a_lost_stream() -> None:
    receiver = StreamReceiver(0.0)
    receiver.hear(Kind.CHUNK, 1, 1, 0, 10.0)
    assert receiver.tick(2010.0) is Step.LOST
    assert receiver.tick(9999.0) is Step.NOTHING


def test_the_deadline_ends_the_request_even_while_it_lives() -> None:
    receiver = StreamReceiver(0.0, deadline_ms=2500.0)
    receiver.hear(Kind.SIGN, 1, 1, None, 2400.0)
    assert receiver.due_ms == 2500.0
    assert receiver.tick(2500.0) is Step.EXPIRED


def test_nothing_is_sent_again_after_the_deadline() -> None:
    receiver = StreamReceiver(0.0, deadline_ms=1000.0)
    assert receiver.tick(2000.0) is Step.EXPIRED
    assert receiver.attempt == 1


def test_the_first_try_with_a_chunk_is_kept_and_all_others_are_cancelled() -> None:
    receiver = StreamReceiver(0.0)
    receiver.hear(Kind.SIGN, 1, 1, 0, 1.0)
    receiver.tick(2001.0)
    receiver.hear(Kind.SIGN, 2, 1, 0, 2002.0)
    receiver.hear(Kind.SIGN, 2, 2, 0, 2003.0)
    assert receiver.hear(Kind.CHUNK, 2, 2, 1, 2004.0) is Step.DELIVER
    assert sorted(receiver.take_cancels()) == [(1, 0), (2, 1)]
    assert receiver.hear(Kind.CHUNK, 1, 1, 1, 2005.0) is Step.NOTHING
    assert receiver.hear(Kind.CHUNK, 1, 1, 2, 2006.0) is Step.NOTHING
    assert receiver.take_cancels() == [(1, 1)]
    assert receiver.hear(Kind.END, 2, 2, 2, 2007.0) is Step.DONE


def test_a_gap_in_the_kept_try_is_an_error() -> None:
    receiver = StreamReceiver(0.0)
    receiver.hear(Kind.CHUNK, 1, 1, 0, 1.0)
    assert receiver.hear(Kind.CHUNK, 1, 1, 2, 2.0) is Step.GAP


def test_a_gap_before_the_first_chunk_gives_up_that_try_and_sends_again() -> None:
    receiver = StreamReceiver(0.0)
    assert receiver.hear(Kind.CHUNK, 1, 1, 1, 5.0) is Step.RESEND
    assert receiver.take_cancels() == [(1, 1)]
    assert receiver.hear(Kind.CHUNK, 1, 1, 2, 6.0) is Step.NOTHING
    assert receiver.hear(Kind.CHUNK, 2, 1, 0, 7.0) is Step.DELIVER


def test_repeated_frames_are_not_delivered_twice() -> None:
    receiver = StreamReceiver(0.0)
    assert receiver.hear(Kind.CHUNK, 1, 1, 0, 1.0) is Step.DELIVER
    assert receiver.hear(Kind.CHUNK, 1, 1, 0, 1.0) is Step.NOTHING


def test_an_error_of_the_newest_attempt_ends_the_request() -> None:
    receiver = StreamReceiver(0.0)
    assert receiver.hear(Kind.ERROR, 1, 1, None, 1.0) is Step.REFUSED


def test_an_error_of_an_older_attempt_or_try_is_not_the_last_word() -> None:
    receiver = StreamReceiver(0.0)
    receiver.tick(2000.0)
    assert receiver.hear(Kind.ERROR, 1, 1, None, 2001.0) is Step.NOTHING
    receiver.hear(Kind.SIGN, 2, 2, 0, 2002.0)
    assert receiver.hear(Kind.ERROR, 2, 1, 1, 2003.0) is Step.NOTHING
    assert receiver.hear(Kind.ERROR, 2, 2, 1, 2004.0) is Step.REFUSED


@pytest.mark.parametrize("attempt", [0, 2, 7])
def test_frames_of_attempts_that_were_never_sent_are_ignored(attempt: int) -> None:
    receiver = StreamReceiver(0.0)
    assert receiver.hear(Kind.CHUNK, attempt, 1, 0, 1.0) is Step.NOTHING
    assert receiver.kept is None


def test_the_number_of_tries_followed_is_bounded() -> None:
    receiver = StreamReceiver(0.0)
    for try_ in range(1, 1000):
        receiver.hear(Kind.SIGN, 1, try_, None, 1.0)
    assert receiver.hear(Kind.CHUNK, 1, 999, 0, 2.0) is Step.NOTHING
    assert receiver.hear(Kind.CHUNK, 1, MAX_TRIES, 0, 2.0) is Step.DELIVER
    assert len(receiver.take_cancels()) == MAX_TRIES - 1


frames = st.tuples(
    st.sampled_from(list(Kind)), st.integers(0, 4), st.integers(0, 3), st.none() | st.integers(0, 5), st.floats(0, 900)
)


@given(st.lists(st.one_of(frames, st.floats(0, 2500))), st.none() | st.floats(0, 9000))
def test_whatever_comes_one_try_is_delivered_in_order_and_the_end_is_told_once(
    events: list[tuple[Kind, int, int, int | None, float] | float], deadline_ms: float | None
) -> None:
    receiver = StreamReceiver(0.0, deadline_ms=deadline_ms)
    now_ms = 0.0
    delivered: list[tuple[int, int, int | None]] = []
    concluded = []
    resends = 0
    for event in events:
        if isinstance(event, float):
            now_ms += event
            step = receiver.tick(now_ms)
        else:
            kind, attempt, try_, seq, later_ms = event
            now_ms += later_ms
            step = receiver.hear(kind, attempt, try_, seq, now_ms)
            if step is Step.DELIVER:
                delivered.append((attempt, try_, seq))
        assert not concluded or step is Step.NOTHING
        if step in CONCLUDING:
            concluded.append(step)
        resends += step is Step.RESEND
        if step is not Step.NOTHING and receiver.kept is not None:
            assert step is not Step.RESEND
    assert len({(attempt, try_) for attempt, try_, _ in delivered}) <= 1
    numbered = [seq for _, _, seq in delivered if seq is not None]
    assert numbered == sorted(set(numbered))
    assert receiver.attempt == 1 + resends <= MAX_ATTEMPTS
    assert bool(concluded) is receiver.over


@given(st.data())
def test_several_tries_at_once_end_in_one_whole_answer_or_an_error(data: st.DataObject) -> None:
    tries = [(1, 1), (1, 2), (2, 1)]
    receiver = StreamReceiver(0.0)
    receiver.tick(2000.0)
    chunks = {key: data.draw(st.integers(0, 4), label=f"chunks of {key}") for key in tries}
    lost = data.draw(st.sets(st.tuples(st.sampled_from(tries), st.integers(0, 5)), max_size=3), label="lost frames")
    queues = {key: [Kind.SIGN, *[Kind.CHUNK] * count, Kind.END] for key, count in chunks.items()}
    heard: list[int] = []
    whole = None
    sent = dict.fromkeys(tries, 0)
    while any(queues.values()):
        key = data.draw(st.sampled_from([key for key in tries if queues[key]]))
        kind = queues[key].pop(0)
        seq = sent[key]
        sent[key] += 1
        if (key, seq) in lost:
            continue
        step = receiver.hear(kind, *key, seq, 2001.0)
        if step is Step.DELIVER:
            heard.append(seq)
        elif step is Step.DONE:
            whole = key
    if whole is not None:
        assert heard == list(range(1, chunks[whole] + 1))
    assert heard == list(range(1, len(heard) + 1))


def test_a_router_that_stops_makes_the_request_go_out_again_at_once() -> None:
    receiver = StreamReceiver(0.0)
    assert receiver.hear(Kind.STOPPING, 1, 0, None, 5.0) is Step.RESEND
    assert receiver.hear(Kind.STOPPING, 1, 0, None, 6.0) is Step.NOTHING  # of an attempt that was replaced
    assert receiver.hear(Kind.STOPPING, 2, 0, None, 7.0) is Step.RESEND
    assert receiver.hear(Kind.STOPPING, 3, 0, None, 8.0) is Step.REFUSED
    assert receiver.attempt == MAX_ATTEMPTS


def test_a_router_that_stops_after_the_deadline_or_in_mid_answer_is_not_followed_by_another() -> None:
    late, begun = StreamReceiver(0.0, deadline_ms=10.0), StreamReceiver(0.0)
    assert late.hear(Kind.STOPPING, 1, 0, None, 10.0) is Step.EXPIRED
    begun.hear(Kind.CHUNK, 1, 1, 0, 1.0)
    assert begun.hear(Kind.STOPPING, 1, 1, None, 2.0) is Step.REFUSED


@given(st.lists(st.one_of(frames, st.floats(0, 2500))))
def test_the_short_way_for_the_chunk_that_is_due_is_the_long_way(
    events: list[tuple[Kind, int, int, int | None, float] | float],
) -> None:
    short, long = StreamReceiver(0.0), StreamReceiver(0.0)
    now_ms = 0.0
    for event in events:
        if isinstance(event, float):
            now_ms += event
            assert short.tick(now_ms) is long.tick(now_ms)
            continue
        kind, attempt, try_, seq, later_ms = event
        now_ms += later_ms
        if kind is Kind.CHUNK and seq is not None and short.next_chunk(attempt, try_, seq, now_ms):
            step = Step.DELIVER
        else:
            step = short.hear(kind, attempt, try_, seq, now_ms)
        assert step is long.hear(kind, attempt, try_, seq, now_ms)
        assert (short.over, short.kept, short.due_ms) == (long.over, long.kept, long.due_ms)
        assert short.take_cancels() == long.take_cancels()
