"""The thread that asks the driver: whatever the driver does, ``take`` comes back at once."""

import threading

from quartet_agent.telemetry.reader import ThreadReadings
from quartet_core.readings import GpuReading, HostReading


class Driver:
    """A probe that answers when the test lets it."""

    def __init__(self) -> None:
        self.may_answer = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)
        self.answers = 0
        self.error: Exception | None = None

    def read(self) -> HostReading:
        self.asked.release()
        self.may_answer.acquire()
        self.answers += 1
        if self.error is not None:
            raise self.error
        return HostReading(gpus=(GpuReading(index=0, power_w=float(self.answers)),))


class Scene:
    def __init__(self) -> None:
        self.driver = Driver()
        self.now_s = 100.0
        self.readings = ThreadReadings(self.driver, 3.0, lambda: self.now_s)
        self.readings.start()

    def answer(self, *, until) -> None:
        """Let the driver answer once, and wait until that is to be seen."""
        assert self.driver.asked.acquire(timeout=10)
        self.driver.may_answer.release()
        for _ in range(2000):
            if until():
                return
            threading.Event().wait(0.005)
        raise AssertionError("the answer was not seen")

    def answered(self) -> bool:
        done = self.readings._done
        return done is not None and done[0] == self.readings._asked


def test_a_reading_is_given_once_and_the_next_one_begun():
    scene = Scene()
    scene.answer(until=scene.answered)
    scene.now_s += 0.7
    taken = scene.readings.take()
    assert (taken.reading.gpus[0].power_w, taken.at_s, round(taken.age_ms), taken.degraded) == (1.0, 100.0, 700, "")
    scene.answer(until=scene.answered)
    assert scene.readings.take().reading.gpus[0].power_w == 2.0
    scene.driver.may_answer.release()
    scene.readings.stop()


def test_a_driver_that_never_answers_degrades_and_holds_up_nobody():
    scene = Scene()
    assert scene.driver.asked.acquire(timeout=10)
    scene.now_s += 2.0
    assert (scene.readings.take().reading, scene.readings.take().degraded) == (None, "")
    scene.now_s += 8.0
    taken = scene.readings.take()
    assert (taken.reading, round(taken.age_ms), taken.degraded) == (
        None, 10_000, "the driver has not answered for 10 s",
    )  # fmt: skip
    assert not scene.driver.asked.acquire(blocking=False), "a stuck driver is not asked again"
    scene.driver.may_answer.release()
    for _ in range(2000):
        if scene.answered():
            break
        threading.Event().wait(0.005)
    taken = scene.readings.take()
    assert taken.reading is not None
    assert taken.degraded == "the driver took 10.0 s to answer"
    scene.driver.may_answer.release()
    scene.readings.stop()


def test_a_probe_that_fails_is_trouble_and_asked_again():
    scene = Scene()
    scene.driver.error = OSError("no such device")
    scene.answer(until=scene.answered)
    taken = scene.readings.take()
    assert (taken.reading.gpus, taken.degraded) == ((), "OSError: no such device")
    scene.driver.error = None
    scene.answer(until=scene.answered)
    assert scene.readings.take().degraded == ""
    scene.driver.may_answer.release()
    scene.readings.stop()
