"""What an agent does with pages: pins and sends them, keeps those that come, drops those that are elsewhere."""

import asyncio
import json

import msgspec

from quartet_bus import subjects
from quartet_bus.config.schema import EngineSection, KvSection
from quartet_bus.messages import KvPressure, KvVerb, PageManifest, TransferReason

PROMPT = "a conversation about lanes and rungs, " * 1200
KV = KvSection(pool=True, page_low=0.9, page_high=0.95, page_min_tokens=512)
ENGINE = EngineSection("simulated", "chat", "H100_SXM5", kv_tokens=16_000)
ROOM = 1000  # blocks


def paging(config, **more):
    config.kv = msgspec.structs.replace(KV, **more)
    return config


class Pair:
    """An agent that has a conversation in its cache, another one, and what both said of their KV."""

    def __init__(self, stage, source, target):
        self.stage, self.source, self.target = stage, source, target
        self.told = []

    async def listen(self):
        decode = msgspec.msgpack.Decoder(KvPressure).decode
        await self.stage.bus.subscribe(subjects.kv_pressure().subject, lambda m: self.told.append(decode(m.data)))

    def state(self, agent):
        told = [message for message in self.told if message.node == agent.instance][-1]
        return told.pools[0]

    def fill(self, agent):
        return next(iter(agent.workers.values())).adapter.pages.fill()

    async def page(self, prefix, **fields):
        return await self.stage.kv(self.source, KvVerb.PAGE, prefix=prefix, **fields)

    async def reserve(self, pinned, **fields):
        fields = {"tokens": pinned.tokens, "manifest": pinned.manifest, "reason": TransferReason.PAGE_OUT} | fields
        return await self.stage.kv(self.target, KvVerb.RESERVE, **fields)

    async def move(self, lease):
        return await self.stage.kv(
            self.source, KvVerb.MOVE, address=lease.address, secret=lease.secret, epoch=lease.epoch,
            reason=TransferReason.PAGE_OUT,
        )  # fmt: skip

    async def all_the_way(self):
        cold = self.state(self.source).cold[0]
        pinned = await self.page(cold.prefix)
        lease = await self.reserve(pinned)
        assert (await self.move(lease)).ok
        await asyncio.sleep(0.1)
        assert (await self.stage.kv(self.target, KvVerb.COMMIT, epoch=lease.epoch)).ok
        return pinned, lease


def on_pair(on_stage, config_of, body_of, story, **more):
    async def play(stage):
        agents = [await stage.agent(paging(config_of(name, ENGINE), **more)) for name in ("a", "b")]
        pair = Pair(stage, *agents)
        await pair.listen()
        stage.run(agents[0], body_of(PROMPT))
        await asyncio.sleep(6)
        return await story(pair)

    return on_stage(play)


def test_a_worker_says_how_full_it_is_and_names_its_coldest_prefixes_while_it_is_pressed(
    on_stage, config_of, body_of
):  # fmt: skip
    async def story(pair):
        busy, idle = pair.state(pair.source), pair.state(pair.target)
        assert busy.pressed
        (cold,) = busy.cold
        assert 4000 < cold.idle_ms < 6000
        assert cold.tokens == busy.idle_blocks * 16
        assert (idle.pressed, idle.cold, idle.empty_blocks, idle.total_blocks) == (False, (), ROOM, ROOM)
        counts = [sum(m.node == a.instance for m in pair.told) for a in (pair.source, pair.target)]
        assert counts[0] > 3 * counts[1], "four times a second while pressed, once otherwise"

    on_pair(on_stage, config_of, body_of, story)


def test_a_page_that_arrived_is_cached_there_and_gone_here(on_stage, config_of, body_of):
    async def story(pair):
        affinity = pair.stage.heard.affinity
        affinity.clear()
        pinned, lease = await pair.all_the_way()
        blocks = pinned.tokens // 16
        assert pair.fill(pair.source).referenced_blocks == blocks, "not dropped before it is released"
        assert pair.fill(pair.target).idle_blocks == blocks
        again = await pair.stage.kv(pair.target, KvVerb.COMMIT, epoch=lease.epoch)
        assert again.ok, "a repeated COMMIT is answered as the first was"
        held = await pair.stage.kv(pair.target, KvVerb.HELD, tokens=pinned.tokens, manifest=pinned.manifest)
        assert held.tokens == pinned.tokens
        await pair.stage.kv(pair.source, KvVerb.RELEASE, committed=True)
        assert pair.fill(pair.source).empty_blocks == ROOM
        await asyncio.sleep(0.3)
        on = {update.worker for update in affinity if update.on}
        off = {update.worker for update in affinity if update.off}
        assert (on, off) == ({"b-0"}, {"a-0"})

    on_pair(on_stage, config_of, body_of, story)


