"""Checkpoints of compressed-tensors: 8-bit floats with a scale for each row or block, or packed 4-bit numbers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshserve.kernels.linear.formats import E4M3, INT4, MXFP4, NVFP4, SCALE, ZERO
from meshserve.sharding.checkpoints.tensor_files import FLOATS, TensorFiles

from ...model_files.quantization import Grid, Quantization, grouped
from . import mxfp4, nvfp4
from .config_options import INT4_GROUPS, Options
from .stored_matrix import StoredMatrix, numbers_of

_BLOCK = (128, 128)
_DTYPES = ("scale_dtype", "zp_dtype")  # the files tell them
_FP4: Mapping[str, Callable[[Options], Quantization]] = {
    "nvfp4-pack-quantized": nvfp4.read_packed,
    "mxfp4-pack-quantized": mxfp4.read_packed,
}


class FloatQuantized(StoredMatrix):
    """A tensor of numbers, and one of scales."""

    @property
    def whole(self) -> str:
        """See `StoredMatrix`."""
        return f"{self.module}.weight"

    @property
    def _scale(self) -> str:
        return f"{self.module}.weight_scale"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        return {self.whole: self.size, self._scale: self.grid_shape(self.quantization.scale)}

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        return {self.whole: ("F8_E4M3",), self._scale: FLOATS}

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`."""
        return files.read(self._scale)


class PackQuantized(StoredMatrix):
    """Words of eight 4-bit numbers of a row, scales, and zero points packed along the rows."""

    @property
    def whole(self) -> str:
        """See `StoredMatrix`."""
        return f"{self.module}.weight_packed"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        grid = self.grid_shape(self.quantization.scale)
        found: dict[str, tuple[int, ...]] = {
            self.whole: (self.rows, self.columns // 8),
            f"{self.module}.weight_scale": grid,
            f"{self.module}.weight_shape": (2,),
        }
        if self.quantization.has_zero_points:
            found[f"{self.module}.weight_zero_point"] = (-(-self.rows // 8), grid[1])
        return found

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        integers = {name: ("I32", "I64") for name in self.tensors()}
        return integers | {self.whole: ("I32",), f"{self.module}.weight_scale": FLOATS}

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`."""
        if grid.part == SCALE:
            return files.read(f"{self.module}.weight_scale")
        assert grid.part == ZERO
        words = files.read(f"{self.module}.weight_zero_point")
        return numbers_of(np.ascontiguousarray(words.T)).T[: self.rows]

    def open(self, files: TensorFiles) -> None:
        """See `StoredMatrix`."""
        files.view_as_bytes(self.whole)


def read(options: Options, dtype: str) -> Quantization:
    """Reads a `quantization_config`. Scales of integers have the model's dtype."""
    kind = options.one_of("format", ("float-quantized", "pack-quantized", *_FP4))
    options.any("version")
    options.one_of("transform_config", ({},), {})
    if options.any("sparsity_config", {}):
        options.object("sparsity_config").one_of("format", ("dense",))
    group = options.only_object("config_groups")
    group.one_of("targets", (["Linear"],))
    group.one_of("format", (kind,), kind)
    group.one_of("output_activations", (None,))
    weights = group.object("weights")
    weights.one_of("dynamic", (False,), False)
    for key in _DTYPES:
        weights.any(key)
    common: dict[str, Any] = {"skipped": options.modules("ignore"), "has_kv_scales": _has_kv_scales(options)}
    if kind == "float-quantized":
        quantization = _float_quantized(group, weights, common)
    elif kind in _FP4:
        quantization = dataclasses.replace(_fp4(group, weights, _FP4[kind]), **common)
    else:
        quantization = _pack_quantized(group, weights, common, dtype)
    weights.finish()
    group.finish()
    return quantization


def _float_quantized(group: Options, weights: Options, common: dict[str, Any]) -> Quantization:
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (8,))
    weights.one_of("symmetric", (True,), True)
    weights.one_of("actorder", (None,))
    is_block = weights.one_of("strategy", ("channel", "block")) == "block"
    weights.one_of("block_structure", (list(_BLOCK),) if is_block else (None,))
    weights.one_of("group_size", (None,))
    if group.any("input_activations") is not None:
        activations = group.object("input_activations")
        activations.one_of("dynamic", (True,))
        activations.one_of("strategy", ("group",) if is_block else ("token",))
        activations.one_of("group_size", (_BLOCK[1],) if is_block else (None,))
        _check_float(activations)
    grid = Grid(SCALE, "float32", _BLOCK if is_block else (1, 0))
    return Quantization(layout=FloatQuantized, format=E4M3, grids=(grid,), **common)


def _pack_quantized(group: Options, weights: Options, common: dict[str, Any], dtype: str) -> Quantization:
    group.one_of("input_activations", (None,))
    weights.one_of("type", ("int",))
    weights.one_of("num_bits", (4,))
    weights.one_of("strategy", ("group",))
    weights.one_of("block_structure", (None,))
    weights.one_of("actorder", (None, "weight", "static"))
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    scale = Grid(SCALE, dtype, (1, weights.one_of("group_size", INT4_GROUPS)), has_model_dtype=True)
    return Quantization(
        layout=PackQuantized, format=INT4, grids=grouped(scale, has_zero_points=not is_symmetric), **common
    )


def _fp4(group: Options, weights: Options, read: Callable[[Options], Quantization]) -> Quantization:
    """Reads weights of 4-bit floats. Activations keep their precision, whatever they were calibrated for."""
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (4,))
    weights.one_of("symmetric", (True,), True)
    weights.one_of("actorder", (None, "weight", "static"))
    weights.one_of("block_structure", (None,))
    group.any("input_activations")
    return read(weights)


def _has_kv_scales(options: Options) -> bool:
    if options.any("kv_cache_scheme") is None:
        return False
    scheme = options.object("kv_cache_scheme")
    scheme.one_of("strategy", ("tensor",))
    scheme.one_of("dynamic", (False,), False)
    scheme.one_of("group_size", (None,))
    _check_float(scheme)
    return True


def _check_float(numbers: Options) -> None:
    """Checks that activations, or keys and values, are 8-bit floats without further options."""
    numbers.one_of("type", ("float",))
    numbers.one_of("num_bits", (8,))
    numbers.one_of("symmetric", (True,), True)
    numbers.one_of("actorder", (None,))
    numbers.one_of("block_structure", (None,))
    for key in _DTYPES:
        numbers.any(key)
    numbers.finish()


def written(quantization: Quantization) -> dict[str, Any]:
    """Returns the `quantization_config` that `read` reads as this quantization, which is symmetric."""
    kind, activations = "pack-quantized", None
    weights: dict[str, Any] = {"type": "int", "num_bits": 4, "strategy": "group"}
    if quantization.format in (NVFP4, MXFP4):
        kind = f"{quantization.format.name}-pack-quantized"
        strategy = "tensor_group" if quantization.format == NVFP4 else "group"
        weights = {"type": "float", "num_bits": 4, "strategy": strategy}
    if quantization.format == E4M3:
        kind, weights = "float-quantized", {"type": "float", "num_bits": 8, "strategy": "channel"}
        activations = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    weights |= {"group_size": quantization.scale.block[1] or None, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": list(quantization.skipped),
    }
