"""The official FP8 checkpoints: 8-bit floats with a float32 scale for each block of 128 x 128."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshserve.kernels.linear.formats import E4M3, SCALE
from meshserve.sharding.checkpoints.tensor_files import FLOATS, TensorFiles

from ...model_files.quantization import Grid, Quantization
from .config_options import Options
from .stored_matrix import StoredMatrix

_BLOCK = (128, 128)


class OfficialFP8(StoredMatrix):
    """A tensor of numbers, and one of scales."""

    @property
    def whole(self) -> str:
        """See `StoredMatrix`."""
        return f"{self.module}.weight"

    @property
    def _scale(self) -> str:
        return f"{self.module}.weight_scale_inv"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        return {self.whole: self.size, self._scale: self.grid_shape(self.quantization.scale)}

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        return {self.whole: ("F8_E4M3",), self._scale: FLOATS}

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`."""
        return files.read(self._scale)


def read(options: Options, dtype: str) -> Quantization:
    """Reads a `quantization_config`."""
    options.one_of("fmt", ("e4m3",), "e4m3")
    options.one_of("expert_dtype", ("fp8",), "fp8")
    options.one_of("modules_to_convert", ([], None))
    options.one_of("activation_scheme", ("dynamic",), "dynamic")
    options.one_of("scale_fmt", ("float",), "float")
    options.one_of("weight_block_size", (list(_BLOCK),))
    return Quantization(
        layout=OfficialFP8,
        format=E4M3,
        grids=(Grid(SCALE, "float32", _BLOCK),),
        skipped=(*options.modules("modules_to_not_convert"), *options.modules("ignored_layers")),
    )


def written(quantization: Quantization) -> dict[str, Any]:
    """Returns the `quantization_config` that `read` reads as this quantization."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(_BLOCK),
        "modules_to_not_convert": list(quantization.skipped),
    }
