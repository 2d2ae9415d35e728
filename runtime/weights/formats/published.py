"""Reads `quantization_config` of config.json: the published methods, each with the options that are implemented.

A value that is not implemented is refused, with the name of the option and the values that are allowed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...model_files.quantization import Quantization
from . import auto_round, awq, compressed_tensors, gptq, modelopt, official_fp8
from .config_options import Options


class Method(NamedTuple):
    """A published method of quantization."""

    read: Callable[[Options, str], Quantization]  # options, and the model's dtype -> what they say
    skipped: str = "modules_to_not_convert"  # the option that lists modules which are not quantized


METHODS: Mapping[str, Method] = {  # by `quant_method`
    "fp8": Method(official_fp8.read),
    "compressed-tensors": Method(compressed_tensors.read, skipped="ignore"),
    "awq": Method(awq.read),
    "gptq": Method(gptq.read),
    "auto-round": Method(auto_round.read),
    "modelopt": Method(modelopt.read, skipped="ignore"),
}


def read_quantization(raw: Any, dtype: str, unknown: list[str]) -> Quantization:
    """Reads `quantization_config`.

    Args:
      raw: Its value.
      dtype: The model's dtype, which is that of scales where the method does not say it.
      unknown: Receives the names of options that meshserve does not know.

    Raises:
      UnsupportedModelError: The method, or an option of it, is not implemented; the message names it.
    """
    options = Options("quantization_config", raw, unknown)
    method = options.one_of("quant_method", tuple(METHODS))
    quantization = METHODS[method].read(options, dtype)
    options.finish()
    return quantization


def with_skipped(raw: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Returns a `quantization_config` that lists further modules as not quantized."""
    key = METHODS[raw["quant_method"]].skipped
    return {**raw, key: [*(raw.get(key) or ()), *modules]}
