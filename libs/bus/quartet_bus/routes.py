"""Which subscriptions a subject reaches: NATS subject patterns, without a broker."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_CACHE_SUBJECTS = 4096


def matches(pattern: str, subject: str) -> bool:
    """Whether ``subject`` is in ``pattern``: ``*`` stands for one token, ``>`` for one or more at the end."""
    wanted = pattern.split(".")
    tokens = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


class _Node(Generic[T]):
    __slots__ = ("entries", "next")

    def __init__(self) -> None:
        self.next: dict[str, _Node[T]] = {}
        self.entries: list[tuple[int, T]] = []


class Routes(Generic[T]):
    """Patterns and what is registered under them, as a tree of tokens. ``find`` answers in order of registration."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._added = 0
        self._found: dict[str, tuple[T, ...]] = {}

    def add(self, pattern: str, entry: T) -> None:
        """Register ``entry`` under ``pattern``."""
        node = self._root
        for token in pattern.split("."):
            node = node.next.setdefault(token, _Node())
        self._added += 1
        node.entries.append((self._added, entry))
        self._found.clear()

    def remove(self, pattern: str, entry: T) -> None:
        """Take back one ``add`` of the very same object; unknown ones are ignored."""
        path = [self._root]
        tokens = pattern.split(".")
        for token in tokens:
            node = path[-1].next.get(token)
            if node is None:
                return
            path.append(node)
        path[-1].entries = [known for known in path[-1].entries if known[1] is not entry]
        for token, parent, child in zip(reversed(tokens), reversed(path[:-1]), reversed(path[1:]), strict=True):
            if child.entries or child.next:
                break
            del parent.next[token]
        self._found.clear()

    def find(self, subject: str) -> tuple[T, ...]:
        """All entries whose pattern contains ``subject``, first registered first."""
        found = self._found.get(subject)
        if found is None:
            numbered = sorted(_walk(self._root, subject.split("."), 0), key=lambda known: known[0])
            found = tuple(entry for _, entry in numbered)
            if len(self._found) >= _CACHE_SUBJECTS:
                self._found.clear()
            self._found[subject] = found
        return found


def _walk(node: _Node[T], tokens: list[str], index: int) -> Iterator[tuple[int, T]]:
    if index == len(tokens):
        yield from node.entries
        return
    rest = node.next.get(">")
    if rest is not None:
        yield from rest.entries
    for token in (tokens[index], "*"):
        child = node.next.get(token)
        if child is not None:
            yield from _walk(child, tokens, index + 1)
