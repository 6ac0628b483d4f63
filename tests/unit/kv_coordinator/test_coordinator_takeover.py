"""Coordinators come and go; transfers still hear an outcome, and nothing stays leased."""

import asyncio

import pytest

from quartet_bus.messages import KvVerb
from quartet_kv_coordinator.lanes import Lane


def test_a_lone_coordinator_leads_after_the_silence_and_says_so_ten_times_a_second(play):
    async def story(world):
        await world.start(lead=False)
        await asyncio.sleep(0.45)
        assert world.tables == []
        await asyncio.sleep(1.1)
        assert 10 <= len(world.tables) <= 13
        assert {(table.term, table.coordinator) for table in world.tables} == {(1, "c1")}
        assert world.tables[-1].links == (), "nothing was moved yet: every link costs what its class says"
        assert {(link.source, link.target, link.kind) for link in map(Lane.state, world.leader().links())} >= {
            ("p", "d", "TCP"),
            ("d", "p", "TCP"),
        }

    play(story)


def test_of_two_that_start_together_one_leads_and_carries_each_plan_once(play):
    async def story(world):
        await world.start(coordinators=("c1", "c2"))
        assert world.leader().instance == "c2"
        world.plan()
        await asyncio.sleep(0.2)
        assert world.outcomes() == [("t1", "done")]
        assert world.agents["d"].verbs() == [KvVerb.RESERVE, KvVerb.COMMIT]

    play(story)


def test_a_newcomer_with_a_higher_id_does_not_disturb_the_one_that_leads(play):
    async def story(world):
        await world.start(coordinators=("c1",))
        await world.coordinator("z9")
        await asyncio.sleep(2.0)
        assert world.leader().instance == "c1"

    play(story)


def test_one_that_hears_a_higher_term_steps_down_and_leaves_its_transfers(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan()
        await asyncio.sleep(0.05)
        world.others_lead(7, "other")
        await asyncio.sleep(0.05)
        assert not world.coordinators["c1"].active
        assert world.outcomes() == []
        assert KvVerb.RELEASE not in world.agents["d"].verbs()
        await asyncio.sleep(1.0)  # the other one falls silent: c1 takes over its own transfers
        assert (world.leader().term, world.outcomes()) == (8, [("t1", "coordinator_lost")])
        assert world.held() == []

    play(story)


def test_a_restarted_one_leads_above_the_terms_that_agents_remember_at_once(play):
    async def story(world):
        await world.start(lead=False)
        world.agents["d"].rank = (12, "before")
        world.agents["p"].rank = (7, "before")
        world.agents["d"].leases["lost"] = [3, "reserved", "d-0"]
        await asyncio.sleep(0.6)
        assert (world.leader().term, world.tables[-1].term) == (13, 13)
        assert world.outcomes() == [("lost", "coordinator_lost")]
        assert world.held() == []
        assert sum(len(agent.asked) for agent in world.agents.values()) < 8
        world.plan()
        await asyncio.sleep(0.1)
        assert ("t1", "done") in world.outcomes()

    play(story)


def test_one_that_meets_a_higher_term_while_it_leads_carries_its_transfers_on_above_it(play):
    async def story(world):
        await world.start()
        world.agents["d"].rank = (5, "unseen")
        world.plan("t1")
        world.plan("t2", request="r2")
        await asyncio.sleep(0.1)
        assert world.leader().term == 6
        assert world.outcomes() == [("t1", "done"), ("t2", "done")]
        assert world.held() == []

    play(story)


def test_one_whom_an_agent_refuses_for_a_rival_of_its_term_steps_down_without_a_word(play):
    async def story(world):
        await world.start()
        world.agents["d"].rank = (1, "unseen")
        world.plan()
        await asyncio.sleep(0.05)
        assert not world.coordinators["c1"].active
        assert world.outcomes() == []

    play(story)


# When, after the plan, the coordinator dies; what by then has happened at the agents.
STEPS = {
    "before anything": 0.0,
    "reserving": 0.000001,
    "waiting for the prefill": 0.05,
    "moving": 0.11,
    "just committed": 0.1201,
    "over": 0.3,
}


@pytest.mark.parametrize("after_s", [*STEPS.values()], ids=[*STEPS])
@pytest.mark.parametrize("standby", [True, False], ids=["standby", "restart"])
def test_a_coordinator_killed_at_any_step_leaves_no_lease_and_no_transfer_without_an_outcome(play, after_s, standby):
    async def story(world):
        await world.start(coordinators=("c1", "c2") if standby else ("c1",))
        world.plan(ready=False)
        world.loop.call_later(0.1, world.prefilled)
        await asyncio.sleep(after_s)
        await world.kill(world.leader().instance)
        if not standby:
            await world.coordinator("c3")
        await asyncio.sleep(1.5)
        committed = bool(world.agents["d"].handed_over)
        assert committed == (after_s > 0.12)
        assert world.outcomes() == [("t1", "done" if committed else "coordinator_lost")]
        assert world.held() == []
        world.plan("t2", request="r2")
        await asyncio.sleep(0.2)
        assert ("t2", "done") in world.outcomes()

    play(story)


@pytest.mark.parametrize("microseconds", range(40))
def test_killed_between_any_two_messages_of_a_quick_transfer(play, microseconds):
    async def story(world):
        world.broker.delay_s = 2e-6
        await world.start(coordinators=("c1", "c2"))
        world.agents["p"].move_ms = 0.004
        world.plan()
        await asyncio.sleep(microseconds * 1e-6)
        await world.kill(world.leader().instance)
        await asyncio.sleep(1.5)
        assert len(world.outcomes()) == 1
        committed = bool(world.agents["d"].handed_over)
        assert world.outcomes() == [("t1", "done" if committed else "coordinator_lost")]
        assert world.held() == []

    play(story)


def test_plans_made_while_nobody_leads_are_counted_and_still_hear_an_outcome(play):
    async def story(world):
        await world.start(lead=False)
        await asyncio.sleep(0.1)
        world.plan()
        await asyncio.sleep(0.1)
        registry = world.coordinators["c1"].metrics.registry
        ignored = {"why": "no_coordinator"}
        assert registry.get_sample_value("quartet_coordinator_plans_ignored_total", ignored) == 1
        await asyncio.sleep(0.6)
        assert world.outcomes() == [("t1", "coordinator_lost")]
        assert world.held() == []

    play(story)


def test_leases_nobody_stands_for_are_freed_and_told_by_name(play):
    async def story(world):
        await world.start(lead=False)
        world.agents["d"].leases["lost"] = [3, "reserved", "d-0"]
        world.agents["p"].pins["lost"] = "p-0"
        world.agents["d"].leases["read"] = [4, "committed", "d-0"]
        await asyncio.sleep(0.7)
        assert world.outcomes() == [("lost", "coordinator_lost")]
        assert world.held() == [("d", "read")]

    play(story)


def test_an_agent_that_turns_up_late_is_swept_too(play):
    async def story(world):
        await world.start()
        agent = world.agents["d"]
        agent.leases["lost"] = [3, "reserved", "d-0"]
        agent.inventory.incarnation = 2
        agent.say_inventory()
        await asyncio.sleep(0.1)
        assert world.held() == []

    play(story)


def test_an_agent_that_does_not_answer_does_not_hold_up_a_takeover(play):
    async def story(world):
        await world.start(lead=False)
        world.agents["d"].mute.add(KvVerb.LEASES)
        await asyncio.sleep(2.0)
        assert world.leader().term == 1

    play(story)
