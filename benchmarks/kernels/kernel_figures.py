"""Defines the shapes that `bench kernels` measures and the figures that it reports."""

import dataclasses

import jax.numpy as jnp

YARDSTICK = "reference"  # the baseline of speedups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of one paged decode attention call."""

    batch: int
    context: int  # tokens of each request, including the new one
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
        """The bytes of one layer's keys and values."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def label(self) -> str:
        heads = f"{self.kv_heads}x{self.group}x{self.head_dim}"
        return f"b{self.batch} {self.context} {heads} p{self.page_size} {self.dtype}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    implementation: str
    shape: Shape
    device: str
    ms: float
    ms_p10: float
    ms_p90: float
    terabytes_per_second: float
    temporary_bytes: int
    error: float
    speedup: float | None = None  # over the reference, if that was measured

    def row(self) -> str:
        speedup = f"  {self.speedup:6.1f} x {YARDSTICK}" if self.speedup else ""
        return (
            f"{self.implementation:10} {self.shape.label:38} {self.ms:9.4f} ms (P10 {self.ms_p10:.4f}, P90 "
            f"{self.ms_p90:.4f})  {self.terabytes_per_second:6.3f} TB/s  {self.temporary_bytes / 2**20:8.1f} MiB  "
            f"error {self.error:.1e}{speedup}"
        )
