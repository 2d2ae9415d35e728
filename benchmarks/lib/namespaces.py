"""Emulates hosts with network namespaces, each with its own address, on a bridge shared with this machine."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BRIDGE = "meshserve0"
_NETWORK = "10.77.31"


class Hosts:
    """The hosts with the indices 0 to n - 1."""

    def address(self, index: int) -> str:
        return f"{_NETWORK}.{index + 1}"

    def prefix(self, index: int) -> list[str]:
        """Returns the prefix of a command that is to run on the host."""
        return ["ip", "netns", "exec", _name(index)]

    def cut_off(self, index: int) -> None:
        """Cuts all network traffic to and from the host."""
        _ip("link", "set", f"veth-{_name(index)}", "down")


def _name(index: int) -> str:
    return f"host{index}"


def can_make_hosts() -> bool:
    """Returns whether this user may create network namespaces and iproute2 is installed."""
    try:
        _ip("netns", "add", "host-try")
        _ip("netns", "delete", "host-try")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextlib.contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    """Creates the hosts, and removes them with all their interfaces at the end."""
    made = Hosts()
    with contextlib.ExitStack() as undo:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        undo.callback(_ip, "link", "delete", _BRIDGE)
        _ip("address", "add", f"{_NETWORK}.254/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for index in range(number):
            name, outside = _name(index), f"veth-{_name(index)}"
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "delete", name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            undo.callback(_ip, "link", "delete", outside)
            _ip("link", "set", outside, "master", _BRIDGE, "up")
            for command in (
                ("address", "add", f"{made.address(index)}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-netns", name, *command)
            # `ip netns exec` mounts this file as /etc/hosts, because gloo looks up the address of the machine's own
            # name.
            names = Path("/etc/netns") / name / "hosts"
            names.parent.mkdir(parents=True, exist_ok=True)
            names.write_text(f"127.0.0.1 localhost\n{made.address(index)} {socket.gethostname()}\n")
            undo.callback(names.parent.rmdir)
            undo.callback(names.unlink)
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
