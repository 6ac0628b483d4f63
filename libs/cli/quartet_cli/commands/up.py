"""``quartet up``: a whole fleet on this machine, until Ctrl-C."""

import argparse
import asyncio
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quartet_bus import subjects
from quartet_cli.commands import options
from quartet_cli.errors import CommandFailed
from quartet_cli.fleet.launch import Fleet
from quartet_cli.fleet.layout import ring_path
from quartet_cli.fleet.progress import StartLine
from quartet_cli.running import until_done

if TYPE_CHECKING:
    from quartet_cli.commands import Commands

_MODEL = "llama-8b"

_TEXT = """
The fleet is up: 3 nodes, 24 cards; models {models}.

  gateway      {gateway}   (OpenAI's API)
  admin gRPC   {admin}
  KV gRPC      {coordinator}
  NATS         {nats}
  ring         {ring}
  logs         {directory}/*.log

Ask it with curl:

curl -N {gateway}/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "stream": true, "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}]}}'

with the openai package:

{python} - <<'END'
import openai
client = openai.OpenAI(base_url="{gateway}", api_key="none")
for chunk in client.chat.completions.create(
    model="{model}", stream=True, max_tokens=16, messages=[{{"role": "user", "content": "Hello"}}]
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
END

on NATS, with our client library:

{quartet} publish --nats {nats} {model} 'Hello' --max-tokens 16

on NATS, with nothing but nats-py:

{python} - <<'END'
import asyncio, json, nats, secrets
async def main():
    connection = await nats.connect("{nats}")
    inbox = "{inbox}" + secrets.token_hex(16)
    frames = await connection.subscribe(inbox)
    body = {{"prompt": "Hello", "max_tokens": 16, "stream": True}}
    await connection.publish("{subject}", json.dumps(body).encode(), reply=inbox)
    async for message in frames.messages:
        print(message.data.decode())
        if json.loads(message.data)["frame"] in ("end", "error"):
            break
    await connection.close()
asyncio.run(main())
END

See it with: {quartet} fleet --admin {admin}
        and: {quartet} watch --admin {admin}, {quartet} dry-run round-robin --admin {admin}
        and: {quartet} doctor --nats {nats}, {quartet} kv links --coordinator {coordinator}
Ctrl-C stops all of it.
"""


def add_to(commands: "Commands") -> None:
    """Declare ``up``."""
    parser = commands.add_parser("up", help="run a whole fleet on this machine until Ctrl-C", description=__doc__)
    options.add_fleet(parser, ports="default")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    return until_done(_up(arguments), interrupted=0)


async def _up(arguments: argparse.Namespace) -> int:
    async with Fleet(options.fleet_options(arguments), StartLine()) as fleet:
        print(how_to_use(fleet), flush=True)
        try:
            while fleet.alive:
                # The others go on, as they would on machines of their own.
                print((await fleet.first_death()).obituary(), file=sys.stderr, flush=True)
        except asyncio.CancelledError:
            print("stopping", file=sys.stderr, flush=True)
            raise
    raise CommandFailed("every process of the fleet has ended")


def how_to_use(fleet: Fleet) -> str:
    """Where everything is, and lines that work when they are pasted."""
    return _TEXT.format(
        models=", ".join(fleet.config.models),
        gateway=fleet.doors.gateway_url,
        admin=fleet.doors.admin_address,
        coordinator=fleet.doors.coordinator_address,
        nats=fleet.nats_url,
        ring=ring_path(fleet.directory),
        directory=fleet.directory,
        model=_MODEL,
        inbox=subjects.inbox_prefix(options.DEFAULT_TENANT),
        subject=subjects.infer(options.DEFAULT_TENANT, _MODEL).subject,
        python=_from_here(Path(sys.executable)),
        quartet=_from_here(Path(sys.argv[0])) if sys.argv[0].endswith("quartet") else "quartet",
    )


def _from_here(program: Path) -> str:
    """``program`` as one would type it here."""
    here = Path.cwd()
    return shlex.quote(str(program.relative_to(here) if program.is_relative_to(here) else program))
