"""Vectors packed for the device: int32 fields of known sizes, one after another. Serves step 5 of 10."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..api.sampling_params import SamplingParams, Stage, params_at

# The sampling parameters that the sampler of every step reads.
SAMPLER_PARAMS = params_at(Stage.SAMPLER)

# What is packed of each request for the sampler: its parameters, and the two halves of its seed.
PARAM_FIELDS = (*SAMPLER_PARAMS, "seed_low", "seed_high")

_DEFAULTS = SamplingParams()
_PACKED = params_at(Stage.SAMPLER, Stage.PENALTY)
_MAX_INT32 = np.iinfo(np.int32).max

# The type of each field on the device, if it is not int32; the packed vector holds its bits as int32.
DTYPES: Mapping[str, type[np.number]] = {
    **{name: np.float32 if isinstance(getattr(_DEFAULTS, name), float) else np.int32 for name in _PACKED},
    "seed_low": np.uint32,
    "seed_high": np.uint32,
}


def consecutive(sizes: Iterable[tuple[str, int]]) -> dict[str, slice]:
    """Returns where fields of these sizes lie in a vector."""
    fields, start = {}, 0
    for name, size in sizes:
        fields[name] = slice(start, start + size)
        start += size
    return fields


def packed_params(params: SamplingParams, names: Sequence[str]) -> list[int]:
    """Packs the sampling parameters `names`; see `packed_values`."""
    return packed_values(names, [getattr(params, name) for name in names])


def packed_values(names: Sequence[str], values: Iterable[float]) -> list[int]:
    """Packs the values of the fields `names` as int32: float32 as its bits, large integers clipped."""
    return [
        int(np.float32(value).view(np.int32)) if DTYPES.get(name) is np.float32 else int(min(value, _MAX_INT32))
        for name, value in zip(names, values, strict=True)
    ]
