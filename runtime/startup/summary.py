"""The lines of the log that tell what a server is: model, devices, TP size, KV cache, expected speed; and warnings."""

import contextlib
import logging
import os

import jax

from meshserve.kernels.cuda.user_folder import user_folder
from meshserve.sharding.chips import CHIPS, GIB, chip_of
from meshserve.sharding.guarded_files import check_owner

from ..plan.tp_choice import planner_of, roofline_of
from ..resolve.resolved_server import PlacedServer
from ..weights.locate import model_name
from ..weights.registry import architecture_of

_log = logging.getLogger(__name__)

_REQUEST_TOKENS = 1024  # length of the requests for which the expected speed is given
_KERNEL_PAGE_TOKENS = 16  # the attention kernels support multiples of it, or of more for some dtypes


def log_summary(server: PlacedServer, *, is_tp_chosen: bool) -> None:
    """Logs what the server will be, before anything is loaded.

    Args:
      server: The resolved server.
      is_tp_chosen: Whether the TP size was chosen automatically.
    """
    model, device = server.model, server.mesh.devices.flat[0]
    kind = server.dtype.name
    if model.quantization_name:
        kind = f"weights {model.quantization_name}, {kind}"
    name = model_name(server.requested.model)
    size = f"{model.num_params / 1e9:.3g} B" if model.num_params >= 1e8 else f"{model.num_params / 1e6:.3g} M"
    task = "" if model.pooling is None else f", to {model.task}"
    _log.info("model: %s, %s, %s parameters, %s%s", name, architecture_of(model).name, size, kind, task)
    chosen = ", chosen automatically" if is_tp_chosen else ""
    _log.info("devices: %d of %d x %s; tp %d%s", server.tp, jax.device_count(), device.device_kind, server.tp, chosen)
    _log.info("limits: %s", server.step_limits)
    if server.adapters is not None:
        _log.info(
            "adapters: %d at a time on the devices, of rank %d or less, in %.0f MiB of each; %s",
            server.adapters.num_slots, server.adapters.rank, server.adapter_bytes / (1 << 20),
            "only steps without any run on fused layers" if server.max_fused_tokens else "no layers are fused",
        )  # fmt: skip
    for line in _expectations(server):
        _log.info("%s", line)
    for warning in _warnings(server):
        _log.warning("%s", warning)


def _expectations(server: PlacedServer) -> list[str]:
    """Returns the planned size of the KV cache, and the speed by the roofline of the devices."""
    chip = chip_of(server.mesh.devices.flat[0]) or (CHIPS["cpu"] if server.platform == "cpu" else None)
    if chip is None:
        return ["expected speed: unknown, because the devices are not in sharding/chips"]
    planner, lines = planner_of(server, chip), []
    if chip.is_estimated:
        lines.append(
            f"{chip.kind} is not in sharding/chips; its attributes say {chip.hbm_bytes / GIB:.1f} GiB, "
            f"{chip.hbm_bytes_per_second / 1e9:,.0f} GB/s and {chip.flops_per_second / 1e12:,.0f} TFLOPS in bfloat16"
        )
    num_requests = server.limits.max_running
    with contextlib.suppress(MemoryError):  # loading the weights will tell whether they fit
        plan = planner.plan()
        num_requests = plan.num_requests(_REQUEST_TOKENS)
        lines.append(
            f"KV cache: about {plan.served_tokens:,} tokens, enough for {num_requests} requests of "
            f"{_REQUEST_TOKENS:,} tokens at the same time"
        )
    roofline = roofline_of(planner)
    if roofline is None:
        return [*lines, "expected speed: unknown, because the speed of CPUs is not known"]
    kernels = "" if roofline.is_measured else " (the kernels were never measured on this chip)"
    if server.model.pooling is not None:
        full = roofline.pooling(_REQUEST_TOKENS, server.limits.max_step_tokens)
        speed = f"{full.tokens_per_second:,.0f} tokens/s in full steps of texts of {_REQUEST_TOKENS:,} tokens"
        return [*lines, f"expected speed, at most, by the roofline{kernels}: {speed}"]
    alone, full = roofline.decode(1, _REQUEST_TOKENS), roofline.decode(max(num_requests, 1), _REQUEST_TOKENS)
    lines.append(
        f"expected speed, at most, by the roofline{kernels}: {alone.tokens_per_second:,.0f} tokens/s for one request, "
        f"{full.tokens_per_second:,.0f} tokens/s for {full.num_tokens} requests of {_REQUEST_TOKENS:,} tokens"
    )
    return lines


def _warnings(server: PlacedServer) -> list[str]:
    """Returns warnings about options that are allowed but probably a mistake."""
    size, warnings = server.limits.page_size, cache_dir_warnings(server.requested.cache_dir)
    if size % _KERNEL_PAGE_TOKENS:
        warnings.append(
            f"page_size is {size}, which is not a multiple of {_KERNEL_PAGE_TOKENS}: the attention kernels for GPUs "
            "and TPUs do not support it, and XLA's attention is slower. Use 16 or 32."
        )
    return warnings


def cache_dir_warnings(cache_dir: str) -> list[str]:
    """Returns a warning if another user may put programs into `cache_dir`. A group that shares it is trusted."""
    try:
        folder = user_folder(cache_dir) if cache_dir else None
        if folder is not None:
            check_owner(folder, os.stat(folder), is_group_trusted=True)
    except FileNotFoundError:
        pass  # it will be made
    except OSError as error:
        return [f"cache_dir is {cache_dir}, and {error}. Programs in it are run: whoever writes there is trusted."]
    return []


def warn_of_cache(server: PlacedServer, num_pages: int) -> None:
    """Warns if the KV cache has less room than one request may take."""
    num_tokens = num_pages * server.limits.page_size
    if num_tokens < server.limits.max_context:
        _log.warning(
            "the KV cache has room for %d tokens (%d pages of %d), less than max_context (%d): longer requests are "
            "refused or end early. Raise num_pages or memory_fraction, or lower max_context.",
            num_tokens, num_pages, server.limits.page_size, server.limits.max_context,
        )  # fmt: skip
