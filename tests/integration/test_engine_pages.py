"""Pages of engines behind HTTP, over the connector's real socket and shared memory: never a block that is another's."""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from adapter_bench import Bench
from paged_engine import PagedEngine
from wire_engine import until

from quartet_agent.engines.base import Failed, Finished, Prefilled
from quartet_agent.engines.pools import BlocksFenced
from quartet_bus.messages import Role
from quartet_core.ladder import sketch_tokens

ENGINE = Path(__file__).parents[1] / "paged_engine.py"


def prompt(seed, tokens):
    return [random.Random(seed).randrange(1, 1000) + index for index in range(tokens)]


def bench(engine, **fields):
    # patient: an engine that is late on a loaded machine is not lost
    return Bench(engine, sketch="tokens", kv_pages=engine.socket, probe_timeout_ms=10_000, **fields)


async def paged(bench):
    await bench.up()
    await until(lambda: bench.adapter.pages is not None)
    return bench.adapter.pages


async def ask(bench, tokens, **fields):
    """(cached tokens, events) of an answer."""
    end, _ = await bench.answer({"prompt": tokens, "stream": False}, **fields)
    assert isinstance(end, Finished), end
    return end.usage


async def move(source, target, transfer, tokens, epoch=1):
    """What a mover and the two agents' leases do."""
    await source.ready(transfer)
    await until(lambda: target.figures["granted"] >= tokens // target.block_tokens)
    assert target.reserve(transfer, tokens, epoch)
    for index, block in enumerate(source.export(transfer)):
        target.write(transfer, epoch, index, [bytes(block)])
    target.commit(transfer, epoch)


@pytest.fixture
def sockets(tmp_path):
    return tmp_path / "a.sock", tmp_path / "b.sock"


async def test_what_an_engine_evicts_comes_back_from_its_arena(sockets):
    async with PagedEngine(sockets[0], blocks=8) as engine, bench(engine) as one:
        await paged(one)
        for seed in range(4):
            assert (await ask(one, prompt(seed, 200))).cached_tokens == 0
        for seed in range(4):
            assert (await ask(one, prompt(seed, 200))).cached_tokens == 192
        assert engine.wrong == 0
        await until(lambda: one.adapter.diagnose().pages["loaded"] >= 18)


async def test_a_cold_prefix_goes_to_another_engine_and_is_dropped_here(sockets):
    async with PagedEngine(sockets[0]) as a, PagedEngine(sockets[1]) as b, bench(a) as one, bench(b) as two:
        source, target = await paged(one), await paged(two)
        await ask(one, prompt(1, 200))
        await ask(one, prompt(2, 100))
        await until(lambda: len(source.coldest(9, 1)) == 2)
        [cold, _] = source.coldest(9, 1)
        assert cold.tokens == 192
        manifest = source.pin_pages("t", cold.prefix)
        assert len(manifest.contents) == 6
        await move(source, target, "t", 192)
        assert target.keep_pages("t", manifest) == 192
        source.drop_pages("t")
        await until(lambda: source.counts().out_blocks == 6 and target.counts().in_blocks == 6)
        assert target.held(manifest) == 192
        usage = await ask(two, prompt(1, 200))
        assert usage.cached_tokens == 192
        assert (await ask(one, prompt(1, 200))).cached_tokens == 0
        assert (a.wrong, b.wrong) == (0, 0)
        await until(lambda: target.counts().hit_blocks == 6)


async def test_the_rungs_of_pages_are_told_where_they_are_and_no_more_when_they_are_gone(sockets):
    sketch = sketch_tokens(prompt(1, 200)[:192])
    async with PagedEngine(sockets[0]) as a, PagedEngine(sockets[1]) as b, bench(a) as one, bench(b) as two:
        source, target = await paged(one), await paged(two)
        await ask(one, prompt(1, 200))
        await until(lambda: source.coldest(1, 1))
        two.adapter.drain_rungs()
        manifest = source.pin_pages("t", source.coldest(1, 1)[0].prefix)
        await move(source, target, "t", 192)
        target.keep_pages("t", manifest)
        await until(lambda: two.adapter.diagnose().pages["pages"] == 6)
        became, ended = two.adapter.drain_rungs()
        assert (sorted(became), ended) == (sorted(sketch.rungs), [])
        await two.adapter.stop()
        assert sorted(two.adapter.drain_rungs()[1]) == sorted(sketch.rungs)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefix_is_lent_to_a_request_of_another_engine(sockets, stream):
    async with PagedEngine(sockets[0]) as a, PagedEngine(sockets[1]) as b, bench(a) as one, bench(b) as two:
        source, target = await paged(one), await paged(two)
        shared = prompt(1, 192)
        await ask(one, [*shared, 1, 2, 3], salt=b"x")
        lent = one.submit({"prompt": shared + [7] * 64}, role=Role.PREFILL, transfer="t", prefix_tokens=192, salt=b"x")
        assert isinstance(await one.end(lent), Prefilled)
        await move(source, target, "t", 192)
        source.release("t")
        body = {"prompt": shared + [7] * 64, "stream": stream, "stream_options": {"include_usage": True}}
        end, _ = await two.answer(body, transfer="t", salt=b"x")
        assert (end.usage.transferred_tokens, end.usage.cached_tokens) == (192, 0)
        # another tenant's is another prompt
        assert (await ask(two, shared + [7] * 64, salt=b"y")).cached_tokens == 0
        assert (a.wrong, b.wrong) == (0, 0)
        await until(lambda: source.figures["pins"] == 0 and target.figures["leases"] == 0)


@pytest.mark.parametrize(
    "body", [{"prompt": "the quick brown fox " * 20}, {"messages": [{"role": "user", "content": "the lazy dog " * 20}]}]
)
async def test_a_prompt_of_text_is_lent_as_the_engine_tokenizes_it(sockets, body):
    async with PagedEngine(sockets[0]) as a, PagedEngine(sockets[1]) as b, bench(a) as one, bench(b) as two:
        source, target = await paged(one), await paged(two)
        await one.answer(body)
        lent = one.submit(body, role=Role.PREFILL, transfer="t", prefix_tokens=224)
        assert isinstance(await one.end(lent), Prefilled)
        await move(source, target, "t", 224)
        end, _ = await two.answer(body | {"stream": False}, transfer="t")
        assert end.usage.transferred_tokens == 224
        assert (a.wrong, b.wrong) == (0, 0)


async def test_a_prefix_that_is_not_there_is_not_lent_and_a_prompt_of_a_split_is_computed(sockets):
    async with PagedEngine(sockets[0]) as a, PagedEngine(sockets[1]) as b, bench(a) as one, bench(b) as two:
        source, target = await paged(one), await paged(two)
        lent = one.submit({"prompt": prompt(1, 200)}, role=Role.PREFILL, transfer="t", prefix_tokens=192)
        failed = await one.end(lent)
        assert isinstance(failed, Failed)
        assert failed.reason == "not_cached"
        assert "block 0 of 6 is not cached" in failed.error.body.message
        half = one.submit({"prompt": prompt(1, 200)}, role=Role.PREFILL, transfer="u")
        prefilled = await one.end(half)
        assert isinstance(prefilled, Prefilled)
        assert prefilled.usage.prompt_tokens == 200
        await move(source, target, "u", 200)
        end, _ = await two.answer({"prompt": prompt(1, 200)}, role=Role.DECODE, transfer="u")
        assert end.usage.transferred_tokens == 192
        assert "kv_transfer_params" not in a.requests[-1][2]


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"dtype": "fp8"}, "layout [0-9a-f]{16} against [0-9a-f]{16}"), ({"block": 64}, "layout|header")],
)
async def test_pages_of_another_layout_are_refused(sockets, fields, says):
    async with (
        PagedEngine(sockets[0]) as a, PagedEngine(sockets[1], **fields) as b, bench(a) as one, bench(b) as two
    ):  # fmt: skip
        source, target = await paged(one), await paged(two)
        assert one.adapter.life.kv_layout != two.adapter.life.kv_layout
        await ask(one, prompt(1, 200))
        await until(lambda: source.coldest(1, 1))
        source.pin_pages("t", source.coldest(1, 1)[0].prefix)
        with pytest.raises(BlocksFenced, match=says):
            await move(source, target, "t", 192)
        target.release("t")
        await until(lambda: target.figures["leases"] == 0)


