"""Checkpoints of AWQ: words of eight 4-bit numbers in the transposed matrix, with a zero point for each scale."""

from collections.abc import Iterator, Mapping

import numpy as np

from meshserve.kernels.linear.formats import INT4, SCALE, ZERO
from meshserve.sharding.checkpoints.parameters import Region
from meshserve.sharding.checkpoints.tensor_files import FLOATS, TensorFiles

from ...model_files.quantization import Grid, Quantization, grouped
from .config_options import INT4_GROUPS, Options
from .stored_matrix import StoredMatrix, numbers_of

_BLOCK_NUMBERS = 16 * 2**20
# Column of a word's 8 columns that each 4-bit field of it holds, from the lowest bits on (AutoAWQ's GEMM version).
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class TransposedMatrix(StoredMatrix):
    """What AWQ and GPTQ share: `qweight` of the matrix [K, N], `qzeros` and `scales` [groups, N]."""

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        return {name: FLOATS if name.endswith(".scales") else ("I32",) for name in self.tensors()}

    def unused(self) -> tuple[str, ...]:
        """See `StoredMatrix`. The order of columns, which `open` of a layout checks."""
        return (f"{self.module}.g_idx",)

    def data_blocks(self) -> Iterator[Region]:
        """See `StoredMatrix`."""
        step = max(1, _BLOCK_NUMBERS // self.rows // 8) * 8
        for column in range(0, self.columns, step):
            yield (0, self.rows), (column // 2, min(column + step, self.columns) // 2)


class AWQ(TransposedMatrix):
    """Words pack rows, in an order of their own."""

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        groups = self.grid_shape(self.quantization.scale)[1]
        return {
            f"{self.module}.qweight": (self.columns, self.rows // 8),
            f"{self.module}.qzeros": (groups, self.rows // 8),
            f"{self.module}.scales": (groups, self.rows),
        }

    def data(self, files: TensorFiles, region: Region) -> np.ndarray:
        """See `StoredMatrix`."""
        first, last = (2 * byte for byte in region[1])
        return INT4.pack(_rows_in_order(files.read(f"{self.module}.qweight", (first, last))).T)

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`."""
        if grid.part == SCALE:
            return files.read(f"{self.module}.scales").T
        assert grid.part == ZERO
        return _rows_in_order(files.read(f"{self.module}.qzeros")).T


def _rows_in_order(words: np.ndarray) -> np.ndarray:
    """Returns the numbers [R, 8 C] of words [R, C]."""
    fields = numbers_of(words).reshape(*words.shape, 8)
    numbers = np.empty_like(fields)
    numbers[..., _ORDER] = fields
    return numbers.reshape(words.shape[0], -1)


def read(options: Options, dtype: str) -> Quantization:
    """Reads a `quantization_config`."""
    for key in ("version", "format"):
        if str(options.any(key, "gemm")).lower() != "gemm":  # AutoAWQ writes GEMM, transformers gemm
            options.refuse(key, "'gemm'")
    options.one_of("zero_point", (True,))
    options.one_of("desc_act", (False,), False)
    options.any("sym")  # transformers writes that of GPTQ beside `zero_point`
    options.one_of("w_bit" if options.any("w_bit") is not None else "bits", (4,))
    group = "q_group_size" if options.any("q_group_size") is not None else "group_size"
    scale = Grid(SCALE, "float16", (1, options.one_of(group, INT4_GROUPS)))
    return Quantization(
        layout=AWQ,
        format=INT4,
        grids=grouped(scale, has_zero_points=True),
        skipped=("lm_head", *options.modules("modules_to_not_convert")),
    )
