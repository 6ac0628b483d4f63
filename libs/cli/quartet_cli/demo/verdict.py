"""Whether our pass did what it must."""

from quartet_cli.demo.figures import PassFigures


def problems(ours: PassFigures) -> list[str]:
    """Why the demo failed, a line each; empty when it did not."""
    found: list[str] = []
    if not ours.sent:
        found.append("no request was sent")
    if ours.right < ours.sent:
        wrong = ours.sent - ours.right
        found.append(f"{wrong} of {ours.sent} requests were not answered right ({ours.unfinished} of them unfinished)")
        found += [f"  {fault}" for fault in ours.faults]
    if ours.kv.unverified:
        ids = ", ".join(ours.kv.unverified[:5])
        found.append(f"{len(ours.kv.unverified)} split requests decoded without all KV blocks verified: {ids}")
    for name, count in (
        ("split", ours.routing.splits),
        ("hold", ours.routing.holds),
        ("affinity hit", ours.routing.affinity_hits),
    ):
        if not count:
            found.append(f"there was no {name}")
    return found
