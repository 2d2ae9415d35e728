"""Matrices in MXFP4: 4-bit floats with a power of two for each 32 columns, stored as its exponent in a byte (e8m0)."""

from collections.abc import Mapping

import numpy as np

from meshserve.kernels.linear.formats import MXFP4, SCALE
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from ...model_files.quantization import Grid, Quantization
from .config_options import Options
from .stored_matrix import StoredMatrix

GROUP = 32
_NO_NUMBER = 255


class ModelOptMXFP4(StoredMatrix):
    """As NVIDIA's ModelOpt writes it."""

    data_name = "weight"

    @property
    def whole(self) -> str:
        """See `StoredMatrix`."""
        return f"{self.module}.{self.data_name}"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        return {
            self.whole: (self.rows, self.data_columns),
            f"{self.module}.weight_scale": self.grid_shape(self.quantization.scale),
        }

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        return dict(zip(self.tensors(), (("U8",), ("U8", "F8_E8M0")), strict=True))

    def unused(self) -> tuple[str, ...]:
        """See `StoredMatrix`."""
        return (f"{self.module}.input_scale",)

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`.

        Raises:
          CheckpointError: A scale is no number.
        """
        exponents = files.read(f"{self.module}.weight_scale")
        if (exponents == _NO_NUMBER).any():
            raise CheckpointError(f"{self.module}.weight_scale has scales that are no numbers (e8m0 255).")
        return exponents


class PackedMXFP4(ModelOptMXFP4):
    """As compressed-tensors writes it."""

    data_name = "weight_packed"


def quantization(layout: type[ModelOptMXFP4] | None) -> Quantization:
    """Returns the quantization of matrices in a layout, or of those that are quantized while they are read."""
    return Quantization(layout=layout, format=MXFP4, grids=(Grid(SCALE, "uint8", (1, GROUP)),))


def read_packed(weights: Options) -> Quantization:
    """Reads the options of compressed-tensors' weights in MXFP4, but for those that all floats have."""
    weights.one_of("strategy", ("group",))
    weights.one_of("group_size", (GROUP,))
    return quantization(PackedMXFP4)
