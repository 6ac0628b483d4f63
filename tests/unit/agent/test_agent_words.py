"""What the beats say, and when: words, events' beats, affinity, resident models."""

import asyncio
from array import array

from quartet_bus import subjects
from quartet_bus.messages import Phase, PrefetchCommand, PrefetchVerb
from quartet_core import word
from quartet_core.affinity import AffinityTable
from quartet_core.heartbeat import node_hash
from quartet_core.ladder import sketch_tokens
from quartet_core.openai import parse
from quartet_sim.tokens import prompt_ids


def test_every_event_names_the_first_beat_that_includes_it(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"), beat_s=0.0005)
        await asyncio.sleep(0.1)
        for name in "abc":
            stage.run(agent, body_of(f"{name} story " * 2000, max_tokens=20), id=name)
            await asyncio.sleep(1)
        return stage.heard

    heard = on_stage(play)
    batch = {beat.sequence: word.BATCH.of(beat.workers[0].word) for beat in heard.beats if beat.workers}
    told = [(e.phase, batch[e.beat - 1], batch[e.beat]) for e in heard.events if e.phase is not Phase.ACCEPTED]
    assert told == [(Phase.FIRST_TOKEN, 0, 1), (Phase.END, 1, 0)] * 3


def test_accepted_work_is_in_the_word_of_its_beat(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        await asyncio.sleep(0.1)
        stage.run(agent, body_of("x" * 200_000, max_tokens=2), predicted_prefill_ms=2000.0)
        await asyncio.sleep(0.1)
        return stage.heard

    heard = on_stage(play)
    accepted = heard.events[0]
    said = {beat.sequence: beat.workers[0].word for beat in heard.beats if beat.workers}
    assert word.queue_ms(word.QUEUE.of(said[accepted.beat])) > 500
    assert word.QUEUE.of(said[accepted.beat - 1]) == 0


def test_beats_name_node_incarnations_and_epoch(on_stage, config_of, engine_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1", engine_of(count=2), engine_of("L40S_PCIE")))
        await asyncio.sleep(0.1)
        return stage.heard, agent

    heard, agent = on_stage(play)
    beat, [inventory] = heard.beats[-1], heard.inventories
    assert (beat.node, beat.incarnation) == (node_hash("n1"), agent.incarnation)
    assert [(w.ordinal, w.incarnation) for w in beat.workers] == [(w.ordinal, w.incarnation) for w in inventory.workers]
    assert [w.id for w in inventory.workers] == ["n1-0", "n1-1", "n1-2"]
    assert [w.gpus for w in inventory.workers[:2]] == [(0,), (1,)]
    assert all(word.ACCEPTING.of(w.word) and word.free_kv_fraction(word.FREE_KV.of(w.word)) == 1 for w in beat.workers)
    assert all(word.epoch_of(w.word) == inventory.epoch for w in beat.workers)
    assert [b.sequence for b in heard.beats] == list(range(1, len(heard.beats) + 1))
    assert {(link.kind, link.peer) for link in inventory.links} == {("TCP", ""), ("NVLINK", "n1"), ("PCIE_P2P", "n1")}
    assert inventory.kv_address == "n1"
    assert inventory.resident == ("chat",)


def test_inventories_are_repeated_without_a_new_epoch(on_stage, config_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        await asyncio.sleep(6.5)
        await stage.control(agent, "inventory")
        await asyncio.sleep(0.1)
        return stage.heard.inventories

    inventories = on_stage(play)
    assert len(inventories) == 5
    assert {inventory.epoch for inventory in inventories} == {1}


def test_a_cached_prefix_shows_in_affinity_within_moments_and_a_full_set_says_the_same(on_stage, config_of, body_of):
    body = body_of("once upon a time there was a ladder " * 200, max_tokens=2)

    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        stage.run(agent, body)
        await asyncio.sleep(2)
        steps = list(stage.heard.affinity)
        await stage.control(agent, "affinity")
        await asyncio.sleep(0.1)
        return steps, stage.heard.affinity[-1]

    steps, full = on_stage(play)
    assert steps[0].full
    assert [update.number for update in (*steps, full)] == list(range(1, len(steps) + 2))
    rows: set[int] = set()
    for update in steps:
        rows |= set(array("I", update.on))
        rows -= set(array("I", update.off))
    assert full.full
    assert rows == set(array("I", full.on))
    table = AffinityTable(full.rows, full.hashes)
    table.replace(0, array("I", full.on))
    sketch = sketch_tokens(prompt_ids(parse(body)))
    assert len(sketch.rungs) > 10
    assert table.deepest(sketch, 1) == [(len(sketch.rungs) - 1, 1)]


def test_a_second_turn_finds_its_prefix_cached(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))
        for name in "ab":
            stage.run(agent, body_of("the same long story " * 400, max_tokens=2), id=name)
            await asyncio.sleep(2)
        return [e.cached_tokens for e in stage.heard.events if e.phase is Phase.END]

    first, second = on_stage(play)
    assert first == 0
    assert second > 1900


def test_prefetched_models_become_resident_after_their_bytes_are_read(on_stage, config_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1"))

        def ask(verb, model):
            command = PrefetchCommand(verb, model, "H100_SXM5", 16_000_000_000, 30_000.0, 0.9)
            stage.publish(subjects.prefetch("n1"), command)

        ask(PrefetchVerb.LOAD, "m1")
        ask(PrefetchVerb.LOAD, "m2")
        ask(PrefetchVerb.LOAD, "m1")
        await asyncio.sleep(7.9)
        early = agent.resident.models
        await asyncio.sleep(8.2)
        both = agent.resident.models
        ask(PrefetchVerb.RELEASE, "m1")
        ask(PrefetchVerb.RELEASE, "chat")  # an engine runs on it
        await asyncio.sleep(0.1)
        return early, both, agent.resident.models, stage.heard.inventories

    early, both, after, inventories = on_stage(play)
    assert early == ("chat",)
    assert both == ("chat", "m1", "m2")
    assert after == ("chat", "m2")
    assert inventories[-1].resident == after
    assert inventories[-1].epoch == 4


def test_a_slow_engine_says_so(on_stage, config_of, engine_of, body_of):
    async def play(stage):
        await stage.agent(config_of("n1", engine_of(time_scale=2.3)))
        await asyncio.sleep(0.1)
        return stage.heard.beats[-1].workers[0].word

    assert word.drift_ratio(word.DRIFT.of(on_stage(play))) == 2.3
