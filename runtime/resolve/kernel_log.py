"""The lines of the log that tell which kernels serve, why others do not, and what serves quantized weights."""

import logging
from collections.abc import Sequence

from meshserve.kernels import linear, paged_attention

from .kernel_names import KernelNames, OptionRefusal
from .kernel_shapes import KernelShapes

_log = logging.getLogger(__name__)


def log_kernels(names: KernelNames, refusals: Sequence[OptionRefusal], *, has_experts: bool) -> None:
    """Logs the kernels, and why better ones cannot serve: as a warning if there are none for this kind of device."""
    level = logging.INFO if paged_attention.IMPLEMENTATIONS[names.attention].is_kernel else logging.WARNING
    for line in refusal_lines(refusals):
        _log.log(level, "%s", line)
    _log.info("%s", kernel_line(names, has_experts=has_experts))


def kernel_line(names: KernelNames, *, has_experts: bool) -> str:
    """Returns the kernels of a server in words."""
    line = f"attention: {names.attention}; decode layers: {names.decode_layers}; all-reduce: {names.all_reduce}"
    return f"{line}; experts: {names.moe_backend}" if has_experts else line


def refusal_lines(refusals: Sequence[OptionRefusal]) -> list[str]:
    """Returns a line for each reason, with everything that it keeps from serving."""
    by_reason: dict[str, list[str]] = {}
    for option, chosen, name, reason in refusals:
        by_reason.setdefault(reason, []).append(f"{option.replace('_', ' ')}: {chosen} instead of {name}")
    return [f"{'; '.join(options)}, which is slower: {reason}" for reason, options in by_reason.items()]


def log_quantization(names: KernelNames, shapes: KernelShapes, max_fused_tokens: int) -> None:
    """Logs what is quantized, and what serves it."""
    quantization, description = shapes.model.quantization, shapes.model.quantization_name
    implementation = linear.IMPLEMENTATIONS[names.linear]
    if description:
        fused = max_fused_tokens if names.has_gpu_decode_kernels else 0
        if fused:
            _log.info("quantized weights: decode steps of up to %d tokens multiply them in the fused layers", fused)
        rest = "other steps" if fused else "all steps"
        _log.info("quantized weights: %s; linear in %s: %s, %s", description, rest, names.linear, implementation.note)
    for name, reason in products_left_to_xla(names, shapes).items():
        _log.warning("%s: XLA multiplies with dequantized weights, which is slower: %s", name, reason)
    if quantization is not None and quantization.dequantized:
        _log.info(
            "layers: %s weights, dequantized to %s while they are loaded (--dequantize)",
            quantization.name,
            shapes.dtype,
        )
    elif quantization is not None and not quantization.parameters:
        _log.warning("every projection is dequantized while it is loaded: each is left out in some layer")
    if shapes.cache_dtype.itemsize == 1:
        has_scales = quantization is not None and quantization.has_kv_scales
        kind = "with the checkpoint's scales" if has_scales else "without scales"
        _log.info("KV cache: %s, %s", shapes.cache_dtype, kind)


def products_left_to_xla(names: KernelNames, shapes: KernelShapes) -> dict[str, str]:
    """Returns why the chosen products leave quantized projections of a layer to XLA, by the projections' names."""
    unsupported = linear.IMPLEMENTATIONS[names.linear].unsupported_matrix
    reasons = {name: unsupported(matrix, shapes.dtype) for name, matrix in shapes.linear.matrices.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}
