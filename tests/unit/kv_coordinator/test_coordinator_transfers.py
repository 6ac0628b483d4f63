"""Transfers of one active coordinator, with agents that answer as real ones do."""

import asyncio

import pytest

from quartet_bus.config.schema import LinkSection
from quartet_bus.messages import KvVerb, Phase, TransferReason
from quartet_core.verdict import Verdict
from quartet_kv_coordinator.lanes import Lane

MB = 1_000_000


def test_a_split_is_reserved_moved_committed_announced_and_its_source_freed(play):
    async def story(world):
        await world.start()
        world.plan()
        await asyncio.sleep(0.2)
        assert world.agents["d"].verbs() == [KvVerb.RESERVE, KvVerb.COMMIT]
        assert world.agents["p"].verbs() == [KvVerb.MOVE, KvVerb.RELEASE]
        (move,) = [command for command in world.agents["p"].asked if command.verb == KvVerb.MOVE]
        assert (move.address, move.secret, move.epoch, move.link) == ("d:1", b"secret", 1, "TCP")
        assert (move.gb_per_s, move.setup_ms, move.kv_bytes) == (9.0, 1.0, 9 * MB)
        assert world.outcomes() == [("t1", "done")]
        (done,) = world.done
        assert (done.took_ms, done.wire_bytes, done.kv_bytes, done.link) == (20.0, 64, 9 * MB, "TCP")
        assert done.predicted_ms == pytest.approx(2.0)
        assert world.held() == []
        (view,) = world.leader().transfers()
        assert (view.state, view.live) == ("released", False)

    play(story)


@pytest.mark.parametrize("reason", [TransferReason.SPLIT, TransferReason.FETCH])
def test_the_source_is_told_to_move_only_when_its_prefill_is_done(play, reason):
    async def story(world):
        await world.start()
        world.plan(ready=False, reason=reason)
        await asyncio.sleep(1.0)
        assert world.agents["p"].verbs() == []
        world.prefilled()
        await asyncio.sleep(0.1)
        assert world.outcomes() == [("t1", "done")]

    play(story)


def test_a_lost_prefilled_event_delays_a_transfer_by_one_lease_and_no_more(play):
    async def story(world):
        await world.start()
        world.plan(ready=False)
        await asyncio.sleep(1.2)
        assert world.outcomes() == [("t1", "done")]

    play(story, lease_ms=1000.0)


def test_a_refusal_that_overtook_its_plan_ends_it(play):
    async def story(world):
        await world.start()
        world.event(Phase.REFUSED, "r1", "d-0", reason="full")
        await asyncio.sleep(1.0)
        world.plan()
        await asyncio.sleep(0.2)
        assert world.outcomes() == [("t1", "refused")]
        assert world.leader()._conductor.early == 0

    play(story)


def test_refusals_for_which_no_plan_comes_are_forgotten_and_end_no_later_one(play):
    async def story(world):
        await world.start()
        for number in range(100):
            world.event(Phase.REFUSED, f"whole-{number}", "d-0", reason="full")
        world.event(Phase.REFUSED, "r1", "d-0", reason="full")
        await asyncio.sleep(1.5)
        assert world.leader()._conductor.early == 101
        await asyncio.sleep(1.0)
        assert world.leader()._conductor.early == 0
        world.plan()
        await asyncio.sleep(0.2)
        assert world.outcomes() == [("t1", "done")]

    play(story)


def test_a_prefill_that_was_quicker_than_its_plan_counts(play):
    async def story(world):
        await world.start()
        world.prefilled()
        await asyncio.sleep(0.01)
        world.plan(ready=False)
        await asyncio.sleep(0.1)
        assert world.outcomes() == [("t1", "done")]

    play(story)


def test_a_refused_reservation_frees_the_source_at_once(play):
    async def story(world):
        await world.start()
        world.agents["d"].refuse[KvVerb.RESERVE] = "no_space"
        world.plan()
        await asyncio.sleep(0.01)
        assert world.outcomes() == [("t1", "refused")]
        assert world.failed[0].detail == "refused: reserve: no_space"
        assert world.held() == []

    play(story)


