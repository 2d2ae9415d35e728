"""Reads `quantization_config` of config.json: the published formats, each with the options that are implemented.

What is not implemented is refused, with the name of the option and the values that are allowed.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..api.errors import UnsupportedModelError
from ..api.quantisation import Quantisation

_INT4_GROUPS = (32, 64, 128)
_KEY = "config.json: quantization_config"

# Options that say how a checkpoint was made, not how it is read.
_IGNORED = frozenset(
    "quant_method dequantize backend do_fuse fuse_max_seq_len modules_to_fuse exllama_config damp_percent "
    "damp_auto_increment true_sequential static_groups meta model_name_or_path model_file_base_name pack_dtype "
    "tokenizer dataset batch_size global_compression_ratio quantization_status run_compressed observer "
    "observer_kwargs".split()
)


class _Options:
    """The options of one JSON object; each is checked when it is read, and unread ones are refused."""

    def __init__(self, where: str, values: Any):
        if not isinstance(values, Mapping):
            raise UnsupportedModelError(f"{where} is {values!r}; it must be an object.")
        self._where, self._values, self._read = where, values, set(_IGNORED)

    def any(self, key: str, default: Any = None) -> Any:
        """Returns a value that the caller checks."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """Returns a value that must be among those allowed. A missing one has the default, if that is allowed."""
        value = self.any(key, default)
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise UnsupportedModelError(f"{self._where}.{key} is {value!r}; allowed: {_listed(allowed)}.")
        return value

    def object(self, key: str) -> "_Options":
        """Returns the options of an object within this one."""
        return _Options(f"{self._where}.{key}", self.any(key))

    def only_object(self, key: str) -> "_Options":
        """Returns the options of the one object, of any name, within the object `key`."""
        objects = self.any(key)
        if not isinstance(objects, Mapping) or len(objects) != 1:
            raise UnsupportedModelError(f"{self._where}.{key} is {objects!r}; allowed: an object with one entry.")
        return self.object(key).object(next(iter(objects)))

    def modules(self, key: str) -> tuple[str, ...]:
        """Returns a list of module names, empty if there is none."""
        names = self.any(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UnsupportedModelError(f"{self._where}.{key} is {names!r}; it must be a list of module names.")
        return tuple(names)

    def check_all_read(self) -> None:
        unknown = sorted(key for key, value in self._values.items() if key not in self._read and value is not None)
        if unknown:
            raise UnsupportedModelError(
                f"{self._where} has options meshserve does not know: {', '.join(unknown)}. It refuses what it cannot "
                "honour."
            )


def read_quantisation(raw: Any, dtype: str) -> Quantisation:
    """Reads `quantization_config`.

    Args:
      raw: Its value.
      dtype: The model's dtype, which is that of scales where the format does not say it.

    Raises:
      UnsupportedModelError: The method, or an option of it, is not implemented; the message names it.
    """
    options = _Options(_KEY, raw)
    method = options.one_of("quant_method", tuple(_METHODS))
    quantisation = _METHODS[method](options, dtype)
    options.check_all_read()
    return quantisation


def is_skipped(module: str, patterns: tuple[str, ...]) -> bool:
    """Returns whether a list of modules that are not quantised names a module, or a part of the model around it."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module):
                return True
        elif f".{module}.".find(f".{pattern.strip('.')}.") >= 0:
            return True
    return False


def _fp8(options: _Options, dtype: str) -> Quantisation:
    options.one_of("fmt", ("e4m3",), "e4m3")
    options.one_of("activation_scheme", ("dynamic",), "dynamic")
    options.one_of("scale_fmt", ("float",), "float")
    block = options.one_of("weight_block_size", ([128, 128],))
    return Quantisation(
        method="fp8",
        dtype="float8_e4m3fn",
        block=(block[0], block[1]),
        scale_dtype="float32",
        skipped=(*options.modules("modules_to_not_convert"), *options.modules("ignored_layers")),
    )


def _awq(options: _Options, dtype: str) -> Quantisation:
    options.one_of("version", ("gemm",), "gemm")
    options.one_of("zero_point", (True,))
    bits = "w_bit" if options.any("w_bit") is not None else "bits"
    options.one_of(bits, (4,))
    group = "q_group_size" if options.any("q_group_size") is not None else "group_size"
    return Quantisation(
        method="awq",
        dtype="int4",
        block=(1, options.one_of(group, _INT4_GROUPS)),
        scale_dtype="float16",
        has_zero_points=True,
        skipped=("lm_head", *options.modules("modules_to_not_convert")),
    )


