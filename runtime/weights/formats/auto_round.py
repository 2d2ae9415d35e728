"""Checkpoints of AutoRound, which have the layouts of GPTQ and AWQ."""

import re
from collections.abc import Mapping
from typing import Any

from meshserve.kernels.linear.formats import INT4, SCALE

from ...model_files.quantization import Grid, Quantization, grouped
from .awq import AWQ
from .config_options import INT4_GROUPS, Options
from .gptq import GPTQ

_LAYOUTS = {  # by the packing that follows "auto_round:"
    "gptq": GPTQ,
    "auto_gptq": GPTQ,
    "awq": AWQ,
    "auto_awq": AWQ,
}
_UNQUANTIZED_BITS = 16


def read(options: Options, dtype: str) -> Quantization:
    """Reads a `quantization_config`."""
    bits = options.one_of("bits", (4,))
    options.one_of("data_type", ("int",), "int")
    options.one_of("act_bits", (_UNQUANTIZED_BITS, None))
    for key in ("act_data_type", "act_group_size", "act_sym", "act_dynamic", "super_bits", "super_group_size"):
        options.any(key)  # they have no meaning without quantized activations or scales
    options.one_of("quant_lm_head", (False,), False)
    options.one_of("desc_act", (False,), False)
    packing = options.one_of("packing_format", tuple(f"auto_round:{name}" for name in _LAYOUTS))
    group = options.one_of("group_size", INT4_GROUPS)
    is_symmetric = options.one_of("sym", (False, True), True)
    layout = _LAYOUTS[packing.removeprefix("auto_round:")]
    scale = Grid(SCALE, "float16", (1, group))
    return Quantization(
        layout=layout,
        format=INT4,
        grids=grouped(scale, has_zero_points=not is_symmetric or layout is AWQ),
        skipped=(
            "lm_head",
            *options.modules("modules_to_not_convert"),
            *_unquantized(options, {"bits": bits, "group_size": group, "sym": is_symmetric}),
        ),
    )


def _unquantized(options: Options, common: Mapping[str, Any]) -> list[str]:
    """Returns the modules to which `extra_config` gives 16 bits. Other exceptions are refused."""
    found, extra = [], options.any("extra_config", {})
    if not isinstance(extra, Mapping) or not all(isinstance(own, Mapping) for own in extra.values()):
        options.refuse("extra_config", "an object of objects")
    for module, own in extra.items():
        if type(own.get("bits", _UNQUANTIZED_BITS)) is not int:
            options.refuse("extra_config", "whole numbers of bits")
        if own.get("bits", common["bits"]) >= _UNQUANTIZED_BITS:
            is_path = re.fullmatch(r"[\w.]+", module)
            options.check_expression("extra_config", module)
            found.append(module if is_path else f"re:{module}")
        elif any(own.get(key, value) != value for key, value in common.items()):
            options.refuse("extra_config", f"entries with {_UNQUANTIZED_BITS} bits, or with the values of all others")
    return found
