"""A simulated engine serves as a real one does: in iterations, from a paged cache, one token for each that runs."""

from array import array
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quartet_core.ladder import covered_tokens, sketch_tokens
from quartet_core.openai import Refused
from quartet_sim.engine import Finished, FirstToken, Job, Preempted, Prefilled, Token


def prompt(tokens, seed=0):
    random = Random(seed)
    return array("I", [random.randrange(128_000) for _ in range(tokens)])


def test_one_request_takes_its_prefill_and_one_step_for_each_further_token(drive, profile):
    run = drive()
    run.engine.submit(Job("a", prompt(1000), max_tokens=3), 0.0)
    run.run()
    first, _, _, _, end = run.of("a")
    assert first == FirstToken("a", 0, 0.0, pytest.approx(profile.prefill_ms(0, 1000)))
    assert end == Finished("a", "length", 0, 3, 0, pytest.approx(run.now_ms))
    steps = profile.step_ms_at(1, 1001) + profile.step_ms_at(1, 1002)
    assert run.now_ms == pytest.approx(profile.prefill_ms(0, 1000) + steps)
    assert run.engine.steps == 3
    assert run.engine.busy_ms == pytest.approx(run.now_ms)


def test_same_calls_same_events(drive):
    def history():
        run = drive(kv_tokens=4096, chunk_tokens=256, max_batch=8)
        random = Random(7)
        for number in range(60):
            job = Job(f"j{number}", prompt(random.randrange(1, 900), number % 9), max_tokens=random.randrange(1, 60))
            run.engine.submit(job, run.now_ms)
            if random.random() < 0.2:
                run.engine.cancel(f"j{random.randrange(number + 1)}")
            for _ in range(random.randrange(4)):
                run.step()
        run.run()
        return run.events, run.engine.drain_rungs()

    assert history() == history()


def test_a_cached_prefix_shortens_time_to_first_token_as_the_profile_predicts(drive, profile):
    run = drive()
    run.engine.submit(Job("cold", prompt(2000), max_tokens=1), 0.0)
    run.run()
    start = run.now_ms
    warm = prompt(2000)[:1600] + prompt(400, seed=1)
    run.engine.submit(Job("warm", warm, max_tokens=1), start)
    assert run.engine.queued_prefill_ms() == pytest.approx(profile.prefill_ms(1600, 400))
    run.run()
    first = run.one("warm", FirstToken)
    assert first.cached_tokens == 1600
    assert first.ttft_ms == pytest.approx(profile.prefill_ms(1600, 400))
    assert first.ttft_ms < 0.4 * run.one("cold", FirstToken).ttft_ms


@pytest.mark.parametrize(("tokens", "cached"), [(1600, 1584), (1601, 1600), (15, 0), (16, 0), (17, 16)])
def test_whole_blocks_hit_and_one_token_is_always_computed(drive, tokens, cached):
    run = drive()
    for name in ("first", "again"):
        run.engine.submit(Job(name, prompt(tokens), max_tokens=1), 0.0)
        run.run()
    assert run.one("again", FirstToken).cached_tokens == cached


def test_generated_tokens_are_cached_behind_their_prompt(drive):
    run = drive()
    run.engine.submit(Job("a", prompt(100), max_tokens=61), 0.0)
    run.run()
    # 160 tokens have KV: the last token said was never fed back
    said = array("I", [token.token_id for token in run.of("a", Token)])
    run.engine.submit(Job("b", prompt(100) + said + prompt(5, seed=2), max_tokens=1), run.now_ms)
    run.run()
    assert run.one("b", FirstToken).cached_tokens == 160


def test_other_salts_share_nothing_but_the_answer(drive):
    run = drive()
    for name, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        run.engine.submit(Job(name, prompt(320), max_tokens=9, salt=salt), run.now_ms)
        run.run()
    assert [run.one(name, FirstToken).cached_tokens for name in "abc"] == [0, 0, 304]
    assert run.text("a") == run.text("b") == run.text("c")


def test_a_long_prompt_slows_the_tokens_of_those_who_run(drive, profile):
    run = drive(chunk_tokens=512)
    run.engine.submit(Job("talker", prompt(64), max_tokens=30), 0.0)
    for _ in range(5):
        run.step()
    run.engine.submit(Job("long", prompt(2000, seed=1), max_tokens=1), run.now_ms)
    run.run()
    stamps = [at for at, event in run.events if isinstance(event, Token) and event.job_id == "talker"]
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    alone, shared = gaps[0], gaps[4]
    assert alone == pytest.approx(profile.step_ms_at(1, 65))
    assert shared == pytest.approx(profile.iteration_ms(511, 0, 1, 69))
    # 2,000 tokens beside one decode are four chunks of 511 or less
    assert [gap > 1.5 * alone for gap in gaps] == [4 <= i < 8 for i in range(29)]


