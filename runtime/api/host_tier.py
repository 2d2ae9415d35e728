"""The contract between the scheduler and a tier that keeps evicted pages in host memory.

A running request may be fetching: pages of it, which it holds already, are being copied from host memory. It is then in
no plan until `Scheduler.arrived` has booked the last of them. docs/decisions/053-host-cache.md explains the order of
copies and steps.
"""

from collections.abc import Sequence
from typing import Protocol

from .request import Request


class HostTier(Protocol):
    """The pages in host memory. Implemented by `host_cache.HostCache`."""

    def num_found(self, keys: Sequence[bytes]) -> int:
        """Returns how many of `keys`, from the first on, are in host memory."""

    def is_coming(self, key: bytes) -> bool:
        """Returns whether the page of this key is being copied for a request."""

    def begin(self, request: Request, keys: Sequence[bytes]) -> bool:
        """Begins to copy the pages of `keys`, from the first on, to those of a request that has just been placed.

        Returns False if none is in host memory, or if computing them again is faster.
        """

    def abort(self, request: Request) -> None:
        """Ends the copies for a request. Its pages are not written afterwards."""

    def evicted(self, page: int, key: bytes) -> None:
        """Takes note of a page that was evicted, and whose content stays until the plan in progress is dispatched."""

    def published(self, page: int, key: bytes) -> None:
        """Takes note of a page that `match` finds from now on. The step of the plan in progress may fill it."""

    def clear(self) -> None:
        """Drops all pages in host memory. Copies in progress fail."""

    def audit(self) -> None:
        """Checks the invariants of the tier. Raises AssertionError with the violation."""
