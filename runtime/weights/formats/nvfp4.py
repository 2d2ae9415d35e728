"""Matrices in NVFP4: 4-bit floats with an e4m3 scale for each 16 columns and a float32 scale of the whole matrix.

ModelOpt and compressed-tensors store the same bytes; their names differ, and the latter has the inverse of the matrix's
scale. Scales of activations, which W4A4 kernels round with, are not read.
"""

from collections.abc import Mapping

import numpy as np

from meshserve.kernels.linear.formats import NVFP4, SCALE, TENSOR_SCALE
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from ...model_files.quantization import Grid, Quantization
from .config_options import Options
from .stored_matrix import StoredMatrix

GROUP = 16


class ModelOptNVFP4(StoredMatrix):
    """As NVIDIA's ModelOpt writes it."""

    data_name, activation_name = "weight", "input_scale"
    tensor_name = "weight_scale_2"
    tensor_shape: tuple[int, ...] = ()

    @property
    def whole(self) -> str:
        """See `StoredMatrix`."""
        return f"{self.module}.{self.data_name}"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        return {
            self.whole: (self.rows, self.data_columns),
            f"{self.module}.weight_scale": self.grid_shape(self.quantization.scale),
            f"{self.module}.{self.tensor_name}": self.tensor_shape,
        }

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        return dict(zip(self.tensors(), (("U8",), ("F8_E4M3",), ("F32",)), strict=True))

    def unused(self) -> tuple[str, ...]:
        """See `StoredMatrix`."""
        return (f"{self.module}.{self.activation_name}",)

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`."""
        if grid.part == SCALE:
            return files.read(f"{self.module}.weight_scale")
        assert grid.part == TENSOR_SCALE
        return files.read(f"{self.module}.{self.tensor_name}").reshape(1, 1)


class PackedNVFP4(ModelOptNVFP4):
    """As compressed-tensors writes it. It divides scales by a number, whose inverse is rounded to float32 here."""

    data_name, activation_name = "weight_packed", "input_global_scale"
    tensor_name = "weight_global_scale"
    tensor_shape = (1,)

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`.

        Raises:
          CheckpointError: The number has no inverse.
        """
        values = super().grid(files, grid)
        if grid.part == SCALE:
            return values
        if not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(f"{self.module}.{self.tensor_name} is {values.item()}; it must be positive.")
        return np.float32(1) / values


def quantization(layout: type[ModelOptNVFP4] | None) -> Quantization:
    """Returns the quantization of matrices in a layout, or of those that are quantized while they are read."""
    grids = (Grid(SCALE, "float8_e4m3fn", (1, GROUP)), Grid(TENSOR_SCALE, "float32", (0, 0)))
    return Quantization(layout=layout, format=NVFP4, grids=grids)


def read_packed(weights: Options) -> Quantization:
    """Reads the options of compressed-tensors' weights in NVFP4, but for those that all floats have."""
    weights.one_of("strategy", ("tensor_group",))
    weights.one_of("group_size", (GROUP,))
    return quantization(PackedNVFP4)
