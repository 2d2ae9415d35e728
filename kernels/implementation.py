"""What an implementation of an operation says about itself, and how one is chosen.

Each folder beside this file is an operation. Its `contract.py` defines what an implementation computes, each further
module is an implementation, and its `__init__.py` lists them in order: the first that can serve a device and shapes is
chosen. An implementation says what it cannot serve (`unsupported_reason`), what it costs (`cost`), and on which chips
its speed was measured. To add one, write a module that ends with its description, and put it in the list.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax

AUTO = "auto"

Shapes = TypeVar("Shapes")


class Device(NamedTuple):
    """What decides whether kernels run on a device, which need not be present."""

    platform: str  # JAX's name
    name: str = ""  # for messages
    compute_capability: tuple[int, int] | None = None  # of an NVIDIA GPU

    @classmethod
    def of(cls, device: jax.Device | None = None) -> "Device":
        """Describes a device, which may be a compile-only one; None means this process's first device."""
        device = jax.devices()[0] if device is None else device
        major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
        capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
        return cls(device.platform, device.device_kind, capability)


def no_tpu(device: Device) -> str | None:
    """Returns why a kernel for TPUs cannot run on a device, or None if it can."""
    return None if device.platform == "tpu" else f"the backend is {device.platform}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What an operation takes on one device, at least. Costs of operations that follow each other add up.

    Attributes:
      num_bytes: Read from and written to the device's memory.
      operations: On its matrix units in 16 bits; a multiplication and an addition are two.
      fp8_operations: The same in 8 bits.
      float32_operations: Outside of the matrix units.
      num_launches: Kernels that the host launches one after the other, because no graph can hold them.
      scratch_bytes: Memory that it needs meanwhile; the largest of several operations counts.
    """

    num_bytes: float = 0.0
    operations: float = 0.0
    fp8_operations: float = 0.0
    float32_operations: float = 0.0
    num_launches: float = 0.0
    scratch_bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            num_bytes=self.num_bytes + other.num_bytes,
            operations=self.operations + other.operations,
            fp8_operations=self.fp8_operations + other.fp8_operations,
            float32_operations=self.float32_operations + other.float32_operations,
            num_launches=self.num_launches + other.num_launches,
            scratch_bytes=max(self.scratch_bytes, other.scratch_bytes),
        )

    def times(self, number: float) -> "Cost":
        """Returns the cost of so many such operations."""
        return Cost(
            num_bytes=number * self.num_bytes,
            operations=number * self.operations,
            fp8_operations=number * self.fp8_operations,
            float32_operations=number * self.float32_operations,
            num_launches=number * self.num_launches,
            scratch_bytes=self.scratch_bytes,
        )


def _every(_: Any) -> None:
    return None


def _available() -> str | None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation(Generic[Shapes]):
    """The description of one implementation. Operations add what it computes, and a function for its cost.

    Attributes:
      name: The value of the option that names it.
      unsupported_device: Why it cannot run on a device, which need not be present, or None if it can.
      unsupported_shapes: Why it cannot serve the operation's shapes, or None if it can.
      unavailable_reason: Why this host cannot build or load it, or None if it can. May take long the first time.
      automatic_on: Platforms of JAX on which it may be chosen without being named.
      by_name_on: Compute capabilities of the GPUs among them on which it must be named.
      measured_on: Chips on which its speed was measured, named as in `meshserve plan --target`.
      reached: The share of a data sheet's operations per second in 16 bits that it reached there in large steps.
      fp8_reached: The same in 8 bits.
      bytes_reached: The same of its bytes per second.
    """

    name: str
    unsupported_device: Callable[[Device], str | None] = _every
    unsupported_shapes: Callable[[Shapes], str | None] = _every
    unavailable_reason: Callable[[], str | None] = _available
    automatic_on: tuple[str, ...] = ()
    by_name_on: tuple[tuple[int, int], ...] = ()
    measured_on: tuple[str, ...] = ()
    reached: float = 1.0
    fp8_reached: float = 1.0
    bytes_reached: float = 1.0

    def unsupported_reason(self, device: Device, shapes: Shapes | None) -> str | None:
        """Returns why it cannot serve shapes, or None for any, on a device; None if it can."""
        return self.unsupported_device(device) or (None if shapes is None else self.unsupported_shapes(shapes))

    def is_automatic(self, device: Device) -> bool:
        """Returns whether it may be chosen for a device without being named."""
        return device.platform in self.automatic_on and device.compute_capability not in self.by_name_on

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel for one platform, unlike operations of XLA."""
        return len(self.automatic_on) == 1

    @property
    def is_for_gpus(self) -> bool:
        """Whether it is a kernel for GPUs."""
        return self.automatic_on == ("gpu",)


Chosen = TypeVar("Chosen", bound=Implementation[Any])


class Refusal(NamedTuple):
    """Why an implementation was not chosen."""

    name: str
    reason: str
    is_unavailable: bool = False  # it could serve, and this host cannot build or load it


class Choice(NamedTuple, Generic[Chosen]):
    """The first implementation that can serve, or None; and why those before it cannot."""

    implementation: Chosen | None
    refusals: tuple[Refusal, ...] = ()


def in_order(*implementations: Chosen) -> dict[str, Chosen]:
    """Returns implementations by name, in the order in which they are preferred."""
    return {each.name: each for each in implementations}


def choose(
    implementations: Mapping[str, Chosen],
    device: Device,
    shapes: Any,
    *,
    asked: str = AUTO,
    is_present: bool = False,
) -> Choice[Chosen]:
    """Walks a list and returns the first implementation that can serve.

    Args:
      implementations: Those of the operation, in order.
      device: The device.
      shapes: The operation's shapes on it.
      asked: The name of the only one that may be chosen, or "auto" for any that is automatic on the platform.
      is_present: Whether programs are built here, so that this host must also be able to build it.
    """
    if asked != AUTO:
        walked = [implementations[asked]]
    else:
        walked = [each for each in implementations.values() if each.is_automatic(device)]
    refusals: list[Refusal] = []
    for each in walked:
        reason, unavailable = each.unsupported_reason(device, shapes), None
        if reason is None and is_present:
            unavailable = each.unavailable_reason()
        if reason is None and unavailable is None:
            return Choice(each, tuple(refusals))
        refusals.append(Refusal(each.name, reason or unavailable or "", is_unavailable=unavailable is not None))
    return Choice(None, tuple(refusals))


def named(implementations: Mapping[str, Chosen], option: str, name: str, device: jax.Device | None) -> Chosen:
    """Returns the implementation of a name, whatever the shapes are.

    Args:
      implementations: Those of the operation.
      option: The option that names it, for messages.
      name: The name.
      device: The device that it must run on; None means this process's first device.

    Raises:
      ValueError: There is none of this name, or it cannot run on the device; the message says why, and what can.
    """
    if name not in implementations:
        raise ValueError(f"{option} is {name!r}; this build has {', '.join(implementations)}.")
    found, runs_on = implementations[name], Device.of(device)
    if reason := found.unsupported_reason(runs_on, None) or found.unavailable_reason():
        others = [each for each in implementations.values() if each.unsupported_device(runs_on) is None]
        others.sort(key=lambda each: not each.is_automatic(runs_on))
        raise ValueError(f"{option} {name!r} cannot run: {reason}. Use {others[0].name!r}.")
    return found