def _gptq(options: _Options, dtype: str) -> Quantisation:
    options.one_of("bits", (4,))
    options.one_of("lm_head", (False,), False)
    options.one_of("desc_act", (False, True), False)  # true only with the trivial order, which the files tell
    options.one_of("dynamic", ({},), {})
    version = options.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    options.one_of("format", (version,), version)
    is_symmetric = options.one_of("sym", (False, True), True)
    return Quantisation(
        method="gptq",
        dtype="int4",
        block=(1, options.one_of("group_size", _INT4_GROUPS)),
        scale_dtype="float16",
        has_zero_points=not is_symmetric,
        zero_point_offset=1 if version == "gptq" else 0,
        skipped=("lm_head", *options.modules("modules_to_not_convert")),
    )


def _compressed_tensors(options: _Options, dtype: str) -> Quantisation:
    kind = options.one_of("format", ("float-quantized", "pack-quantized"))
    options.any("version")
    options.one_of("sparsity_config", ({},), {})
    options.one_of("transform_config", ({},), {})
    group = options.only_object("config_groups")
    group.one_of("targets", (["Linear"],))
    group.one_of("format", (kind,), kind)
    group.one_of("output_activations", (None,))
    weights = group.object("weights")
    weights.one_of("dynamic", (False,), False)
    for key in ("block_structure", "scale_dtype", "zp_dtype"):
        weights.one_of(key, (None,))
    skipped, has_kv_scales = options.modules("ignore"), _has_kv_scales(options)
    if kind == "float-quantized":
        quantisation = _float_channel(group, weights, skipped, has_kv_scales)
    else:
        quantisation = _packed_groups(group, weights, skipped, has_kv_scales, dtype)
    weights.check_all_read()
    group.check_all_read()
    return quantisation


def _float_channel(group: _Options, weights: _Options, skipped: tuple[str, ...], has_kv_scales: bool) -> Quantisation:
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (8,))
    weights.one_of("strategy", ("channel",))
    weights.one_of("symmetric", (True,), True)
    weights.one_of("group_size", (None,))
    weights.one_of("actorder", (None,))
    if group.any("input_activations") is not None:
        activations = group.object("input_activations")
        activations.one_of("type", ("float",))
        activations.one_of("num_bits", (8,))
        activations.one_of("strategy", ("token",))
        activations.one_of("dynamic", (True,))
        activations.one_of("symmetric", (True,), True)
        for key in ("actorder", "block_structure", "group_size", "scale_dtype", "zp_dtype"):
            activations.one_of(key, (None,))
        activations.check_all_read()
    return Quantisation(
        method="compressed-tensors",
        dtype="float8_e4m3fn",
        block=(1, 0),
        scale_dtype="float32",
        skipped=skipped,
        has_kv_scales=has_kv_scales,
    )


def _packed_groups(
    group: _Options, weights: _Options, skipped: tuple[str, ...], has_kv_scales: bool, dtype: str
) -> Quantisation:
    group.one_of("input_activations", (None,))
    weights.one_of("type", ("int",))
    weights.one_of("num_bits", (4,))
    weights.one_of("strategy", ("group",))
    weights.one_of("actorder", (None, "weight", "static"))
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    return Quantisation(
        method="compressed-tensors",
        dtype="int4",
        block=(1, weights.one_of("group_size", _INT4_GROUPS)),
        scale_dtype=dtype,
        has_zero_points=not is_symmetric,
        skipped=skipped,
        has_kv_scales=has_kv_scales,
    )


def _has_kv_scales(options: _Options) -> bool:
    if options.any("kv_cache_scheme") is None:
        return False
    scheme = options.object("kv_cache_scheme")
    scheme.one_of("type", ("float",))
    scheme.one_of("num_bits", (8,))
    scheme.one_of("strategy", ("tensor",))
    scheme.one_of("dynamic", (False,), False)
    scheme.one_of("symmetric", (True,), True)
    for key in ("actorder", "block_structure", "group_size", "scale_dtype", "zp_dtype"):
        scheme.one_of(key, (None,))
    scheme.check_all_read()
    return True


def _listed(allowed: tuple[Any, ...]) -> str:
    return ", ".join("nothing" if choice is None else repr(choice) for choice in allowed)


_METHODS = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq}
