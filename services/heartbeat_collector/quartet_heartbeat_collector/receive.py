"""The socket that hears heartbeats, and how a whole batch of them is read at once.

``recvmmsg`` through ctypes fills preallocated rows: one system call for up to 1,024 datagrams. Where it does not exist
(macOS) a plain loop fills the same rows.
"""

import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Callable

import numpy as np

from quartet_bus.config.schema import FleetSection
from quartet_bus.multicast import membership
from quartet_heartbeat_collector.batch import ROW_WORDS, BeatBatch, decode

ROWS = 1024
"""Datagrams read by one call."""

MAX_CALLS = 16
"""Full calls of one ``drain``: 16,384 datagrams take some 15 ms, after which other work of the loop gets its turn."""

_SO_RCVBUFFORCE = 33
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("=9I")
_MEMINFO_DROPS = 8
_IP_MULTICAST_ALL = 49
_LINUX = sys.platform == "linux"


class CannotReceive(Exception):
    """The socket could not be opened on ``address``; ``reason`` says why."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"heartbeats cannot be received on {address}: {reason}")
        self.address = address
        self.reason = reason


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """``struct msghdr`` of Linux on 64 bits."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """``struct mmsghdr``."""

    _fields_ = (("header", _Header), ("received", ctypes.c_uint32))


class Receiver:
    """Hears datagrams on ``[fleet] multicast_group`` and ``port``, or by unicast where ``targets`` are set.

    ``buffer_bytes`` is the socket buffer the kernel granted; ``warning`` is one line for the log when that is less than
    ``receive_buffer_bytes``, else "". Raises ``CannotReceive``.
    """

    def __init__(self, fleet: FleetSection) -> None:
        self._socket = _open(fleet)
        self.address = "{}:{}".format(*self._socket.getsockname())
        self.buffer_bytes = _size_buffer(self._socket, fleet.receive_buffer_bytes)
        self.warning = ""
        if self.buffer_bytes < fleet.receive_buffer_bytes:
            self.warning = (
                f"the kernel grants {self.buffer_bytes} of the {fleet.receive_buffer_bytes} bytes of receive buffer "
                f"asked for; raise net.core.rmem_max, or beats are lost whenever this process is not scheduled"
            )
        self._rows = np.zeros((ROWS, ROW_WORDS), dtype="<u8")
        self._read = self._read_by_call if _recvmmsg is not None else self._read_by_loop
        if _recvmmsg is not None:
            self._lay_out()
        else:
            self._lengths = np.zeros(ROWS, dtype=np.uint32)
            self._views = [row.data.cast("B") for row in self._rows]

    def drain(self, heard: Callable[[BeatBatch], None]) -> int:
        """Read what has arrived, batch by batch, without waiting; return the number of datagrams.

        A batch handed to ``heard`` is good until ``heard`` returns.
        """
        total = 0
        for _ in range(MAX_CALLS):
            number = self._read()
            if number:
                total += number
                heard(decode(self._rows, self._lengths[:number]))
            if number < ROWS:
                break
        return total

    def kernel_drops(self) -> int:
        """Datagrams the kernel dropped because the socket buffer was full, since the start; 0 where it does not say.

        The count of ``SO_RXQ_OVFL``, asked for when wanted instead of delivered with every datagram.
        """
        if not _LINUX:
            return 0
        answer = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        return int(_MEMINFO.unpack(answer)[_MEMINFO_DROPS])

    def close(self) -> None:
        """Hear no more. Closing twice does nothing."""
        self._socket.close()

    def _lay_out(self) -> None:
        """Point every message header at its row, once."""
        self._iovecs = (_Iovec * ROWS)()
        table = np.zeros((ROWS, ctypes.sizeof(_Message) // 4), dtype=np.uint32)
        self._messages = (_Message * ROWS).from_buffer(table.data)
        base, stride = self._rows.ctypes.data, self._rows.strides[0]
        for index, (iovec, message) in enumerate(zip(self._iovecs, self._messages, strict=True)):
            iovec.base = base + index * stride
            iovec.length = stride
            message.header.iov = ctypes.addressof(iovec)
            message.header.iov_length = 1
        self._lengths = table[:, _Message.received.offset // 4]

    def _read_by_call(self) -> int:
        assert _recvmmsg is not None
        number: int = _recvmmsg(self._socket.fileno(), self._messages, ROWS, socket.MSG_DONTWAIT, None)
        if number >= 0:
            return number
        code = ctypes.get_errno()
        # Refused and unreachable are late news about other sockets; they say nothing about this one.
        if code in (
            errno.EAGAIN,
            errno.EINTR,
            errno.ECONNREFUSED,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ENOBUFS,
        ):
            return 0
        raise CannotReceive(self.address, errno.errorcode.get(code, str(code)))

    def _read_by_loop(self) -> int:
        for index, view in enumerate(self._views):
            try:
                self._lengths[index] = self._socket.recv_into(view)
            except (BlockingIOError, InterruptedError):
                return index
        return ROWS


def _open(fleet: FleetSection) -> socket.socket:
    """Multicast: bound to the group, so that nothing else comes in, and shared with other collectors of this host.

    Unicast: bound to ``interface`` alone and never shared, because then only one of two sockets would hear a beat.
    """
    heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    host = fleet.interface if fleet.targets else fleet.multicast_group
    try:
        heard.setblocking(False)
        if not fleet.targets:
            heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not _LINUX:
                heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        heard.bind((host, fleet.port))
        if not fleet.targets:
            joined = membership(fleet.multicast_group, fleet.interface)
            heard.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
            if _LINUX:
                # Otherwise this socket hears every group that anybody on this host joined.
                heard.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
    except OSError as error:
        heard.close()
        raise CannotReceive(
            f"{host}:{fleet.port} (interface {fleet.interface})", error.strerror or str(error)
        ) from None
    return heard


def _size_buffer(heard: socket.socket, wanted_bytes: int) -> int:
    """Ask for a receive buffer, by privilege where we have it, and return what was granted.

    Linux doubles the number for its own bookkeeping and reports the double.
    """
    try:
        heard.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE if _LINUX else socket.SO_RCVBUF, wanted_bytes)
    except PermissionError:
        heard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wanted_bytes)
    granted = heard.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return granted // 2 if _LINUX else granted


def _find_recvmmsg() -> Callable[..., int] | None:
    """The C library's ``recvmmsg``; None where there is none, or where our ``struct mmsghdr`` is not its own."""
    if not _LINUX or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "recvmmsg", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
    call.restype = ctypes.c_int
    found: Callable[..., int] = call
    return found


_recvmmsg = _find_recvmmsg()
