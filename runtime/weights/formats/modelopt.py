"""Checkpoints of NVIDIA's ModelOpt in 4-bit floats, whose options are in config.json or in hf_quant_config.json.

Activations keep their precision (W4A16): the scales with which other engines round them are not read. Of a checkpoint
of mixed precision, modules in FP8 are dequantized while they are loaded.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from meshserve.kernels.linear.formats import E4M3, SCALE
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from ...model_files.quantization import Grid, Quantization
from . import mxfp4, nvfp4
from .config_options import Options
from .stored_matrix import StoredMatrix

_NVFP4 = ("NVFP4", "W4A16_NVFP4")  # the same weights; the first is published for activations in 4 bits
_MXFP4 = ("MXFP4", "mxfp4")
_FP8 = "FP8"
_MIXED = "MIXED_PRECISION"
# Values of weights other than these formats mean: factors of the activations, and low-rank summands.
_CHANGING = ("pre_quant_scale", "has_zero_point", "lora_rank")


class ModelOptFP8(StoredMatrix):
    """A tensor of numbers, and a scale of all of them."""

    @property
    def whole(self) -> str:
        """See `StoredMatrix`."""
        return f"{self.module}.weight"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        return {self.whole: self.size, f"{self.module}.weight_scale": ()}

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        """See `StoredMatrix`."""
        return dict(zip(self.tensors(), (("F8_E4M3",), ("F32",)), strict=True))

    def unused(self) -> tuple[str, ...]:
        """See `StoredMatrix`."""
        return (f"{self.module}.input_scale",)

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`."""
        return files.read(f"{self.module}.weight_scale").reshape(1, 1)


def read(options: Options, dtype: str) -> Quantization:
    """Reads a `quantization_config`."""
    algorithm = options.one_of("quant_algo", (*_NVFP4, *_MXFP4, _MIXED))
    options.any("producer")
    options.any("config_groups")  # repeats what `quant_algo` and `quantized_layers` say
    for key in _CHANGING:
        options.one_of(key, (False, None))
    if algorithm == _MIXED:
        quantization = _mixed(options)
    else:
        quantization = _of(algorithm)
        options.one_of("group_size", (quantization.scale.block[1], None))
    skipped = tuple(map(_expression, options.modules("ignore")))
    return dataclasses.replace(quantization, skipped=skipped, has_kv_scales=_has_kv_scales(options))


def _of(algorithm: str) -> Quantization:
    if algorithm in _NVFP4:
        return nvfp4.quantization(nvfp4.ModelOptNVFP4)
    if algorithm in _MXFP4:
        return mxfp4.quantization(mxfp4.ModelOptMXFP4)
    return Quantization(layout=ModelOptFP8, format=E4M3, grids=(Grid(SCALE, "float32", (0, 0)),))


def _mixed(options: Options) -> Quantization:
    """Reads `quantized_layers`. One 4-bit format may be beside FP8."""
    layers = options.object("quantized_layers")
    found: dict[str, Quantization] = {}
    for module in options.any("quantized_layers"):
        layer = layers.object(module)
        found[module] = _of(layer.one_of("quant_algo", (*_NVFP4, *_MXFP4, _FP8)))
        layer.one_of("group_size", (found[module].scale.block[1], None))
        for key in _CHANGING:
            layer.one_of(key, (False, None))
        layer.finish()
    packed = {each.format for each in found.values()} - {E4M3}
    if len(packed) != 1:
        options.refuse("quantized_layers", "modules in NVFP4 or in MXFP4, and others in FP8")
    main = next(each for each in found.values() if each.format in packed)
    plain = frozenset(module for module, each in found.items() if each.format not in packed)
    others = ((plain, _of(_FP8)),) if plain else ()
    return dataclasses.replace(main, listed=frozenset(found), others=others)


def _expression(module: str) -> str:
    """Returns an entry of a list of modules, in which * stands for any text, as one of `Quantization.skipped`."""
    if "*" not in module:
        return module
    return "re:" + ".*".join(map(re.escape, module.split("*"))) + "$"


def _has_kv_scales(options: Options) -> bool:
    """Returns whether the files may have scales of an FP8 cache. Those of other caches are noted and not read."""
    scheme = options.any("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        if scheme is not None:
            options.leave("kv_cache_scheme")
        return False
    numbers = options.object("kv_cache_scheme")
    numbers.one_of("dynamic", (False,), False)
    numbers.one_of("num_bits", (8,))
    numbers.one_of("type", ("float",))
    numbers.finish()
    return True