def test_a_target_that_refuses_the_request_frees_the_prefill_at_once(play):
    async def story(world):
        await world.start()
        world.plan(ready=False)
        await asyncio.sleep(0.05)
        world.event(Phase.REFUSED, "r1", "d-0", reason="draining")
        await asyncio.sleep(0.01)
        assert world.outcomes() == [("t1", "refused")]
        assert world.held() == []

    play(story)


def test_a_prefill_that_failed_tells_the_waiting_target_at_once(play):
    async def story(world):
        await world.start()
        world.plan(ready=False)
        await asyncio.sleep(0.05)
        world.event(Phase.END, "r1", "p-0", status="error", reason="engine_fault")
        await asyncio.sleep(0.01)
        assert world.outcomes() == [("t1", "ended")]
        assert world.held() == []

    play(story)


def test_a_source_that_fails_while_sending_frees_the_target(play):
    async def story(world):
        await world.start()
        world.agents["p"].fails = True
        world.plan()
        await asyncio.sleep(0.1)
        assert world.outcomes() == [("t1", "move_failed")]
        assert KvVerb.COMMIT not in world.agents["d"].verbs()
        assert world.held() == []

    play(story)


@pytest.mark.parametrize(("dead", "other"), [("d", "p"), ("p", "d")])
def test_a_death_on_one_side_frees_the_other(play, dead, other):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan()
        await asyncio.sleep(0.05)
        world.verdict(f"{dead}-0", Verdict.DEAD)
        await asyncio.sleep(0.01)
        assert world.outcomes() == [("t1", "dead")]
        assert [node for node, _ in world.held()] == [dead], f"{other} is freed"
        assert KvVerb.RELEASE not in world.agents[dead].verbs()

    play(story)