async def test_a_late_writer_and_a_reader_after_release_are_fenced(sockets):
    async with PagedEngine(sockets[0]) as a, bench(a) as one:
        pool = await paged(one)
        await until(lambda: pool.figures["granted"] >= 2)
        assert pool.reserve("t", 64, 1)
        with pytest.raises(BlocksFenced):
            pool.write("t", 2, 0, [b"x"])
        with pytest.raises(BlocksFenced, match="0 of 2"):
            pool.commit("t", 1)
        pool.release("t")
        with pytest.raises(BlocksFenced):
            pool.commit("t", 1)
        assert not pool.reserve("big", 10_000_000, 3)
        await ask(one, prompt(1, 200))
        await until(lambda: pool.coldest(1, 1))
        pool.pin_pages("u", pool.coldest(1, 1)[0].prefix)
        assert pool.coldest(1, 1) == []
        await pool.ready("u")
        blocks = pool.export("u")
        next(blocks)
        pool.release("u")
        with pytest.raises(BlocksFenced):
            next(blocks)


async def test_an_agent_that_comes_again_hears_all_that_is_there(sockets):
    async with PagedEngine(sockets[0], blocks=8) as engine:
        async with bench(engine) as one:
            pool = await paged(one)
            for seed in range(4):
                await ask(one, prompt(seed, 200))
            await until(lambda: pool.coldest(1, 1))
            pool.pin_pages("t", pool.coldest(1, 1)[0].prefix)
            await until(lambda: pool.figures["granted"] >= 2)
            assert pool.reserve("u", 64, 1)
        async with bench(engine) as two:
            await paged(two)
            await until(lambda: two.adapter.diagnose().pages["pages"] >= 18)
            became, _ = two.adapter.drain_rungs()
            assert set(sketch_tokens(prompt(0, 192)).rungs) <= set(became)
            assert not len(engine.pages._pins)  # what the first one had pinned and leased ended with it