def test_prompts_share_an_iteration_first_come_first_served(drive, profile):
    run = drive(chunk_tokens=1000)
    for name in "abc":
        run.engine.submit(Job(name, prompt(600, seed=ord(name)), max_tokens=1), 0.0)
    run.run()
    ttft = [run.one(name, FirstToken).ttft_ms for name in "abc"]
    assert ttft[0] < ttft[1] == ttft[2]  # 600 + 400, then 200 + 600
    assert run.engine.steps == 2
    # chunks of several prompts cost what their tokens and their own attention cost, and the weights once
    attention = profile.c_ms_per_token2 * (600**2 + 400**2)
    assert ttft[0] == pytest.approx(profile.a_ms + 1000 * profile.b_ms_per_token + attention, rel=1e-4)


def test_the_backlog_is_known_after_every_event_and_ends_at_nothing(drive, profile):
    run = drive(chunk_tokens=512)
    engine = run.engine
    engine.submit(Job("a", prompt(1000), max_tokens=2), 0.0)
    engine.submit(Job("b", prompt(300, seed=1), max_tokens=2), 0.0)
    linear = 1300 * profile.b_ms_per_token + profile.c_ms_per_token2 * (1000**2 + 300**2)
    assert engine.queued_prefill_ms() == pytest.approx(3 * profile.a_ms + linear)
    assert (engine.waiting, engine.prefilling, engine.running) == (2, 0, 0)
    run.step()
    assert engine.queued_prefill_tokens == 788
    assert (engine.waiting, engine.prefilling, engine.running) == (1, 1, 0)
    engine.cancel("b")
    assert engine.queued_prefill_tokens == 488
    run.run()
    assert engine.queued_prefill_ms() == 0.0


def test_too_little_kv_preempts_the_youngest_and_everybody_still_gets_the_same_answer(drive):
    roomy, tight = drive(), drive(kv_tokens=640, chunk_tokens=256)
    for run in (roomy, tight):
        for name in "abcd":
            run.engine.submit(Job(name, prompt(140, seed=ord(name)), max_tokens=200), 0.0)
        run.run()
    assert not [event for _, event in roomy.events if isinstance(event, Preempted)]
    preempted = [event.job_id for _, event in tight.events if isinstance(event, Preempted)]
    assert preempted
    assert "a" not in preempted
    for name in "abcd":
        assert tight.text(name) == roomy.text(name)
        assert tight.one(name, FirstToken).cached_tokens == 0
        assert len(tight.of(name, FirstToken)) == 1
    assert tight.engine.pool.blocks.census().referenced == 0
    assert tight.engine.queued_prefill_ms() == 0.0


def test_a_preempted_job_goes_on_before_those_who_came_after_it(drive):
    run = drive(kv_tokens=640, chunk_tokens=256)
    for name in "ab":
        run.engine.submit(Job(name, prompt(290, seed=ord(name)), max_tokens=60), 0.0)
    for name in "cd":
        run.engine.submit(Job(name, prompt(200, seed=ord(name)), max_tokens=5), 0.0)
    run.run()
    assert [event.job_id for _, event in run.events if isinstance(event, Preempted)] == ["b"]
    assert [event.job_id for _, event in run.events if isinstance(event, FirstToken)] == ["a", "b", "c", "d"]
    told = [event for _, event in run.events]
    after = told[told.index(run.one("a", Finished)) + 1 :]
    assert next(event.job_id for event in after if isinstance(event, Token)) == "b"
    assert run.one("c", FirstToken) in after  # though c would have fitted into what b left


def test_who_has_left_costs_nothing_any_more(drive, profile):
    run = drive()
    run.engine.submit(Job("short", prompt(3000), max_tokens=2), 0.0)
    run.engine.submit(Job("gone", prompt(500, seed=1), max_tokens=90), 0.0)
    run.engine.submit(Job("long", prompt(100, seed=2), max_tokens=20), 0.0)
    for _ in range(5):
        run.step()
    run.engine.cancel("gone")
    before, said = run.now_ms, len(run.of("long", Token))
    assert run.engine.running == 1
    run.step()
    assert run.now_ms - before == pytest.approx(profile.step_ms_at(1, 100 + said))