def test_a_restarted_agent_is_as_good_as_dead(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan()
        await asyncio.sleep(0.05)
        world.agents["d"].inventory.incarnation = 2
        world.agents["d"].say_inventory()
        await asyncio.sleep(0.01)
        assert world.outcomes() == [("t1", "dead")]

    play(story)


def test_of_two_collectors_the_one_that_heard_more_is_believed(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.verdict("d-0", Verdict.UP, beat=50, collector="good")
        world.plan()
        await asyncio.sleep(0.05)
        world.verdict("d-0", Verdict.DEAD, beat=20, collector="deaf")
        await asyncio.sleep(0.01)
        assert world.outcomes() == []
        world.verdict("d-0", Verdict.DEAD, beat=50, collector="good")
        await asyncio.sleep(0.01)
        assert world.outcomes() == [("t1", "dead")]

    play(story)


def test_a_collector_that_lost_sight_of_a_node_ends_no_transfer_while_another_one_hears_it(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.verdict("d-0", Verdict.UP, beat=5, collector="good")
        world.stamp("d", 900, collector="good")
        world.plan()
        await asyncio.sleep(0.05)
        world.verdict("d-0", Verdict.DEAD, beat=850, collector="deaf")
        await asyncio.sleep(0.01)
        assert world.outcomes() == []
        world.verdict("d-0", Verdict.DEAD, beat=901, collector="good")
        await asyncio.sleep(0.01)
        assert world.outcomes() == [("t1", "dead")]

    play(story)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.05])
def test_a_cancel_frees_both_sides_whenever_it_comes(play, after_s):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan(ready=after_s > 0.01)
        await asyncio.sleep(after_s)
        world.cancel("another")
        world.cancel("r1")
        await asyncio.sleep(0.05)
        assert world.outcomes() == [("t1", "cancelled")]
        assert world.held() == []

    play(story)


def test_a_plan_heard_again_is_carried_out_once_even_after_its_end(play):
    async def story(world):
        await world.start()
        world.plan()
        world.plan()
        await asyncio.sleep(0.2)
        world.plan()
        await asyncio.sleep(0.2)
        assert world.outcomes() == [("t1", "done")]
        assert world.agents["d"].verbs() == [KvVerb.RESERVE, KvVerb.COMMIT]

    play(story)


@pytest.mark.parametrize(("muted", "node"), [(KvVerb.RESERVE, "d"), (KvVerb.MOVE, "p"), (KvVerb.COMMIT, "d")])
def test_an_agent_that_does_not_answer_ends_the_transfer_within_bounds(play, muted, node):
    async def story(world):
        await world.start()
        world.agents[node].mute.add(muted)
        world.plan()
        await asyncio.sleep(1.2)
        assert world.outcomes() == [("t1", "unanswered")]
        assert world.held() == []

    play(story)


def test_a_lost_answer_is_asked_for_again(play):
    async def story(world):
        await world.start()
        world.agents["d"].mute.add(KvVerb.RESERVE)
        world.plan()
        await asyncio.sleep(0.1)
        world.agents["d"].mute.clear()
        await asyncio.sleep(0.5)
        assert world.outcomes() == [("t1", "done")]

    play(story)


def test_leases_are_renewed_while_bytes_move(play):
    async def story(world):
        await world.start()
        world.agents["p"].move_ms = 1000.0
        world.plan()
        await asyncio.sleep(2.0)
        assert world.outcomes() == [("t1", "done")]
        for agent in world.agents.values():
            assert 8 <= sum(command.verb == KvVerb.RENEW for command in agent.asked) <= 11

    play(story, lease_ms=300.0)


def test_a_lease_that_a_side_lost_ends_the_transfer(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan()
        await asyncio.sleep(0.05)
        world.agents["d"].leases.clear()
        await asyncio.sleep(0.2)
        assert world.outcomes() == [("t1", "lease_lost")]
        assert world.held() == []

    play(story, lease_ms=300.0)


def test_the_deadline_ends_a_transfer_that_hangs(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan(deadline_ms=800.0)
        await asyncio.sleep(1.0)
        assert world.outcomes() == [("t1", "deadline")]
        assert world.held() == []

    play(story)


def test_a_cancel_of_another_tenant_with_the_same_id_ends_nothing(play):
    async def story(world):
        await world.start()
        world.plan(tenant="acme")
        await asyncio.sleep(0.01)
        world.cancel("r1", "evil", tenant="acme")  # what the body says does not count
        await asyncio.sleep(0.005)
        assert world.outcomes() == []
        await asyncio.sleep(0.1)
        assert world.outcomes() == [("t1", "done")]

    play(story)


@pytest.mark.parametrize("phase", [Phase.PREFILLED, Phase.REFUSED, Phase.END])
def test_events_of_another_tenant_with_the_same_id_on_the_same_workers_touch_nothing(play, phase):
    async def story(world):
        await world.start()
        world.event(phase, "r1", "p-0", tenant="evil", status="error")
        world.plan(tenant="acme", ready=False)
        await asyncio.sleep(0.05)
        world.event(phase, "r1", "p-0", tenant="evil", status="error")
        await asyncio.sleep(0.05)
        assert world.outcomes() == []
        assert world.agents["p"].verbs() == []
        world.prefilled(tenant="acme")
        await asyncio.sleep(0.1)
        assert world.outcomes() == [("t1", "done")]

    play(story)


def test_a_plan_that_does_not_say_whose_it_is_hears_events_and_no_cancel(play):
    async def story(world):
        await world.start()
        world.plan(tenant="", ready=False)
        await asyncio.sleep(0.01)
        world.cancel("r1")
        world.prefilled()
        await asyncio.sleep(0.1)
        assert world.outcomes() == [("t1", "done")]

    play(story)


def test_two_tenants_with_the_same_id_each_have_their_transfer(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan("a", tenant="acme")
        world.plan("b", tenant="globex")
        await asyncio.sleep(0.02)
        world.cancel("r1", "globex")
        await asyncio.sleep(0.02)
        assert world.outcomes() == [("b", "cancelled")]

    play(story)


# Planning ------------------------------------------------------------------------------------------------------------


def test_a_transfer_that_would_miss_its_deadline_is_refused_before_anything_is_reserved(play):
    async def story(world):
        await world.start()
        world.plan("slow", kv_bytes=9000 * MB, deadline_ms=900.0)  # 1 s at 9 GB/s
        world.plan("fits", kv_bytes=9000 * MB, deadline_ms=1100.0, request="r2")
        await asyncio.sleep(0.2)
        assert sorted(world.outcomes()) == [("fits", "done"), ("slow", "would_miss_deadline")]
        assert [command.transfer for command in world.agents["d"].asked if command.verb == KvVerb.RESERVE] == ["fits"]
        assert world.held() == []

    play(story)


def test_bytes_ahead_on_the_link_count_towards_the_deadline(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan("first", kv_bytes=9000 * MB, deadline_ms=60_000.0)
        await asyncio.sleep(0.05)
        world.plan("second", kv_bytes=900 * MB, deadline_ms=900.0, request="r2")
        await asyncio.sleep(0.05)
        assert world.outcomes() == [("second", "would_miss_deadline")]

    play(story)


def test_tp_4_to_tp_1_is_refused_at_planning_with_what_differs(play, make_worker):
    async def story(world):
        await world.start(
            ("p", (make_worker("p", tp=4),), {"TCP": 9.0}),
            ("d", (make_worker("d", hardware="L40S_PCIE"),), {"TCP": 9.0}),
        )
        world.plan()
        await asyncio.sleep(0.05)
        assert world.failed[0].detail == "layout: tp 4 against 1"
        assert world.agents["d"].verbs() == []
        assert world.held() == []

    play(story)


def test_a_worker_that_cannot_be_reserved_on_is_refused_at_planning(play, make_worker):
    async def story(world):
        await world.start(
            ("p", (make_worker("p"),), {"TCP": 9.0}),
            ("d", (make_worker("d", capabilities=("handshake",)),), {"TCP": 9.0}),
        )
        world.plan()
        await asyncio.sleep(0.05)
        assert world.outcomes() == [("t1", "capability")]

    play(story)


def test_unknown_fenced_and_dead_workers_are_told_apart(play):
    async def story(world):
        await world.start()
        world.plan("nobody", target="x-0", request="r1")
        world.plan("old", source_incarnation=9, request="r2")
        world.verdict("d-0", Verdict.DEAD)
        await asyncio.sleep(0.01)
        world.plan("dead", request="r3")
        await asyncio.sleep(0.05)
        assert world.outcomes() == [("nobody", "unknown_worker"), ("old", "fenced"), ("dead", "dead")]

    play(story)


# Links ---------------------------------------------------------------------------------------------------------------


def test_two_transfers_on_one_link_take_turns_the_earlier_deadline_first(play):
    async def story(world):
        await world.start()
        world.plan("running", request="r1")
        await asyncio.sleep(0.005)
        world.plan("late", request="r2", deadline_ms=4000.0)
        world.plan("urgent", request="r3", deadline_ms=2000.0)
        most = 0
        for _ in range(100):
            await asyncio.sleep(0.001)
            most = max(most, *(link.transfers for link in map(Lane.state, world.leader().links())))
        assert most == 1
        assert [report.transfer for report in world.done] == ["running", "urgent", "late"]

    play(story, transfers_per_link=1)


def test_links_in_the_two_directions_do_not_wait_for_each_other(play):
    async def story(world):
        await world.start()
        world.plan("there")
        world.plan("back", source="d-0", target="p-0", request="r2")
        await asyncio.sleep(0.03)
        assert sorted(world.outcomes()) == [("back", "done"), ("there", "done")]

    play(story, transfers_per_link=1)


def test_a_cancelled_transfer_leaves_its_place_on_the_link_to_the_next(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan("stuck", request="r1")
        await asyncio.sleep(0.01)
        world.agents["p"].stuck = False
        world.plan("next", request="r2")
        await asyncio.sleep(0.05)
        assert world.outcomes() == []
        world.cancel("r1")
        await asyncio.sleep(0.05)
        assert world.outcomes() == [("next", "done"), ("stuck", "cancelled")]
        assert all(link.in_flight_bytes == 0 for link in map(Lane.state, world.leader().links()))

    play(story, transfers_per_link=1)


def test_the_best_fabric_that_both_ends_have_is_used_and_capped_by_the_target(play, make_worker):
    async def story(world):
        rdma = {"RDMA_ROCE": 46.6, "TCP": 9.0}
        await world.start(
            ("p", (make_worker("p", 0), make_worker("p", 1)), rdma),
            ("d", (make_worker("d", 0, hardware="L40S_PCIE"), make_worker("d", 1, hardware="L40S_PCIE")), rdma),
        )
        for name, source, target in (("a", "p-0", "d-0"), ("b", "p-0", "p-1"), ("c", "d-0", "d-1")):
            world.plan(name, source=source, target=target, request=name)
        await asyncio.sleep(0.2)
        moves = {c.transfer: c for agent in world.agents.values() for c in agent.asked if c.verb == KvVerb.MOVE}
        assert {name: move.link for name, move in moves.items()} == {"a": "RDMA_ROCE", "b": "NVLINK", "c": "PCIE_P2P"}
        assert moves["a"].gb_per_s == pytest.approx(28.0)
        assert {report.transfer: report.link for report in world.done} == {
            "a": "RDMA_ROCE",
            "b": "NVLINK",
            "c": "PCIE_P2P",
        }

    play(story)


def test_a_silent_fallback_is_counted_reported_and_priced(play, make_worker):
    async def story(world):
        rdma = {"RDMA_IB": 45.0, "TCP": 9.0}
        await world.start(("p", (make_worker("p"),), rdma), ("d", (make_worker("d"),), rdma))
        source = world.agents["p"]
        source.link, source.move_ms = "TCP", 1803.0
        for number in range(12):
            world.plan(f"t{number}", kv_bytes=135 * MB, request=f"r{number}", deadline_ms=60_000.0)
            await asyncio.sleep(2.0)
        assert {report.link for report in world.done} == {"TCP"}
        (link,) = [link for link in map(Lane.state, world.leader().links()) if (link.source, link.target) == ("p", "d")]
        assert link.gb_per_s < 0.25 * 45.0
        registry = world.leader().metrics.registry
        assert registry.get_sample_value("quartet_coordinator_links_slowed") == 1
        taken = {"told": "RDMA_IB", "taken": "TCP"}
        assert registry.get_sample_value("quartet_coordinator_other_path_total", taken) == 12
        world.plan("priced", kv_bytes=1350 * MB, deadline_ms=50.0, request="rp")  # 30.4 ms at 45 GB/s
        await asyncio.sleep(0.1)
        assert world.outcomes()[-1] == ("priced", "would_miss_deadline")

    play(story)


def test_links_are_announced_once_they_were_used(play):
    async def story(world):
        await world.start()
        world.plan()
        await asyncio.sleep(0.3)
        assert [(link.source, link.target) for link in world.tables[-1].links] == [("p", "d")]

    play(story)


def test_configured_class_figures_are_announced_for_links_that_nobody_used(play):
    async def story(world):
        await world.start()
        (link,) = world.tables[-1].links
        assert (link.source, link.target, link.kind, link.gb_per_s, link.setup_ms) == ("", "", "TCP", 1.0, 5.0)
        assert "" not in {link.source for link in map(Lane.state, world.leader().links())}

    play(story, links={"TCP": LinkSection(1.0, 5.0)})


def test_configured_link_figures_replace_the_built_in_ones(play):
    async def story(world):
        await world.start()
        world.plan(kv_bytes=10 * MB)
        await asyncio.sleep(0.1)
        assert world.done[0].predicted_ms == pytest.approx(15.0)

    play(story, links={"TCP": LinkSection(1.0, 5.0)})


def test_a_page_transfer_has_no_prefill_to_wait_for(play):
    async def story(world):
        await world.start()
        world.plan(ready=False, reason=TransferReason.PAGE_OUT)
        await asyncio.sleep(0.1)
        assert world.outcomes() == [("t1", "done")]

    play(story)


def test_the_door_lists_cancels_and_budgets(play):
    async def story(world):
        await world.start()
        world.agents["p"].stuck = True
        world.plan(kv_bytes=900 * MB)
        await asyncio.sleep(0.05)
        service = world.leader()
        (view,) = service.transfers()
        assert (view.transfer, view.state, view.live, view.link) == ("t1", "moving", True, "TCP")
        assert service.budget("d", 900 * MB, "p") == pytest.approx(201.0)
        assert service.budget("p", 900 * MB) == pytest.approx(101.0)
        assert service.cancel("t1") == "aborted"
        await asyncio.sleep(0.05)
        assert world.outcomes() == [("t1", "cancelled")]
        with pytest.raises(LookupError, match="t1"):
            service.cancel("t1")
        with pytest.raises(LookupError, match="nowhere"):
            service.budget("nowhere", 1)

    play(story)
