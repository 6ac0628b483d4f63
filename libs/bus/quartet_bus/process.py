"""One service as one process: what every ``__main__`` calls.

Exit codes: 0 after SIGTERM or SIGINT, 2 when the configuration is wrong, 1 for anything else, each with one line on
standard error that says what and where.
"""

import argparse
import asyncio
import errno
import gc
import random
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import uvloop

from quartet_bus import logs
from quartet_bus.bus import Bus, BusError
from quartet_bus.config.load import ConfigError, load
from quartet_bus.config.schema import Config
from quartet_bus.http import HttpDoor
from quartet_bus.nats_bus import NatsBus
from quartet_bus.service import Service

Make = Callable[[Bus, Config, str, random.Random], Service]
"""Makes the service from bus, configuration, instance name and random source. A ``Service`` class will do, too."""

Edges = Callable[[Any], AbstractAsyncContextManager[Any]]
"""What only a real process has (sockets, gRPC, HTTP, threads), entered after the service started."""


T = TypeVar("T")

_CANNOT_LISTEN = frozenset((errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL))


class Fault(Exception):
    """The process cannot go on; the text is the one line that says why."""


def run(make: Make | type[Service], edges: Edges | None = None, *, argv: list[str] | None = None) -> NoReturn:
    """Run one service until SIGTERM or SIGINT ends it, then exit.

    Arguments: ``--config FILE``, repeatable, later files win; ``QUARTET_<SECTION>__<KEY>`` variables win over files.
    """
    parser = argparse.ArgumentParser(description=f"Quartet {_name_of(make)}.")
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=[], type=Path, help="a quartet.toml; may be given again"
    )
    arguments = parser.parse_args(argv)
    try:
        config = load(arguments.config)
        instance = config.service.instance or secrets.token_hex(4)
        logs.configure(config.service.log_level, service=_name_of(make), instance=instance)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_live(make, edges, config, instance))
    except ConfigError as error:
        _last_line(make, error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(0)
    except (Fault, BusError) as error:
        _last_line(make, error)
        sys.exit(1)
    except Exception as error:
        logs.logger().debug("ended by", exc_info=error)
        _last_line(make, f"{type(error).__name__}: {error}")
        sys.exit(1)
    sys.exit(0)


async def _live(make: Make | type[Service], edges: Edges | None, config: Config, instance: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        bus = NatsBus(config.nats, name=f"{_name_of(make)}-{instance}")
        stack.push_async_callback(bus.close)
        if isinstance(make, type):
            service = make(bus, config, instance=instance, random=random.Random())
        else:
            service = make(bus, config, instance, random.Random())
        logs.configure(config.service.log_level, service=service.name, instance=service.instance)
        _watch(service, bus)
        where = f" on {config.service.http_host}:{config.service.http_port}"
        door = await _enter(stack, _door(service, bus, config), where)
        if not await _unless_stopped(bus.open(), stop):
            return
        stack.push_async_callback(_stop, service, config.service.stop_timeout_ms / 1000)
        await service.start()
        if edges is not None:
            await _enter(stack, edges(service), "")
        # What lives now lives long: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()
        service.log.info("started", http=f"{door.host}:{door.port}", nats=config.nats.url)
        await stop.wait()
        service.log.info("stopping")
    logs.logger().info("stopped")


def _door(service: Service, bus: Bus, config: Config) -> HttpDoor:
    def not_ready() -> str | None:
        return service.not_ready() if bus.connected else f"no NATS broker at {config.nats.url}"

    section = config.service
    return HttpDoor(section.http_host, section.http_port, not_ready=not_ready, metrics=service.metrics.exposition)


def _watch(service: Service, bus: NatsBus) -> None:
    service.metrics.watch_process()
    counts = bus.counts
    for name, help, read in (
        ("bus_connected", "1 while there is a connection to the broker.", lambda: float(bus.connected)),
        ("bus_reconnects", "Connections made anew.", lambda: float(counts.reconnects)),
    ):
        service.metrics.gauge(name, help).set_function(read)


async def _unless_stopped(work: Any, stop: asyncio.Event) -> bool:
    """Whether ``work`` was done before a signal came. Raises what it raises."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        working.result()
        return True
    working.cancel()
    await asyncio.wait([working])
    return False


async def _stop(service: Service, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await service.stop()
    except TimeoutError:
        service.log.error("did not stop in time", timeout_s=timeout_s)


async def _enter(stack: AsyncExitStack, context: AbstractAsyncContextManager[T], where: str) -> T:
    """Enter something that listens; a port that is taken is one clear line."""
    try:
        return await stack.enter_async_context(context)
    except OSError as error:
        if error.errno in _CANNOT_LISTEN:
            raise Fault(f"cannot listen{where}: {error.strerror or error}") from error
        raise


def _name_of(make: Make | type[Service]) -> str:
    """The service's name before there is a service: its class's, or its package's without ``quartet_``."""
    if isinstance(make, type) and issubclass(make, Service):
        return make.name
    module = getattr(make, "__module__", "")
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if module == "__main__" and spec is not None:  # started with ``python -m``
        module = spec.name
    return str(module).partition(".")[0].removeprefix("quartet_") or "service"


def _last_line(make: Make | type[Service], error: object) -> None:
    print(f"quartet {_name_of(make)}: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
