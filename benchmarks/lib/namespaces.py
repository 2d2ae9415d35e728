"""Network namespaces as hosts: each with an address of its own, on one bridge that this machine is on as well."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BRIDGE = "meshserve0"
_NETWORK = "10.77.31"


class Hosts:
    """Hosts number 0 to n - 1."""

    def address(self, index: int) -> str:
        return f"{_NETWORK}.{index + 1}"

    def prefix(self, index: int) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", _name(index)]

    def cut_off(self, index: int) -> None:
        """Nothing reaches it or comes from it any more."""
        _ip("link", "set", f"veth-{_name(index)}", "down")


def _name(index: int) -> str:
    return f"host{index}"


def can_make_hosts() -> bool:
    """Whether this user may, and iproute2 is installed."""
    try:
        _ip("netns", "add", "host-try")
        _ip("netns", "delete", "host-try")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextlib.contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    """Makes them, and removes them with all their interfaces."""
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
            # `ip netns exec` puts this in the place of /etc/hosts: gloo asks for the address of the machine's own name.
            names = Path("/etc/netns") / name / "hosts"
            names.parent.mkdir(parents=True, exist_ok=True)
            names.write_text(f"127.0.0.1 localhost\n{made.address(index)} {socket.gethostname()}\n")
            undo.callback(names.parent.rmdir)
            undo.callback(names.unlink)
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
