"""The socket that the server listens on, how it is bound, and how it is closed without losing a connection."""

import socket
import struct
import sys
from array import array
from contextlib import suppress

from bert_tasks.errors import UsageError

BACKLOG = 2048  # connections that wait in the kernel
_SO_ATTACH_FILTER = 26  # from Linux' asm-generic/socket.h, which Python's socket module does not name
_FLAGS_BYTE = 13  # of a TCP header
_SYN = 2
_WHOLE_PACKET = 0xFFFFFFFF
# A program of the classic Berkeley packet filter: (operation, jump if true, jump if false, value) of each instruction.
# Source: https://www.kernel.org/doc/html/latest/networking/filter.html
_DROP_SYN = (
    (0x30, 0, 0, _FLAGS_BYTE),  # load the byte of the flags
    (0x45, 0, 1, _SYN),  # go on if SYN is set, else skip one instruction
    (0x06, 0, 0, 0),  # return 0: drop the packet
    (0x06, 0, 0, _WHOLE_PACKET),  # keep the packet
)


def bound_listener(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the address and listens.

    Raises:
        UsageError: The address is in use, is not one of this machine, or is not permitted.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = addresses[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, OverflowError, ValueError) as error:  # ValueError is for a name such as a..b, which no host has
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port} ({reason}). Choose another --port or --host") from None


def ignore_new_connections(listener: socket.socket) -> None:
    """Lets the kernel drop the first packet of each new connection, before the listener is closed.

    When a listener is closed, the kernel resets the connections that are established but not accepted yet, although
    their clients may already have sent a request. With this filter no further connection is established, so that the
    listener can be closed when those that wait have been accepted. A client whose packet was dropped sends it again
    after a second. It then reaches a closed port, and tries another server.

    Other systems than Linux have no such filter. There a connection that is made in the instant before the listener is
    closed may be reset.
    """
    if not sys.platform.startswith("linux"):
        return
    instructions = array("B")
    for instruction in _DROP_SYN:
        instructions.frombytes(struct.pack("HBBI", *instruction))
    address, _ = instructions.buffer_info()
    with suppress(OSError):  # a sandbox may forbid filters
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), address))
