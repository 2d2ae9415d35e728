"""What `bench kernels` measures, and what it finds."""

import dataclasses

import jax.numpy as jnp

YARDSTICK = "reference"  # what speed-ups are over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is attended to."""

    batch: int
    context: int  # tokens of each request, the new one included
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def pages_per_request(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def page_bytes(self) -> int:
        """Of one layer's keys and values."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def label(self) -> str:
        heads = f"{self.kv_heads}x{self.group}x{self.head_dim}"
        return f"b{self.batch} {self.context} {heads} p{self.page_size} {self.dtype}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table."""

    implementation: str
    shape: Shape
    device: str
    ms: float
    ms_p10: float
    ms_p90: float
    terabytes_per_second: float
    temporary_bytes: int
    error: float
    speedup: float | None = None  # over the yardstick, where that ran

    def row(self) -> str:
        speedup = f"  {self.speedup:6.1f} x {YARDSTICK}" if self.speedup else ""
        return (
            f"{self.implementation:10} {self.shape.label:38} {self.ms:9.4f} ms (P10 {self.ms_p10:.4f}, P90 "
            f"{self.ms_p90:.4f})  {self.terabytes_per_second:6.3f} TB/s  {self.temporary_bytes / 2**20:8.1f} MiB  "
            f"error {self.error:.1e}{speedup}"
        )
