"""Computes the sizes of a host tier: its blocks, how many fit into host memory, and the staging memory on devices."""

from dataclasses import dataclass

_BLOCK_BYTES = 32 << 20  # size of a block on one device: a command takes the host 0.1 ms or more, the copy 0.7 ms
_MAX_BLOCK_PAGES = 64
_FETCH_BYTES = 512 << 20  # on each device, at least, for blocks on their way to it
_STEP_BYTES = 1 << 30  # on each device, at most, for the pages of a step's prompts on their way, each way
# Between two steps that decode; of 5 ms each takes 0.2. Blocks on their way to the device delay steps most.
_SAVED_BESIDE_DECODES, _WRITTEN_BESIDE_DECODES = 128 << 20, 96 << 20


@dataclass(frozen=True, kw_only=True)
class HostCacheSize:
    """The sizes of a host tier. Every process of a cluster has the same."""

    num_blocks: int
    block_pages: int
    page_bytes: int  # on one device
    max_fetches: int  # blocks on their way to the device
    max_saves: int  # blocks on their way to host memory

    @property
    def block_bytes(self) -> int:
        """The bytes of a block on one device."""
        return self.block_pages * self.page_bytes

    @property
    def staging_bytes(self) -> int:
        """The bytes on each device of the blocks on their way."""
        return (self.max_fetches + self.max_saves) * self.block_bytes

    @property
    def saves_beside_decodes(self) -> int:
        """The number of blocks that are gathered between two steps without delaying decodes."""
        return max(1, _SAVED_BESIDE_DECODES // self.block_bytes)

    @property
    def writes_beside_decodes(self) -> int:
        """The number of blocks that are scattered between two steps without delaying decodes."""
        return max(1, _WRITTEN_BESIDE_DECODES // self.block_bytes)

    @property
    def num_pages(self) -> int:
        return self.num_blocks * self.block_pages


def host_cache_size(
    host_bytes: int, *, page_bytes: int, num_local_devices: int, max_request_pages: int, max_step_pages: int
) -> HostCacheSize | None:
    """Returns the sizes of a host tier of `host_bytes` in each process; None if that is 0.

    Args:
      host_bytes: The host memory of one process.
      page_bytes: The bytes of a page on one device.
      num_local_devices: The devices of one process, each of which has its part of every page.
      max_request_pages: The pages of the longest request; blocks are small enough that its prefixes fill several.
      max_step_pages: The pages that the prompts of a step fill. As many can be saved between two steps, so that a
        stream of long prompts loses none of the pages that it evicts, and as many restored, so that copying them takes
        no more steps than computing them.

    Raises:
      ValueError: There is no room for two blocks.
    """
    if not host_bytes:
        return None
    block_pages = min(-(-_BLOCK_BYTES // page_bytes), _MAX_BLOCK_PAGES, max(max_request_pages // 8, 1))
    block_bytes = block_pages * page_bytes
    num_blocks = host_bytes // (block_bytes * num_local_devices)
    if num_blocks < 2:
        needed = 2 * block_bytes * num_local_devices / (1 << 30)
        raise ValueError(
            f"host_cache_gib is {host_bytes / (1 << 30):.3f}; two blocks of {block_pages} pages take {needed:.3f} GiB. "
            "Raise it, or set it to 0 to keep no pages in host memory."
        )
    step_blocks = min(_STEP_BYTES // block_bytes, -(-max_step_pages // block_pages) + 1)
    return HostCacheSize(
        num_blocks=num_blocks,
        block_pages=block_pages,
        page_bytes=page_bytes,
        max_fetches=max(2, min(_FETCH_BYTES // block_bytes, 64), step_blocks),
        max_saves=max(2, step_blocks),
    )
