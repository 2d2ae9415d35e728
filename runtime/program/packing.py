"""Packed vectors: fields of known sizes, one behind the other. Serves step 5 of 10."""

from collections.abc import Iterable

# Of a request, for the samplers; floats as their bits.
PARAM_FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed_low", "seed_high")


def consecutive(sizes: Iterable[tuple[str, int]]) -> dict[str, slice]:
    """Where fields of these sizes lie."""
    fields, start = {}, 0
    for name, size in sizes:
        fields[name] = slice(start, start + size)
        start += size
    return fields
