"""Has the kernel drop packets from some addresses before they become connections. Linux only, and without privileges.

The filter is a classic BPF program on the listening socket. A caller whose packets are dropped repeats them, so that it
connects once its address is allowed again, seconds later; connections that exist are not affected.
"""

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; Python has no names for them
# Instructions: load a word or byte, compare bits or jump, return. Linux: Documentation/networking/filter.rst.
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x05, 0x15, 0x06
_IP_HEADER = 0xFFF00000  # where an address in a packet is counted from
_SOURCE_OF_V4, _SOURCE_OF_V6 = _IP_HEADER + 12, _IP_HEADER + 8
_DROP, _ACCEPT = 0, 0xFFFFFFFF


def drop_packets(listener: socket.socket, networks: Sequence[Network]) -> None:
    """Drops all packets to a listening socket from these networks, and accepts all others.

    Of an IPv6 network, the first 64 bits count; of one of IPv4, the address.

    Raises:
      OSError: The system has no such filters.
    """
    if not networks:
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        return
    program = _program(networks)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    # struct sock_fprog: the number of instructions, and where they are
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def _program(networks: Sequence[Network]) -> list[tuple[int, int, int, int]]:
    """Returns instructions: code, how many to skip if a comparison holds and if not, argument."""
    v4, v6 = [(_LOAD_WORD, 0, 0, _SOURCE_OF_V4)], []
    for network in networks:
        address = network.network_address.packed
        if network.version == 4:
            v4 += [(_JUMP_IF_EQUAL, 0, 1, int.from_bytes(address)), (_RETURN, 0, 0, _DROP)]
        else:
            v6 += [
                (_LOAD_WORD, 0, 0, _SOURCE_OF_V6),
                (_JUMP_IF_EQUAL, 0, 3, int.from_bytes(address[:4])),
                (_LOAD_WORD, 0, 0, _SOURCE_OF_V6 + 4),
                (_JUMP_IF_EQUAL, 0, 1, int.from_bytes(address[4:8])),
                (_RETURN, 0, 0, _DROP),
            ]
    accept = (_RETURN, 0, 0, _ACCEPT)
    version = [(_LOAD_BYTE, 0, 0, _IP_HEADER), (_AND, 0, 0, 0xF0), (_JUMP_IF_EQUAL, 1, 0, 0x40)]
    return [*version, (_JUMP, 0, 0, len(v4) + 1), *v4, accept, *v6, accept]
