"""Selects the kernels of a server from its options, its devices and its model's shapes.

Each operation has an ordered list of implementations (`kernels.implementation`), which is walked; the reasons of those
that cannot serve are kept. `name_kernels` decides by name, for any devices. `select_kernels` does so for devices of
this process, on which it opens and tests P2P memory, and returns the kernels. `make_kernels` returns the kernels of
given names, also for devices that are not present.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from meshserve.kernels import decode_layers, experts, linear, p2p, paged_attention, readback, sampling
from meshserve.kernels.implementation import AUTO, Device, Implementation, Refusal, choose
from meshserve.kernels.p2p import P2PGroup
from meshserve.kernels.readback import TokenReadback
from meshserve.sharding.chips import Chip, chip_of
from meshserve.sharding.collectives import p2p_max_bytes

from ..api.errors import ConfigError
from ..backend.kernels import Kernels
from ..options.serve_config import ServeConfig
from .kernel_log import log_kernels, log_quantization
from .kernel_names import OFF, XLA, KernelNames, OptionRefusal
from .kernel_shapes import KernelShapes
from .p2p_selection import P2PFindings, absent_group, open_named, open_tested

# With earlier releases, XLA copies each layer's weights out of the stacked array for cuBLAS (docs/log).
_LIBRARY_READS_IN_PLACE = jax.__version_info__ >= (0, 11)


# Options whose kernels every GPU that they support must have. Products may also miss a library, and sums a connection.
_NEEDED = ("attention", "decode_layers", "moe_backend")


class NamedKernels(NamedTuple):
    """The kernels of a server, and why better ones cannot serve."""

    names: KernelNames
    refusals: tuple[OptionRefusal, ...]


@dataclasses.dataclass(frozen=True)
class KernelSelection:
    """The kernels of a server on devices of this process."""

    names: KernelNames
    refusals: tuple[OptionRefusal, ...]
    kernels: Kernels
    findings: P2PFindings


def device_like(chip: Chip) -> Device:
    """Describes a device of a kind, which need not be present."""
    return Device(chip.platform, chip.kind, chip.compute_capability)


def name_kernels(
    config: ServeConfig, device: Device, shapes: KernelShapes, *, is_present: bool = False
) -> NamedKernels:
    """Returns the kernels that the options name, and for "auto" the first of each list that can serve.

    An automatic all-reduce is P2P on numbers of GPUs in one process for which it has been measured.

    Args:
      config: The options.
      device: One of the devices.
      shapes: The model's on each of them.
      is_present: Whether programs are built here, so that this host must also be able to build the kernels.

    Raises:
      ValueError: A kernel that the options name cannot serve, or none can.
      ConfigError: This host cannot build the kernels for its devices, and the options do not name others.
    """
    walk = _Walk(config, device, is_present=is_present)
    products = walk.name("linear", linear.IMPLEMENTATIONS, shapes.linear) if shapes.is_quantized else ""
    names = KernelNames(
        attention=walk.name("attention", paged_attention.IMPLEMENTATIONS, shapes.attention),
        decode_layers=walk.name("decode_layers", decode_layers.IMPLEMENTATIONS, shapes.decode_layers(), without=OFF),
        linear=products or (config.linear if config.linear != AUTO else XLA),
        all_reduce=_all_reduce(walk, config, shapes),
        gemm_backend=_gemm_backend(config),
        moe_backend=walk.name("moe_backend", experts.IMPLEMENTATIONS, shapes.experts),
    )
    return NamedKernels(names, tuple(walk.refusals))


class _Walk:
    """Chooses from lists of implementations, and keeps the reasons of those that it does not choose."""

    def __init__(self, config: ServeConfig, device: Device, *, is_present: bool):
        self._config, self._device, self._is_present = config, device, is_present
        self.refusals: list[OptionRefusal] = []

    def name(
        self, option: str, implementations: Mapping[str, Implementation[Any]], shapes: Any, *, without: str = ""
    ) -> str:
        """Returns the name of the implementation that serves, or of none of them, if there is such a value.

        Raises:
          ValueError: The named one cannot serve, or none can.
          ConfigError: None is named, and this host cannot build the one that the device is served by.
        """
        asked = getattr(self._config, option)
        if without and asked == without:
            return without
        found = choose(implementations, self._device, shapes, asked=asked, is_present=self._is_present)
        if option in _NEEDED and asked == AUTO == self._config.attention:
            for refusal in found.refusals:
                _check_available(refusal, self._device)
        chosen = found.implementation.name if found.implementation is not None else without if asked == AUTO else ""
        if not chosen:
            reasons = "; ".join(refusal.reason for refusal in found.refusals)
            flag = f"--{option.replace('_', '-')}"
            hint = "" if asked == AUTO else f" Use {flag} auto."
            raise ValueError(f"{flag} {asked} cannot serve this model here: {reasons}.{hint}")
        if shapes is not None:  # else the model has no use for it
            self.refusals += [OptionRefusal(option, chosen, each.name, each.reason) for each in found.refusals]
        return chosen


def _check_available(refusal: Refusal, device: Device) -> None:
    """Checks that a kernel is not missing only because this host cannot build it: the next one is many times slower.

    Raises:
      ConfigError: It is.
    """
    if refusal.is_unavailable:
        raise ConfigError(
            f"there are kernels for this {device.name}, but this host cannot build them: {refusal.reason}. To serve "
            "without them, many times slower, set --attention reference."
        )


def _all_reduce(walk: _Walk, config: ServeConfig, shapes: KernelShapes) -> str:
    """Returns the name of the all-reduce, after attention and layers have been chosen."""
    num_devices, asked = shapes.layout.num_shards, config.all_reduce
    is_measured = not config.coordinator and p2p_max_bytes(num_devices) > 0
    has_neither = {"attention", "decode_layers"} <= {refusal.option for refusal in walk.refusals}
    if asked == AUTO and (not is_measured or has_neither):  # not measured beside XLA's attention
        return XLA
    if num_devices == 1:
        return asked
    p2p_shapes = shapes.p2p(is_one_process=not config.coordinator)
    return walk.name("all_reduce", p2p.IMPLEMENTATIONS, p2p_shapes, without=XLA)


def _gemm_backend(config: ServeConfig) -> str:
    automatic = "library" if _LIBRARY_READS_IN_PLACE else "tuned"
    return automatic if config.gemm_backend == AUTO else config.gemm_backend


def max_fused_tokens(names: KernelNames, shapes: KernelShapes) -> int:
    """Returns the largest decode step, in tokens, that runs on the fused layers; 0 if none does."""
    if not names.has_decode_kernels:
        return 0
    has_fp8_products = linear.IMPLEMENTATIONS[names.linear].has_fp8_products
    found = shapes.decode_layers(has_fp8_products=has_fp8_products)
    return decode_layers.IMPLEMENTATIONS[names.decode_layers].max_tokens(found)


def max_fused_prompt_tokens(names: KernelNames, shapes: KernelShapes) -> int:
    """Returns the largest step with prompts, in tokens, that runs on the fused layers; 0 if none does."""
    if names.attention != names.decode_layers:  # which would attend otherwise than larger steps
        return 0
    return decode_layers.IMPLEMENTATIONS[names.decode_layers].max_prompt_tokens(shapes.decode_layers())


def select_kernels(
    config: ServeConfig, shapes: KernelShapes, mesh: Mesh, findings: P2PFindings | None = None
) -> KernelSelection:
    """Selects the kernels for devices of this process. Builds the CUDA kernels and opens P2P memory if they are used.

    Args:
      findings: What an earlier selection learned. None at startup, when the devices are idle: an automatic all-reduce
        is then tested before it is P2P. While a program is served, the test and its steps could wait for each other.

    Raises:
      ValueError: A kernel that the options name cannot serve the model on these devices, or none can.
      ConfigError: The devices stopped during the P2P test, so no program can run on them any more; or see
        `name_kernels`.
    """
    names, refusals = name_kernels(config, Device.of(mesh.devices.flat[0]), shapes, is_present=True)
    group, known = None, findings or P2PFindings()
    if names.has_p2p and mesh.size > 1:
        if config.all_reduce == AUTO:
            group, known = open_tested(mesh, names.all_reduce, findings)
        else:
            group = open_named(mesh, names.all_reduce)
        if group is None:
            names = dataclasses.replace(names, all_reduce=XLA)
    log_kernels(names, refusals, has_experts=shapes.model.experts is not None)
    log_quantization(names, shapes, max_fused_tokens(names, shapes))
    return KernelSelection(names, refusals, _kernels(names, shapes, mesh, group), known)


def make_kernels(names: KernelNames, shapes: KernelShapes, mesh: Mesh) -> Kernels:
    """Returns the named kernels for compiling programs for devices that are not present.

    Raises:
      ValueError: A named kernel cannot serve the model on such devices, or its compiler is not installed.
    """
    config = ServeConfig(**dataclasses.asdict(names))
    name_kernels(config, Device.of(mesh.devices.flat[0]), shapes, is_present=True)
    group = absent_group(mesh.size) if names.has_p2p and mesh.size > 1 else None
    return _kernels(names, shapes, mesh, group)


def _kernels(names: KernelNames, shapes: KernelShapes, mesh: Mesh, group: P2PGroup | None) -> Kernels:
    device, is_gpu = mesh.devices.flat[0], mesh.devices.flat[0].platform == "gpu"
    attention = paged_attention.IMPLEMENTATIONS[names.attention]
    decode = decode_layers.IMPLEMENTATIONS[names.decode_layers] if names.has_decode_kernels else None
    products = linear.IMPLEMENTATIONS[names.linear]
    # Logits are computed from activations as they are.
    head_products = linear.IMPLEMENTATIONS[XLA] if products.has_fp8_products else products
    return Kernels(
        attend=attention.attend,
        attend_part=attention.attend_part,
        linear=products.linear,
        head=head_products.linear if decode is None else decode.head,
        write=attention.write,
        # It finds the norms of a layer in one stack, by the model's layer.
        prepare=attention.prepare if len(shapes.model.stacks) == 1 else None,
        decode=None if decode is None else decode.kernels,
        max_fused_tokens=max_fused_tokens(names, shapes),
        max_fused_prompt_tokens=max_fused_prompt_tokens(names, shapes),
        experts=experts.IMPLEMENTATIONS[names.moe_backend].experts,
        is_unrolled=is_gpu or _is_unrolled(device),
        has_output_buffers=is_gpu,
        has_statistics_apart=is_gpu,
        has_library_gemms=names.gemm_backend == "library" and device.platform != "tpu",
        find_threshold=sampling.implementation(device, shapes.model.vocab_size) if names.has_gpu_kernels else None,
        readback=_readback(device, mesh.size) if names.has_gpu_decode_kernels else None,
        p2p=group,
        p2p_operations=p2p.IMPLEMENTATIONS[names.all_reduce].operations if group is not None else None,
    )


def _readback(device: jax.Device, num_devices: int) -> TokenReadback | None:
    found = choose(readback.IMPLEMENTATIONS, Device.of(device), num_devices, is_present=True).implementation
    return None if found is None else found.write_tokens


def _is_unrolled(device: jax.Device) -> bool:
    chip = chip_of(device)
    return chip is not None and chip.is_unrolled
