"""Packs int32 fields of known sizes into one vector for the device. Serves step 5 of 10."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..api.sampling_params import SamplingParams, Stage, params_at

# The sampling parameters that the sampler of every step reads.
SAMPLER_PARAMS = params_at(Stage.SAMPLER)

# The fields packed for the sampler for each request: its parameters, and the two halves of its seed.
PARAM_FIELDS = (*SAMPLER_PARAMS, "seed_low", "seed_high")

_DEFAULTS = SamplingParams()
_PACKED = params_at(Stage.SAMPLER, Stage.PENALTY)
_MAX_INT32 = np.iinfo(np.int32).max

# The dtype of each field on the device, if it is not int32; the packed vector contains its bits as int32.
DTYPES: Mapping[str, type[np.number]] = {
    **{name: np.float32 if isinstance(getattr(_DEFAULTS, name), float) else np.int32 for name in _PACKED},
    "seed_low": np.uint32,
    "seed_high": np.uint32,
}


def consecutive(sizes: Iterable[tuple[str, int]]) -> dict[str, slice]:
    """Returns the slice of each field in a vector that contains fields of these sizes in order."""
    fields, start = {}, 0
    for name, size in sizes:
        fields[name] = slice(start, start + size)
        start += size
    return fields


def packed_params(params: SamplingParams, names: Sequence[str]) -> list[int]:
    """Packs the sampling parameters `names`; see `packed_values`."""
    return packed_values(names, [getattr(params, name) for name in names])


def packed_values(names: Sequence[str], values: Iterable[float]) -> list[int]:
    """Packs the values of the fields `names` as int32: floats as float32 bits, large integers clipped."""
    return [
        int(np.float32(value).view(np.int32)) if DTYPES.get(name) is np.float32 else int(min(value, _MAX_INT32))
        for name, value in zip(names, values, strict=True)
    ]
