"""The pager: who pages, how much at once, for where, and what it does when nothing comes of it."""

import asyncio

import msgspec
import pytest

from quartet_bus import subjects
from quartet_bus.messages import ColdPrefix, KvPressure, KvVerb, PoolState, Role

CAPABLE = ("export", "import", "reserve", "page")
KV = {"pool": True}


def colds(*prefixes, tokens=16_000, idle_ms=60_000.0):
    return tuple(ColdPrefix(prefix, tokens, idle_ms) for prefix in prefixes)


async def begin(world, make_worker, **more):
    """A full H100 ``p``, and an L40S ``d`` with room: the agents answer as real ones, and PAGE with a manifest."""
    await world.start(
        ("p", (make_worker("p", capabilities=CAPABLE, model="llama-3.1-8b"),), {"RDMA_ROCE": 46.6}),
        ("d", (make_worker("d", hardware="L40S_PCIE", capabilities=CAPABLE, model="llama-3.1-8b"),),
         {"RDMA_ROCE": 46.6}),
        **more,
    )  # fmt: skip


def pressed(world, *prefixes, room=10_000, worker="p-0", **more):
    """Say that ``p`` is full and names these, and that ``d`` has ``room`` blocks empty."""
    states = {
        "p": PoolState(worker, 1, 10_000, 0, 9_000, True, colds(*prefixes, **more)),
        "d": PoolState("d-0", 1, 10_000, room, 0),
    }
    for node in ("d", "p"):
        world.say(subjects.kv_pressure(), KvPressure(node, 1, (states[node],)))


def asked(world, node, verb):
    return [command for command in world.agents[node].asked if command.verb is verb]


