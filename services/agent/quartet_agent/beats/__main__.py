"""``python -m quartet_agent.beats``: started by the agent, never by hand. Settings and orders come on stdin."""

import sys

import msgspec

from quartet_agent.beats.child import BeatSettings, run


def main() -> int:
    """Beat until the parent is gone; 1 and a line on standard error when beating cannot begin."""
    try:
        orders = sys.stdin.buffer
        run(msgspec.json.decode(orders.readline(), type=BeatSettings), orders)
    except (msgspec.DecodeError, ValueError, OSError) as error:
        sys.stderr.write(f"quartet-agent beats: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
