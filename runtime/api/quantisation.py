"""How the weights of a model are quantised, and how its files store them."""

import math
from dataclasses import dataclass, replace

NOT_QUANTIZED = "none"
SCHEMES = ("fp8-block", "fp8-channel", "int4")  # that `--quantize` makes
MADE_WHEN_LOADED = "--quantize"  # the `method` of weights that are quantised while they are read


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """The quantisation of a model's projections. Everything else keeps the model's dtype."""

    method: str  # `quant_method` of config.json, which decides how files store the numbers; or MADE_WHEN_LOADED
    dtype: str  # of the stored numbers: "float8_e4m3fn" or "int4"
    block: tuple[int, int]  # rows and columns of the whole matrix that share a scale; 0 means all columns
    scale_dtype: str
    has_zero_points: bool = False  # of "int4"; without, 8 means 0
    zero_point_offset: int = 0  # added to zero points as files store them
    skipped: tuple[str, ...] = ()  # modules that files do not quantise; "re:" begins a regular expression
    parameters: frozenset[str] = frozenset()  # the model's parameters that stay quantised on the devices
    dequantised: frozenset[str] = frozenset()  # those that would, but for `--dequantize`
    has_kv_scales: bool = False  # files hold scales for an FP8 KV cache

    @property
    def is_int4(self) -> bool:
        """Whether the numbers are 4-bit integers."""
        return self.dtype == "int4"

    def held_plain(self) -> "Quantisation":
        """Returns the quantisation of the same weights if they are dequantised while they are loaded."""
        return replace(self, parameters=frozenset(), dequantised=self.parameters | self.dequantised)

    def held_quantised(self) -> "Quantisation":
        """Undoes `held_plain`: this is how an Orbax checkpoint stores them."""
        return replace(self, parameters=self.parameters | self.dequantised, dequantised=frozenset())

    @property
    def name(self) -> str:
        """A short name for logs and GetModelInfo, such as fp8-block-128x128 or int4-group-128."""
        rows, columns = self.block
        if self.is_int4:
            return f"int4-group-{columns}" + ("-zero-points" if self.has_zero_points else "")
        return f"fp8-block-{rows}x{columns}" if columns else "fp8-channel"


def granule(block: int, size: int, num_shards: int = 1) -> int:
    """Returns how many rows (or columns) share a scale on a device: a divisor of a shard that divides a block.

    Args:
      block: Rows that share a scale in the whole matrix; 0 means all, on every shard.
      size: Rows of the whole matrix, padding included.
      num_shards: Number of equal shards of the axis.
    """
    if block == 0 or (num_shards == 1 and size <= block):
        return size
    return math.gcd(block, size // num_shards)
