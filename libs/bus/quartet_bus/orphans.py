"""Processes that do not outlive the one that started them, however it ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def follow_parent() -> Callable[[], None]:
    """A ``preexec_fn``: the process is asked to end (SIGTERM) when the thread that starts it is gone, by SIGKILL too.

    Linux only; elsewhere it does nothing, and a parent that is killed leaves its children. All that can fail or
    allocate is done here, before the fork: the child shares our locks, but not the threads that would release them.
    """
    if sys.platform != "linux":
        return lambda: None
    parent = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    arguments = _PR_SET_PDEATHSIG, signal.SIGTERM.value, 0, 0, 0

    def follow() -> None:
        prctl(*arguments)
        if os.getppid() != parent:  # it died before it could be followed
            os._exit(1)

    return follow