def test_a_prompt_waits_until_its_blocks_fit(drive):
    run = drive(kv_tokens=1600)
    run.engine.submit(Job("a", prompt(1000), max_tokens=40), 0.0)
    run.engine.submit(Job("b", prompt(1000, seed=1), max_tokens=1), 0.0)
    run.step()
    assert run.engine.waiting == 1
    run.run()
    ended = next(at for at, event in run.events if event.job_id == "a" and isinstance(event, Finished))
    assert run.one("b", FirstToken).queue_ms == pytest.approx(ended)
    order = [event.job_id for _, event in run.events if isinstance(event, Finished)]
    assert order == ["a", "b"]


def test_a_wait_is_never_negative_when_an_iteration_is_dated_before_the_job_came(drive):
    run = drive()
    run.engine.submit(Job("a", prompt(100), max_tokens=1), 5.0)
    run.now_ms = 1.0
    run.run()
    assert run.one("a", FirstToken).queue_ms == 0.0


def test_the_batch_has_a_limit(drive):
    run = drive(max_batch=2)
    for name in "abc":
        run.engine.submit(Job(name, prompt(20, seed=ord(name)), max_tokens=5), 0.0)
    most = 0
    while run.step():
        most = max(most, run.engine.running)
    assert most == 2
    assert len([event for _, event in run.events if isinstance(event, Finished)]) == 3


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_job_cancelled_between_iterations_leaves_at_once(drive, steps_before):
    run = drive(chunk_tokens=512)
    run.engine.submit(Job("a", prompt(900), max_tokens=50), 0.0)
    for _ in range(steps_before):
        run.step()
    assert run.engine.cancel("a")
    assert not run.engine.cancel("a")
    assert run.engine.pool.blocks.census().referenced == 0
    assert run.engine.queued_prefill_ms() == 0.0
    assert not run.step()


@pytest.mark.parametrize("steps_before", [0, 1, 4])
def test_a_job_cancelled_in_its_iteration_leaves_at_its_end_without_a_word(drive, steps_before):
    run = drive(chunk_tokens=512)
    run.engine.submit(Job("a", prompt(900), max_tokens=50), 0.0)
    run.engine.submit(Job("b", prompt(50, seed=1), max_tokens=6), 0.0)
    for _ in range(steps_before):
        run.step()
    said = len(run.of("a"))
    duration = run.engine.begin(run.now_ms)
    assert run.engine.cancel("a")
    assert run.engine.pool.blocks.census().referenced > 0
    run.now_ms += duration
    run.events += [(run.now_ms, event) for event in run.engine.finish(run.now_ms)]
    run.run()
    assert len(run.of("a")) == said
    assert run.one("b", Finished).output_tokens == 6
    assert run.engine.pool.blocks.census().referenced == 0
    assert run.engine.queued_prefill_ms() == 0.0


def test_gpu_time_of_all_jobs_is_the_busy_time(drive):
    run = drive(kv_tokens=4000, chunk_tokens=300)
    for number in range(30):
        run.engine.submit(Job(str(number), prompt(50 + 31 * number, number), max_tokens=1 + 3 * number), run.now_ms)
        run.step()
    live = sum(run.engine.gpu_ms(str(number)) for number in range(30))
    ended = sum(event.gpu_ms for _, event in run.events if isinstance(event, Finished))
    assert live + ended == pytest.approx(run.engine.busy_ms)
    run.run()
    ended = sum(event.gpu_ms for _, event in run.events if isinstance(event, Finished))
    assert ended == pytest.approx(run.engine.busy_ms) == pytest.approx(run.now_ms)
    assert 0 < run.engine.prefill_busy_ms < run.engine.busy_ms
    assert run.engine.gpu_ms("7") == 0.0


def test_a_throttled_engine_takes_longer_by_its_scale(drive):
    quick, slow = drive(), drive(time_scale=2.5)
    for run in (quick, slow):
        run.engine.submit(Job("a", prompt(700), max_tokens=20), 0.0)
        run.run()
    assert slow.now_ms == pytest.approx(2.5 * quick.now_ms)


