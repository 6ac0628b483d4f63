import asyncio
import os
import signal

import pytest

from quartet_cli.running import until_done


async def forever(log: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(3600)
    finally:
        log.append("stopped")
    return 0


def test_the_exit_code_is_the_works():
    async def work() -> int:
        return 3

    assert until_done(work()) == 3


def test_a_signal_ends_the_work_in_order():
    log: list[str] = []
    assert until_done(forever(log)) == 128 + signal.SIGTERM
    assert log == ["stopped"]


def test_where_a_signal_is_the_usual_end_it_is_no_failure():
    assert until_done(forever([]), interrupted=0) == 0


def test_a_second_signal_does_not_interrupt_the_stopping(capsys):
    log: list[str] = []

    async def work() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
            log.append("stopped")
        return 0

    assert until_done(work()) == 130
    assert log == ["stopped"]
    assert "stopping already" in capsys.readouterr().err


def test_a_cancellation_of_the_works_own_is_not_taken_for_a_signal():
    async def work() -> int:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        until_done(work())
