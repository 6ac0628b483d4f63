"""An agent's telemetry under virtual time: what it says, what of it reaches the beats, and what a stuck driver does."""

import asyncio
import sys

import msgspec
import pytest

from quartet_agent.telemetry.places import Places
from quartet_agent.telemetry.port import Taken
from quartet_agent.telemetry.wiring import real_readings
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import TelemetrySection
from quartet_core import word
from quartet_core.readings import GpuReading, HostReading, NicReading, Reason

COOL = GpuReading(index=0, address="0000:18:00.0", temperature_c=60.0, slowdown_c=90.0, power_w=500.0, reasons=())
HOT = msgspec.structs.replace(COOL, temperature_c=91.0, reasons=(Reason.HW_THERMAL,))
PLACES = Places({}, {"0000:18:00.0": "pci0000:15"}, {"ens0": "pci0000:15", "eno1": "pci0000:00"})


class Played:
    """Readings that a test sets."""

    source = "nvml"

    def __init__(self) -> None:
        self.gpus, self.nics, self.trouble = (COOL,), (), ""
        self.stuck: Taken | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def take(self) -> Taken:
        return self.stuck or Taken(HostReading(gpus=self.gpus, nics=self.nics), self._loop.time(), 5.0, self.trouble)

    def stop(self) -> None:
        pass


def with_telemetry(config, **fields):
    config.telemetry = TelemetrySection(**fields)
    return config


def gauge(agent, line: str) -> bool:
    return line in agent.metrics.exposition().decode().splitlines()


