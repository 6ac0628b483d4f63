"""``quartet publish``: one request over NATS, its answer streamed to standard output."""

import argparse
import sys
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from quartet_bus import nats_bus
from quartet_bus.client import Client
from quartet_bus.config.schema import NatsSection
from quartet_bus.headers import RequestHeaders
from quartet_cli.commands import options
from quartet_cli.errors import CommandFailed
from quartet_cli.running import until_done

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_CONNECT_MS = 5_000


class _Choice(Struct):
    text: str = ""


class _Chunk(Struct):
    choices: tuple[_Choice, ...] = ()


def add_to(commands: "Commands") -> None:
    """Declare ``publish``."""
    parser = commands.add_parser(
        "publish", help="send one request over NATS and stream its answer", description=__doc__
    )
    parser.add_argument("model")
    parser.add_argument("prompt", help="text; - reads it from standard input")
    parser.add_argument(
        "--max-tokens", type=options.positive, default=64, metavar="N", help="length of the answer [64]"
    )
    parser.add_argument("--tenant", default=options.DEFAULT_TENANT, help=f"who asks [{options.DEFAULT_TENANT}]")
    parser.add_argument("--id", default="", help="request id, for `quartet explain` [a random one]")
    parser.add_argument("--no-hold", action="store_true", help="dispatch or refuse at once")
    parser.add_argument("--chunks", action="store_true", help="print the engine's JSON chunks instead of their text")
    options.add_nats(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise CommandFailed("the prompt is empty", 2)
    return until_done(_publish(arguments, prompt))


async def _publish(arguments: argparse.Namespace, prompt: str) -> int:
    body = {"model": arguments.model, "prompt": prompt, "max_tokens": arguments.max_tokens, "stream": True}
    section = NatsSection(url=arguments.nats, connect_timeout_ms=_CONNECT_MS)
    bus = await nats_bus.connect(section, name="quartet-publish")
    try:
        client = Client(bus, arguments.tenant)
        headers = RequestHeaders(request_id=arguments.id, no_hold=arguments.no_hold)
        async with await client.infer(arguments.model, msgspec.json.encode(body), headers=headers) as answer:
            try:
                async for chunk in answer:
                    sys.stdout.write(chunk.decode() + "\n" if arguments.chunks else _text(chunk))
                    sys.stdout.flush()
            finally:  # an error begins on a line of its own
                sys.stdout.write("" if arguments.chunks else "\n")
                sys.stdout.flush()
        end = answer.end
        if end is not None:
            print(
                f"{answer.id}: {answer.worker}, {end.prompt_tokens} prompt tokens ({end.cached_tokens} cached), "
                f"{end.output_tokens} output tokens",
                file=sys.stderr,
            )
    finally:
        await bus.close()
    return 0


def _text(chunk: bytes) -> str:
    return "".join(choice.text for choice in msgspec.json.decode(chunk, type=_Chunk).choices)