def test_pages_are_pinned_compared_and_moved_and_released_as_committed(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        pressed(world, 1)
        await asyncio.sleep(0.3)
        (page,), (held,), (lease,) = (
            asked(world, "p", KvVerb.PAGE), asked(world, "d", KvVerb.HELD), asked(world, "d", KvVerb.RESERVE),
        )  # fmt: skip
        assert (page.worker, page.prefix, page.reason) == ("p-0", 1, "page_out")
        assert held.manifest == lease.manifest == b"manifest"
        assert lease.tokens == 16_000
        (release,) = asked(world, "p", KvVerb.RELEASE)
        assert release.committed
        assert [(done.reason, done.source, done.target) for done in world.done] == [("page_out", "p-0", "d-0")]
        assert world.held() == []
        assert world.leader().pager.outcomes == {"done": 1}

    play(story, **KV)


def test_what_the_target_nearly_has_is_only_dropped(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        world.agents["d"].has_tokens = 15_968
        pressed(world, 1)
        await asyncio.sleep(0.3)
        assert asked(world, "d", KvVerb.RESERVE) == []
        (release,) = asked(world, "p", KvVerb.RELEASE)
        assert release.committed
        assert world.leader().pager.outcomes == {"held": 1}

    play(story, **KV)


def test_at_most_so_many_leave_at_once_and_the_next_goes_when_one_is_done(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        world.agents["p"].stuck = True
        for _ in range(5):
            pressed(world, 1, 2, 3, 4)
            await asyncio.sleep(0.05)
        assert len(asked(world, "p", KvVerb.PAGE)) == 2
        assert len(world.leader().pager) == 2
        world.agents["p"].stuck = False
        for view in world.leader().transfers():
            world.leader().cancel(view.transfer)
        await asyncio.sleep(5.1)  # the target failed it, as far as anybody knows
        pressed(world, 1, 2, 3, 4)
        await asyncio.sleep(1.0)
        assert {command.prefix for command in asked(world, "p", KvVerb.PAGE)} == {1, 2, 3, 4}
        assert world.held() == []

    play(story, **KV)


def test_a_standby_listens_and_pages_once_it_leads(play, make_worker):
    async def story(world):
        await begin(world, make_worker, coordinators=("c1", "c2"))
        first = world.leader().instance
        other = next(name for name in world.coordinators if name != first)
        pressed(world, 1)
        await asyncio.sleep(0.3)
        assert len(asked(world, "p", KvVerb.PAGE)) == 1, "one of the two pages"
        assert {view.worker for view in world.coordinators[other].pager.views()} == {"p-0", "d-0"}
        await world.kill(first)
        await asyncio.sleep(1.5)
        pressed(world, 2)
        await asyncio.sleep(0.3)
        assert [command.prefix for command in asked(world, "p", KvVerb.PAGE)] == [1, 2]

    play(story, **KV)


def test_a_page_pinned_for_a_coordinator_that_died_is_freed_by_the_next(play, make_worker):
    async def story(world):
        await begin(world, make_worker, coordinators=("c1", "c2"))
        world.agents["p"].stuck = True
        pressed(world, 1)
        await asyncio.sleep(0.1)
        assert len(world.held()) == 2
        await world.kill(world.leader().instance)
        await asyncio.sleep(1.5)
        assert world.held() == []

    play(story, **KV)


def test_refusals_and_silence_free_everything_and_rest_the_target(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        world.agents["d"].refuse[KvVerb.RESERVE] = "no_space"
        pressed(world, 1)
        await asyncio.sleep(0.2)
        pressed(world, 2)
        await asyncio.sleep(0.2)
        assert [command.prefix for command in asked(world, "p", KvVerb.PAGE)] == [1], "that target rests"
        world.agents["p"].mute.add(KvVerb.PAGE)
        await asyncio.sleep(5.0)
        pressed(world, 3)
        await asyncio.sleep(2.0)
        assert world.held() == []
        assert len(world.leader().pager) == 0
        assert world.leader().pager.outcomes == {"failed": 2}

    play(story, **KV)


def test_without_room_or_worth_nothing_is_asked_and_the_reason_is_counted_once(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        for _ in range(4):
            pressed(world, 1, room=1500)
            await asyncio.sleep(0.05)
        pressed(world, 2, tokens=64)
        pressed(world, 3, idle_ms=10.0)
        await asyncio.sleep(0.2)
        assert asked(world, "p", KvVerb.PAGE) == []
        assert world.leader().pager.refused == {"no_room": 1, "small": 1, "recent": 1}

    play(story, **KV)


def test_a_worker_that_died_is_no_destination(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        world.verdict("d-0", 3)
        await asyncio.sleep(0.05)
        pressed(world, 1)
        await asyncio.sleep(0.2)
        assert world.leader().pager.refused == {"no_room": 1}

    play(story, **KV)


@pytest.mark.parametrize(
    ("empty", "others", "target"),
    [(10_000, True, ("p-1", "HOST")), (0, True, ("d-0", "TCP")), (0, False, ("p-1", "HOST"))],
)
def test_a_store_beside_the_cards_is_nearest_but_pages_make_room_there_only_when_they_must(
    play, make_worker, empty, others, target
):
    async def story(world):
        store = msgspec.structs.replace(
            make_worker("p", 1, capabilities=CAPABLE, model="llama-3.1-8b"), role=Role.STORE, gpus=()
        )
        far = make_worker("d", hardware="H100_SXM5", capabilities=CAPABLE, model="llama-3.1-8b")
        await world.start(
            ("p", (make_worker("p", capabilities=CAPABLE, model="llama-3.1-8b"), store), {"TCP": 9.0}),
            ("d", (far,), {"TCP": 9.0}),
        )
        states = (
            PoolState("p-0", 1, 10_000, 0, 9_000, True, colds(1)), PoolState("p-1", 1, 10_000, empty, 10_000 - empty),
        )  # fmt: skip
        if others:
            world.say(subjects.kv_pressure(), KvPressure("d", 1, (PoolState("d-0", 1, 10_000, 10_000, 0),)))
        world.say(subjects.kv_pressure(), KvPressure("p", 1, states))
        await asyncio.sleep(0.4)
        assert [(done.target, done.link) for done in world.done] == [target]
        (view,) = [view for view in world.leader().pager.views() if view.worker == "p-1"]
        assert view.tier == "host"

    play(story, **KV)


def test_with_the_pool_off_it_only_listens(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        pressed(world, 1)
        await asyncio.sleep(0.2)
        assert asked(world, "p", KvVerb.PAGE) == []

    play(story)


def test_no_more_is_paged_than_the_marks_want_though_reports_are_old(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        pressed(world, *range(1, 20))  # 1,500 blocks are wanted, a page has 1,000
        await asyncio.sleep(1.5)
        assert len(asked(world, "p", KvVerb.PAGE)) == 2
        views = {view.worker: view for view in world.leader().pager.views()}
        assert (views["p-0"].empty_tokens, views["d-0"].empty_tokens) == (32_000, 160_000 - 32_000)

    play(story, **KV)


def test_no_page_goes_to_a_worker_that_is_cordoned_or_only_decodes(play, make_worker):
    async def story(world):
        await begin(world, make_worker)
        for number, change in enumerate(({"cordoned": True}, {"role": Role.DECODE}), 2):
            told = world.agents["d"].inventory
            workers = (msgspec.structs.replace(told.workers[0], **change),)
            world.say(subjects.inventory("d"), msgspec.structs.replace(told, epoch=number, workers=workers))
            await asyncio.sleep(0.05)
            pressed(world, number)
            await asyncio.sleep(0.2)
        assert world.leader().pager.refused == {"no_room": 2}

    play(story, **KV)
