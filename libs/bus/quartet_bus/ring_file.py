"""The file under a ring: its layout, who may have it, and how a dead writer's is told from a living one's.

Whether a writer lives is told by a lock on the file, which the kernel drops with the process: process ids mean nothing
between the containers of a pod.
"""

import contextlib
import fcntl
import os
import stat
import time

MAGIC = int.from_bytes(b"QRTRING\n", "little")
VERSION = 1
HEADER_BYTES = 128
SMALLEST_BYTES = 4096

# Words of the header, in units of 8 bytes, and the first word behind it.
W_MAGIC, W_VERSION, W_DATA_BYTES, W_PID, W_INCARNATION, W_HEAD, W_TAIL, W_CLOSED = range(8)
W_DATA = HEADER_BYTES // 8

_TAKEOVER_TRIES = 5
_TAKEOVER_PAUSE_S = 0.002


class RingError(Exception):
    """Something a ring could not do; ``path`` is its file."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"ring {path}: {text}")
        self.path = path


class RingInUse(RingError):
    """Another writer, process ``pid`` in its own namespace, is alive on this path."""

    def __init__(self, path: str, pid: int) -> None:
        super().__init__(path, f"process {pid} writes it; stop it, or set another [fleet] ring_path")
        self.pid = pid


class RingUnusable(RingError):
    """The path cannot be a ring for us; ``reason`` says why. Whatever lies there was left alone."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.reason = reason


class RecordTooLarge(RingError):
    """A record of ``size_bytes`` was not written, because the ring takes at most ``limit_bytes``."""

    def __init__(self, path: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(path, f"a record of {size_bytes} bytes is over the limit of {limit_bytes}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


def create(path: str) -> int:
    """A locked descriptor of a new, empty file at ``path`` that is ours alone."""
    for _ in range(_TAKEOVER_TRIES):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if not _remove_dead(path):
                time.sleep(_TAKEOVER_PAUSE_S)  # a reader may be asking the lock this very moment (writer_alive)
            continue
        except OSError as error:
            raise RingUnusable(path, f"cannot be created: {error.strerror}") from error
        # Between open and lock another starter may have taken our empty file for a dead writer's, and removed it.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.lstat(path), os.fstat(fd)):
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
    raise RingInUse(path, _pid_in(path))


def allocate(fd: int, size_bytes: int) -> None:
    """Give the file its size, and (where the system can) its memory: a full tmpfs must fail here, not as SIGBUS later.

    Raises ``OSError``.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
    else:
        os.ftruncate(fd, size_bytes)


def _remove_dead(path: str) -> bool:
    """Remove a dead writer's file; False when the writer lives. Raises ``RingUnusable`` for what is no ring."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise RingUnusable(path, f"is there and cannot be opened: {error.strerror}") from error
    try:
        head = os.read(fd, HEADER_BYTES)
        if not stat.S_ISREG(os.fstat(fd).st_mode) or (any(head) and int.from_bytes(head[:8], "little") != MAGIC):
            # An unfinished ring is empty or all zero; anything else is somebody's data.
            raise RingUnusable(path, "is there and is no ring; remove it, or set another [fleet] ring_path")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if os.path.samestat(os.lstat(path), os.fstat(fd)):
            os.unlink(path)
        return True
    except FileNotFoundError:
        return True
    finally:
        os.close(fd)


def _pid_in(path: str) -> int:
    """The process id in the header of the ring at ``path``; 0 when it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return int.from_bytes(file.read(HEADER_BYTES)[W_PID * 8 : W_PID * 8 + 8], "little")
    return 0


def checked_size(path: str, fd: int) -> int:
    """The size of a file that may be mapped: regular, whole words, and ours (or root is reading)."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise RingUnusable(path, "is not a regular file")
    if os.geteuid() not in (0, status.st_uid):
        raise RingUnusable(path, f"belongs to user {status.st_uid}")
    if status.st_size < HEADER_BYTES + 8 or status.st_size % 8:
        raise RingUnusable(path, f"has {status.st_size} bytes, which no ring has")
    return status.st_size