async def test_an_engine_that_starts_anew_has_no_pages_of_its_life_before(sockets):
    async with PagedEngine(sockets[0], blocks=8) as engine, bench(engine) as one:
        pool = await paged(one)
        for seed in range(3):
            await ask(one, prompt(seed, 200))
        assert set(one.adapter.life.capabilities) == {"export", "import", "reserve"}
        await engine.stop()
        await until(lambda: one.adapter.kv is None and not one.adapter.life.up)
        assert not pool.reserve("t", 64, 1)
        await engine.start()
        await until(lambda: one.adapter.life.number == 2 and one.adapter.pages is not None)
        assert one.adapter.pages is not pool
        assert one.adapter.diagnose().pages["pages"] == 0
        assert (await ask(one, prompt(0, 200))).cached_tokens == 0
        became, ended = one.adapter.drain_rungs()
        assert sorted(became) == sorted(ended) or set(ended) <= set(became)


async def test_copies_that_fail_turn_pages_off_and_the_engine_goes_on(sockets):
    async with PagedEngine(sockets[0], blocks=8) as engine, bench(engine) as one:
        await paged(one)
        engine.fails = "no memory there"
        for seed in range(4):
            await ask(one, prompt(seed, 200))
        await until(lambda: one.adapter.kv is None)
        assert (await ask(one, prompt(0, 200))).cached_tokens == 0
        assert engine.wrong == 0
        [finding] = [finding for finding in one.adapter.diagnose().findings if finding.code == "no_pages"]
        assert "no memory there" in finding.text
        assert one.adapter.life.capabilities == ()


