"""Reading sysfs: small files that may be absent, unreadable, or say that they do not know."""

from pathlib import Path

SYS = Path("/sys")


def text(file: Path) -> str:
    """What stands in ``file``, without white space around it; "" when nothing can be read there.

    A file of sysfs may exist and yet fail when read: the speed of a link that is down is EINVAL.
    """
    try:
        return file.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def number(file: Path, base: int = 10) -> int | None:
    """The whole number in ``file``; None when there is none."""
    try:
        return int(text(file), base)
    except ValueError:
        return None


def names(folder: Path) -> list[str]:
    """What is in ``folder``, sorted; nothing when it is not there."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