def test_rungs_turn_on_as_blocks_are_cached_and_off_as_they_are_evicted(drive):
    run = drive(kv_tokens=2048)
    ids = prompt(700)
    run.engine.submit(Job("a", ids, max_tokens=200, sketch=sketch_tokens(ids)), 0.0)
    run.run()
    said = array("I", [token.token_id for token in run.of("a", Token)])
    on, off = run.engine.drain_rungs()
    expected = sketch_tokens(ids + said[:-1]).rungs
    assert covered_tokens(len(expected) - 1) > 700  # the answer's own tokens reach rungs too
    assert on == list(expected)
    assert off == []
    run.engine.submit(Job("b", prompt(1900, seed=1), max_tokens=10), run.now_ms)
    run.run()
    _, off = run.engine.drain_rungs()
    assert off == list(reversed(expected))[: len(off)]  # deepest first: who holds a rung holds the shallower ones
    assert len(off) > 5
    run.engine.pool.blocks.evict(1000)
    assert set(run.engine.drain_rungs()[1]) > set(expected[: len(expected) - len(off)])


def test_a_rung_is_told_once_however_often_it_is_computed(drive):
    run = drive()
    for name in "ab":
        run.engine.submit(Job(name, prompt(640), max_tokens=1), 0.0)  # both at once: neither hits
    run.run()
    assert run.one("b", FirstToken).cached_tokens == 0
    on, _ = run.engine.drain_rungs()
    assert on == list(sketch_tokens(prompt(640)).rungs)
    assert run.engine.pool.blocks.census().idle == 40


def test_without_a_limit_of_the_client_the_model_ends_by_itself(drive):
    run = drive()
    for number in range(40):
        run.engine.submit(Job(str(number), prompt(30, number), max_tokens=2000, may_stop=True), 0.0)
    run.run()
    ends = [event for _, event in run.events if isinstance(event, Finished)]
    assert {event.reason for event in ends} == {"stop"}
    assert 80 < sum(event.output_tokens for event in ends) / 40 < 400


def test_a_prefill_job_ends_pinned_and_survives_pressure(drive):
    run = drive(kv_tokens=1024)
    run.engine.submit(Job("p", prompt(500), max_tokens=10, kind="prefill", transfer="t"), 0.0)
    run.run()
    assert run.one("p", Prefilled).gpu_ms == pytest.approx(run.now_ms)
    assert run.of("p") == [run.one("p", Prefilled)]
    before = list(run.engine.pool.export("t"))
    run.engine.submit(Job("b", prompt(450, seed=1), max_tokens=50), run.now_ms)
    run.run()
    assert list(run.engine.pool.export("t")) == before
    assert run.engine.pool.release("t")
    assert run.engine.pool.blocks.census().referenced == 0


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (Job("a", array("I"), max_tokens=1), None),
        (Job("a", prompt(100), max_tokens=0), None),
        (Job("a", prompt(1000), max_tokens=101), "context_length_exceeded"),
        (Job("a", prompt(700), max_tokens=101), "context_length_exceeded"),
    ],
)
def test_what_can_never_run_is_refused(drive, job, code):
    run = drive(max_context=1100, kv_tokens=800 if len(job.tokens) == 700 else 64_000)
    with pytest.raises(Refused) as refused:
        run.engine.submit(job, 0.0)
    assert refused.value.status == 400
    assert refused.value.body.code == code
    assert run.engine.waiting == 0


def test_misuse_is_told(drive):
    run = drive()
    with pytest.raises(RuntimeError):
        run.engine.finish(0.0)
    run.engine.submit(Job("a", prompt(10), max_tokens=2), 0.0)
    with pytest.raises(ValueError, match="here already"):
        run.engine.submit(Job("a", prompt(10), max_tokens=2), 0.0)
    run.engine.begin(0.0)
    with pytest.raises(RuntimeError):
        run.engine.begin(0.0)
    with pytest.raises(ValueError, match="max_batch"):
        drive(max_batch=300, chunk_tokens=256)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(30, 60),
    st.integers(16, 200),
)
def test_whatever_comes_is_answered_and_nothing_is_left_behind(drive, jobs, kv_blocks, chunk_tokens):
    run = drive(kv_tokens=kv_blocks * 16, chunk_tokens=chunk_tokens, max_batch=16)
    for number, (tokens, seed, most) in enumerate(jobs):
        run.engine.submit(Job(str(number), prompt(400, seed)[:tokens], max_tokens=most), run.now_ms)
        run.step()
    run.run()
    for number, (_, _, most) in enumerate(jobs):
        assert run.one(str(number), Finished).output_tokens == most
        assert len(run.text(str(number))) == 4 * most
    assert run.engine.pool.blocks.census().referenced == 0
    assert (run.engine.waiting, run.engine.prefilling, run.engine.running) == (0, 0, 0)
    assert run.engine.free_kv_fraction == 1.0