def test_simulated_engines_have_simulated_telemetry_once_a_second(on_stage, config_of, engine_of, body_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1", engine_of(count=2)))
        await asyncio.sleep(3.5)
        idle = list(stage.heard.telemetry)
        stage.run(agent, body_of(max_tokens=2000))
        await asyncio.sleep(3.0)
        return idle, stage.heard.telemetry[-1], stage.heard.beats[-1], agent

    idle, busy, beat, agent = on_stage(play)
    assert [told.number for told in idle] == [1, 2, 3]
    assert {(told.node, told.source, told.degraded) for told in idle} == {("n1", "simulated", "")}
    assert [(gpu.index, gpu.workers, gpu.power_w) for gpu in idle[-1].gpus] == [
        (0, ("n1-0",), 70.0),
        (1, ("n1-1",), 70.0),
    ]
    assert busy.gpus[0].power_w > 600.0
    assert busy.gpus[0].busy_share > 0.9
    assert 30.0 < busy.gpus[0].temperature_c < 80.0
    assert (busy.gpus[0].sm_mhz, busy.gpus[0].replays, busy.gpus[0].reasons) == (None, None, ())
    assert word.THROTTLED.of(beat.workers[0].word) == word.CONGESTED.of(beat.workers[0].word) == 0
    assert gauge(agent, 'quartet_agent_gpu_sm_mhz{gpu="1"} NaN')


def test_kv_that_is_moved_shows_on_the_simulated_nic(on_stage, config_of, engine_of):
    async def play(stage):
        agent = await stage.agent(config_of("n1", engine_of()))
        agent.arrivals.tokens_of["n1-0"] = 10_000
        agent._sent_bytes["n1-0"] = 4_500_000_000
        await asyncio.sleep(1.5)
        return stage.heard.telemetry[-1]

    told = on_stage(play)
    # the first message has no rate of the NIC yet; the card's is of the time since the agent's start
    assert [(nic.name, nic.root, nic.gbit_per_s, nic.rx_gb_per_s) for nic in told.nics] == [
        ("sim0", "simulated", 72.0, None)
    ]
    assert (told.nics[0].rx_bytes, told.nics[0].tx_bytes) == (10_000 * 131_072, 4_500_000_000)
    assert told.gpus[0].pcie_tx_gb_per_s == pytest.approx(4.5)


def test_a_hot_card_reaches_the_word_after_three_readings_and_leaves_it_after_five_cool_ones(on_stage, config_of):
    played = Played()

    async def play(stage):
        agent = await stage.agent(
            with_telemetry(config_of("n1"), source="nvml"), real_readings=lambda config: (PLACES, played)
        )
        said = []
        for gpu, seconds in ((COOL, 2), (HOT, 2), (HOT, 1), (COOL, 4), (COOL, 1)):
            played.gpus = (gpu,)
            await asyncio.sleep(seconds)
            await asyncio.sleep(0.02)  # a beat or two
            said.append(
                (
                    bool(word.THROTTLED.of(stage.heard.beats[-1].workers[0].word)),
                    stage.heard.telemetry[-1].gpus[0].throttled,
                )
            )
            if gpu is HOT and seconds == 1:
                assert gauge(agent, 'quartet_agent_gpu_throttled{gpu="0"} 1.0')
        return said, stage.heard.telemetry[-1]

    said, told = on_stage(play)
    assert said == [(False, False), (False, False), (True, True), (True, True), (False, False)]
    assert (told.source, told.gpus[0].root, told.gpus[0].workers) == ("nvml", "pci0000:15", ("n1-0",))


def test_a_driver_that_is_stuck_degrades_telemetry_and_its_old_news_is_forgotten(on_stage, config_of):
    played = Played()
    played.gpus = (HOT,)

    async def play(stage):
        agent = await stage.agent(
            with_telemetry(config_of("n1"), source="nvml"), real_readings=lambda config: (PLACES, played)
        )
        await asyncio.sleep(4.1)
        hot, last_s = stage.heard.beats[-1].workers[0].word, asyncio.get_running_loop().time()
        played.stuck = Taken(None, last_s, 5_000.0, "the driver has not answered for 5 s")
        await asyncio.sleep(1.0)
        stuck, still = stage.heard.telemetry[-1], stage.heard.beats[-1].workers[0].word
        assert gauge(agent, "quartet_agent_telemetry_degraded 1.0")
        played.stuck = Taken(None, last_s, 31_000.0, "the driver has not answered for 31 s")
        await asyncio.sleep(1.1)
        return hot, stuck, still, stage.heard.beats[-1].workers[0].word

    hot, stuck, still, forgotten = on_stage(play)
    assert [word.THROTTLED.of(state) for state in (hot, still, forgotten)] == [1, 1, 0]
    assert (stuck.degraded, stuck.age_ms, stuck.gpus[0].power_w) == (
        "the driver has not answered for 5 s",
        5_000.0,
        500.0,
    )


def test_a_driver_that_is_gone_leaves_no_flag_behind(on_stage, config_of):
    played = Played()
    played.gpus = (HOT,)

    async def play(stage):
        await stage.agent(with_telemetry(config_of("n1"), source="nvml"), real_readings=lambda config: (PLACES, played))
        await asyncio.sleep(4.1)
        hot = stage.heard.beats[-1].workers[0].word
        played.gpus, played.trouble = (), "NVML does not answer"  # there are readings, and no card in them
        await asyncio.sleep(20.0)
        held = stage.heard.beats[-1].workers[0].word
        await asyncio.sleep(12.0)
        return [word.THROTTLED.of(state) for state in (hot, held, stage.heard.beats[-1].workers[0].word)]

    assert on_stage(play) == [1, 1, 0]


def nic(name: str, gigabytes: float) -> NicReading:
    return NicReading(name=name, rx_bytes=int(gigabytes * 1e9), tx_bytes=0, gbit_per_s=200.0)


@pytest.mark.parametrize(
    ("busy_nic", "alarms", "ends_by"), [("ens0", True, "relief"), ("ens0", True, "silence"), ("eno1", False, "relief")]
)
def test_a_worker_that_suffers_from_the_nic_beside_it_is_congested_and_told_of(
    on_stage, config_of, engine_of, body_of, busy_nic, alarms, ends_by
):
    played = Played()

    async def play(stage):
        agent = await stage.agent(
            with_telemetry(config_of("n1", engine_of(time_scale=5.0)), source="nvml", contention_window=120),
            beat_s=0.05,
            real_readings=lambda config: (PLACES, played),
        )
        engine = agent.workers["n1-0"].adapter._engine
        stage.run(agent, body_of(max_tokens=20_000))
        carried = {"ens0": 0.0, "eno1": 0.0}
        for second in range(240):
            busy = second // 15 % 2 == 1
            carried[busy_nic] += 20.0 if busy else 0.1  # of 25 GB/s
            engine.time_scale = 10.0 if busy else 5.0
            played.nics = tuple(nic(name, total) for name, total in carried.items())
            await asyncio.sleep(1.0)
        suffering = stage.heard.telemetry[-1], stage.heard.beats[-1].workers[0].word
        shown = gauge(agent, 'quartet_agent_root_congested{nic="ens0",root="pci0000:15",worker="n1-0"} 1.0')
        engine.time_scale = 5.0
        if ends_by == "silence":
            stage.cancel()  # the worker has nothing to do any more, so nothing more is learned
        for _ in range(240):  # the NIC falls silent
            await asyncio.sleep(1.0)
        return suffering, shown, stage.heard.telemetry[-1], stage.heard.beats[-1].workers[0].word

    (told, state), shown, after, state_after = on_stage(play)
    assert [(a.root, a.worker, a.nic) for a in told.alerts] == ([("pci0000:15", "n1-0", "ens0")] if alarms else [])
    assert (word.CONGESTED.of(state), shown) == (alarms, alarms)
    if alarms:
        assert told.alerts[0].drift_busy / told.alerts[0].drift_quiet > 1.5
        assert (after.alerts, word.CONGESTED.of(state_after)) == ((), 0)


def test_no_telemetry_where_none_is_wanted_or_there_is_no_engine(on_stage, config_of):
    async def play(stage):
        await stage.agent(with_telemetry(config_of("n1"), source="none"))
        await asyncio.sleep(3.0)
        return stage.heard.telemetry

    assert on_stage(play) == []


@pytest.mark.parametrize(
    ("fields", "key"), [({"pcie_low": 0.9}, "telemetry.pcie_low"), ({"source": "nvml"}, "telemetry.source")]
)
def test_settings_that_cannot_be_stop_the_start(on_stage, config_of, fields, key):
    async def play(stage):
        with pytest.raises(ConfigError, match=key):
            await stage.agent(with_telemetry(config_of("n1"), **fields))

    on_stage(play)


def test_nvml_that_is_asked_for_by_name_and_missing_stops_the_start_and_says_what_to_install(monkeypatch, config_of):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    config = with_telemetry(config_of("n1"), source="nvml")
    with pytest.raises(ConfigError, match=r"telemetry.source = 'nvml': .*pip install 'quartet-agent\[nvml\]'"):
        real_readings(config)
    config.telemetry.source = "auto"
    _, port = real_readings(config)  # a degraded telemetry is better than no agent
    assert port.source == "nvml"