def test_a_page_that_did_not_arrive_is_as_cold_as_before(on_stage, config_of, body_of):
    async def story(pair):
        before = pair.state(pair.source).cold[0]
        pinned = await pair.page(before.prefix)
        assert await pair.page(before.prefix) == pinned, "asked again, it answers the same"
        assert (await pair.page(before.prefix, transfer="y")).reason == "in_use"
        assert pair.fill(pair.source).idle_blocks == 0
        await pair.stage.kv(pair.source, KvVerb.RELEASE)
        await asyncio.sleep(1.0)
        after = pair.state(pair.source).cold[0]
        assert (after.prefix, after.tokens) == (before.prefix, before.tokens)
        assert after.idle_ms > before.idle_ms + 500.0
        await pair.page(before.prefix, transfer="z", lease_ms=100.0)
        await asyncio.sleep(6.0)
        assert pair.fill(pair.source).referenced_blocks == 0, "a pin that nobody renews expires"

    on_pair(on_stage, config_of, body_of, story)


def test_what_was_used_since_it_was_pinned_is_not_dropped(on_stage, config_of, body_of):
    async def story(pair):
        await pair.all_the_way()
        pair.stage.run(pair.source, body_of(PROMPT), id="again")
        await asyncio.sleep(0.02)
        await pair.stage.kv(pair.source, KvVerb.RELEASE, committed=True)
        await asyncio.sleep(3.0)
        assert pair.fill(pair.source).idle_blocks > ROOM // 2
        assert pair.stage.heard.events[-1].cached_tokens > 8000

    on_pair(on_stage, config_of, body_of, story)


def test_wrong_bytes_are_not_kept_and_wrong_words_are_refused(on_stage, config_of, body_of):
    async def story(pair):
        cold = pair.state(pair.source).cold[0]
        pinned = await pair.page(cold.prefix)
        manifest = msgspec.msgpack.decode(pinned.manifest, type=PageManifest)
        nameless = (PageManifest((wrong, *manifest.contents[1:])) for wrong in (0, -1))
        packed = map(msgspec.msgpack.encode, (PageManifest(manifest.contents[:-1]), *nameless))
        for wrong in (b"", b"\xc1", *packed):
            assert (await pair.reserve(pinned, manifest=wrong, transfer="y")).reason == "manifest"
        forged = PageManifest((*manifest.contents[:3], 1234, *manifest.contents[4:]), manifest.rungs)
        lease = await pair.reserve(pinned, manifest=msgspec.msgpack.encode(forged))
        await pair.move(lease)
        await asyncio.sleep(0.1)
        assert (await pair.stage.kv(pair.target, KvVerb.COMMIT, epoch=lease.epoch)).ok
        assert pair.fill(pair.target).idle_blocks == 3
        assert pair.fill(pair.target).referenced_blocks == 0
        await pair.stage.kv(pair.source, KvVerb.RELEASE)
        assert (await pair.page(4711)).reason == "in_use"

    on_pair(on_stage, config_of, body_of, story)


def test_without_the_pool_an_agent_neither_speaks_of_its_kv_nor_parts_with_it(on_stage, config_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("a", ENGINE))
        pair = Pair(stage, agent, agent)
        await pair.listen()
        await asyncio.sleep(3.0)
        assert pair.told == []
        assert (await pair.page(1)).reason == "not_capable"
        assert "page" not in stage.heard.inventories[-1].workers[0].capabilities

    on_stage(play)


def test_a_store_keeps_its_role_and_nobody_is_told_to_be_one(on_stage, config_of):
    async def play(stage):
        agent = await stage.agent(paging(config_of("a", ENGINE), store_bytes=100_000_000))
        await asyncio.sleep(0.1)
        assert [worker.role.value for worker in stage.heard.inventories[-1].workers] == ["both", "store"]
        assert "is a store" in (await stage.control(agent, "role", "a-1", "both")).reason
        assert "try: both, prefill, decode" in (await stage.control(agent, "role", "a-0", "store")).reason
        assert (await stage.control(agent, "role", "", "decode")).ok
        await asyncio.sleep(0.1)
        assert [worker.role.value for worker in stage.heard.inventories[-1].workers] == ["decode", "store"]
        told = json.loads((await stage.control(agent, "doctor")).payload)
        assert [worker["engine"]["kind"] for worker in told["workers"]] == ["simulated", "store"]

    on_stage(play)