async def test_after_new_weights_no_old_page_is_used_or_given_away(sockets):
    async with PagedEngine(sockets[0], blocks=8) as a, PagedEngine(sockets[1]) as b, bench(a) as one, bench(b) as two:
        source, target = await paged(one), await paged(two)
        for seed in range(3):
            await ask(one, prompt(seed, 200))
        await until(lambda: source.coldest(1, 1))
        source.pin_pages("t", source.coldest(1, 1)[0].prefix)
        before = one.adapter.life.kv_layout
        assert a.pages.reset()
        a.blocks.__init__(8)
        await until(lambda: one.adapter.life.kv_layout != before and one.adapter.pages is not None)
        with pytest.raises(BlocksFenced):
            await source.ready("t")
        assert (await ask(one, prompt(0, 200))).cached_tokens == 0
        source = one.adapter.pages
        await until(lambda: source.coldest(1, 1))
        source.pin_pages("u", source.coldest(1, 1)[0].prefix)
        with pytest.raises(BlocksFenced, match="layout"):
            await move(source, target, "u", 192)
        assert a.wrong == 0


async def test_without_a_connector_an_engine_is_as_any_other(sockets, tmp_path):
    async with PagedEngine(sockets[0]) as engine, Bench(engine, kv_pages=str(tmp_path / "none.sock")) as one:
        await one.up()
        assert one.adapter.kv is None
        await ask(one, prompt(0, 200))
        assert "no_pages" in {finding.code for finding in one.adapter.diagnose().findings}


async def test_whatever_is_paged_where_no_request_reads_anothers_block(sockets):
    """Two engines that are too small, eight conversations, pages going both ways while they are asked."""
    rng = random.Random(5)
    turns = [prompt(seed, 64) for seed in range(8)]
    async with (
        PagedEngine(sockets[0], blocks=24, slots=40) as a, PagedEngine(sockets[1], blocks=24, slots=40) as b,
        bench(a) as one, bench(b) as two,
    ):  # fmt: skip
        await paged(one)
        await paged(two)

        async def converse():
            for _ in range(60):
                which = rng.randrange(len(turns))
                if len(turns[which]) > 500:
                    turns[which] = prompt(rng.random(), 64)
                turns[which] = turns[which] + [rng.randrange(1000) for _ in range(rng.randrange(60))]
                await ask(rng.choice((one, two)), turns[which])

        async def page(source, target, name):
            for number in range(60):
                await asyncio.sleep(0.005)
                cold = source.adapter.pages.coldest(1, 1)
                transfer = f"{name}{number}"
                if not cold or (manifest := source.adapter.pages.pin_pages(transfer, cold[0].prefix)) is None:
                    continue
                try:
                    await source.adapter.pages.ready(transfer)
                    if not target.adapter.pages.reserve(transfer, cold[0].tokens, number + 1):
                        continue
                    for index, block in enumerate(source.adapter.pages.export(transfer)):
                        target.adapter.pages.write(transfer, number + 1, index, [bytes(block)])
                    target.adapter.pages.commit(transfer, number + 1)
                    target.adapter.pages.keep_pages(transfer, manifest)
                    source.adapter.pages.drop_pages(transfer)
                except BlocksFenced:
                    pass
                finally:
                    source.adapter.pages.release(transfer)
                    target.adapter.pages.release(transfer)

        await asyncio.gather(converse(), converse(), page(one, two, "t"), page(two, one, "u"))
        assert (a.wrong, b.wrong) == (0, 0)
        moved = one.adapter.pages.counts(), two.adapter.pages.counts()
        print(moved, one.adapter.diagnose().pages, two.adapter.diagnose().pages)
        assert sum(counts.in_blocks for counts in moved) > 10
        await until(lambda: one.adapter.pages.figures["pins"] == two.adapter.pages.figures["pins"] == 0)


async def test_an_engine_that_is_killed_leaves_nothing_that_is_in_the_way(sockets):
    lives = []
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(ENGINE), str(sockets[0]), "64", stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()

        class There:
            kind, model = "vllm", "chat"

        There.url, There.socket = url, str(sockets[0])
        async with bench(There) as one:
            pool = await paged(one)
            await ask(one, prompt(1, 200))
            await until(lambda pool=pool: pool.coldest(1, 1))
            pool.pin_pages("t", pool.coldest(1, 1)[0].prefix)
            await pool.ready("t")
            blocks = pool.export("t")
            next(blocks)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await until(lambda one=one: one.adapter.kv is None)
            with pytest.raises(BlocksFenced):
                next(blocks)
            lives.append(url)
    assert len(lives) == 2
    assert not [name for name in os.listdir("/dev/shm") if "quartet" in name]
