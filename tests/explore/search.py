"""Every world within a number of faults, breadth first, each one once, and each brought to rest from where it is.

python -m explore.search [--faults N] [--limit WORLDS] [--at-once | --pages]      (``make explore``)
"""

import argparse
import copyreg
import gc
import io
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from explore.pages import PageWorld
from explore.world import World


@dataclass
class Found:
    """What an exploration covered."""

    worlds: int = 0
    steps: int = 0
    drained: int = 0
    depth: int = 0
    left: int = 0
    machine: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)


class Broken(AssertionError):
    """An invariant does not hold; the message has the whole story that led there."""


def explore(
    faults: int, *, limit: int = 10**9, transfers: int = 1, kind: Callable[..., World] = World, tell=None
) -> Found:
    """Breadth first from the beginning of a ``kind`` of world. ``limit`` bounds the worlds; ``left`` says how many were
    not looked into.

    A story is shortest for the fault that it shows. Raises ``Broken``.
    """
    gc.set_threshold(100_000, 20, 100)  # a world is full of cycles, and dropped whole
    found = Found()
    first = kind(faults, transfers=transfers, room=transfers)
    seen = {hash(first.key())}
    edge: list[tuple[bytes, tuple]] = [_frozen(first)]
    while edge:
        found.depth += 1
        following: list[tuple[bytes, tuple]] = []
        for number, frozen in enumerate(edge):
            if len(seen) >= limit:
                found.left = len(edge) - number + len(following)
                return _counted(found, seen)
            for step in _steps(frozen):
                world = _thawed(frozen)
                _take(world, step)
                found.steps += 1
                found.kinds[step[0]] += 1
                key = hash(world.key())
                if key in seen:
                    continue
                seen.add(key)
                found.machine.update({entry.machine.state.value for entry in world.conductor.book})
                at_rest = world.at_rest
                following.append(_frozen(world))
                if at_rest:
                    # whatever may still happen without a fault is a step of its own, and looked at as such
                    found.drained += 1
                    world.story = following[-1][1]
                    _take(world, ("drain",))
        if tell is not None:
            tell(found, len(seen), len(following))
        edge = following
    return _counted(found, seen)


class _Names(pickle.Unpickler):
    """Gives every class that it meets a number: names are most of what unpickling costs."""

    known = 0

    def find_class(self, module: str, name: str):
        if (module, name) not in copyreg._extension_registry:
            _Names.known += 1
            copyreg.add_extension(module, name, _Names.known)
        return super().find_class(module, name)


def _counted(found: Found, seen: set) -> Found:
    found.worlds = len(seen)
    return found


def _frozen(world: World) -> tuple[bytes, tuple]:
    story, world.story = world.story, ()
    frozen = pickle.dumps(world, pickle.HIGHEST_PROTOCOL)
    if b"quartet_" in frozen:
        _Names(io.BytesIO(frozen)).load()
    return frozen, story


def _thawed(frozen: tuple[bytes, tuple]) -> World:
    world: World = pickle.loads(frozen[0])
    world.story = frozen[1]
    return world


def _steps(frozen: tuple[bytes, tuple]) -> list[tuple]:
    return _thawed(frozen).steps()


def _take(world: World, step: tuple) -> None:
    try:
        if step == ("drain",):
            world.drain()
        else:
            world.step(*step)
    except Exception as error:
        raise Broken(f"{error or type(error).__name__}, after:\n{world.tell()}") from error


def main(arguments: list[str] | None = None) -> int:
    """Explore, and print what was covered."""
    parser = argparse.ArgumentParser(prog="make explore", description=__doc__)
    parser.add_argument("--faults", type=int, default=1, help="faults that may happen in one story (1)")
    parser.add_argument("--limit", type=int, default=10**9, help="worlds to look at, at most")
    parser.add_argument("--transfers", type=int, default=1, help="transfers at once (1)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--at-once", action="store_true", help="prompts are computed at once: no move begins before")
    kinds.add_argument("--pages", action="store_true", help="page-outs of the virtual VRAM pool, instead of splits")
    told = parser.parse_args(arguments)
    for faults in range(told.faults + 1):
        begun = time.monotonic()
        found = explore(
            faults,
            limit=told.limit,
            transfers=told.transfers,
            kind=PageWorld if told.pages else partial(World, parts=not told.at_once),
            tell=lambda f, seen, edge: print(f"  depth {f.depth}: {seen} worlds, {edge} new", file=sys.stderr),
        )
        took_s = time.monotonic() - begun
        whole = "all of them" if not found.left else f"not all: {found.left} were not looked into"
        print(
            f"{faults} faults: {found.worlds} worlds ({whole}), {found.steps} steps, {found.drained} brought to rest, "
            f"{found.depth} deep, {took_s:.0f} s"
        )
        print(f"  states of the machine: {dict(sorted(found.machine.items()))}")
        print(f"  steps: {dict(sorted(found.kinds.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
