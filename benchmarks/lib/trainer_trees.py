"""Makes the weights that a trainer would hand over: trees of random arrays, with the names of each form."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.weight_updates.name_tables import NameTable
from meshserve.runtime.weight_updates.named_arrays import fused_expert_names, hugging_face_names, state_names
from meshserve.runtime.weight_updates.transposed_names import maxtext_names, tunix_names
from meshserve.runtime.weight_updates.weight_updater import has_room_for

from .random_arrays import random_array

Tree = Mapping[str, jax.Array | np.ndarray]

FORMS: Mapping[str, Callable[[ModelConfig], NameTable | None]] = {
    "hugging_face": hugging_face_names,
    "fused_experts": fused_expert_names,
    "tunix": tunix_names,
    "maxtext": maxtext_names,
    "state": state_names,
}
_BLOCK_BYTES = 1 << 30
_MARGIN_BYTES = 1 << 20


def trainer_tree(form: str, config: ModelConfig, mesh: Mesh, dtype: str) -> dict[str, jax.Array]:
    """Returns random weights, each array sharded over all devices of a mesh along an axis that their number divides.

    Args:
      form: One of `FORMS`.
      config: The served model.
      mesh: The trainer's devices.
      dtype: "bfloat16" or "float32".

    Raises:
      ValueError: The model has no arrays in this form.
    """
    table = FORMS[form](config)
    if table is None:
        raise ValueError(f"this model has no form {form!r}. Choose others of {', '.join(FORMS)}.")
    devices = Mesh(np.array(mesh.devices).reshape(-1), ("fsdp",))
    tree = {}
    for seed, (name, shape) in enumerate(table.shapes.items()):
        made = jnp.ones(shape, dtype) if "norm" in name else random_array(shape, seed, dtype)
        tree[name] = jax.block_until_ready(jax.device_put(made, fully_sharded(shape, devices)))
    return tree


def fully_sharded(shape: tuple[int, ...], devices: Mesh) -> NamedSharding:
    """Returns the sharding over a mesh with one axis, `fsdp`, along the first axis of an array that it divides."""
    axis = next((axis for axis, length in enumerate(shape) if length % devices.size == 0), None)
    return NamedSharding(devices, PartitionSpec(*("fsdp" if each == axis else None for each in range(len(shape)))))


def with_other_tables(tree: Mapping[str, jax.Array], vocab_size: int) -> dict[str, jax.Array]:
    """Returns weights that give other tokens: the order of the vocabulary is reversed, all other arrays are shared."""
    return {name: _reversed(array, vocab_size) for name, array in tree.items()}


def _reversed(array: jax.Array, vocab_size: int) -> jax.Array:
    axes = tuple(axis for axis, length in enumerate(array.shape) if length == vocab_size)
    return jax.device_put(jnp.flip(array, axes[0]), array.sharding) if axes else array


def on_host(tree: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Returns the arrays in host memory that is not pinned. jax keeps the copy of each for the next call."""
    return {name: np.asarray(array) for name, array in tree.items()}


@contextlib.contextmanager
def filled_devices(mesh: Mesh, num_bytes: int) -> Iterator[None]:
    """Fills the memory of accelerators, so that a little less than `num_bytes` is free on each."""
    held: list[jax.Array] = []
    while not all(is_full := [_excess_bytes(device, num_bytes) <= 0 for device in mesh.local_devices]):
        for device in (each for each, full in zip(mesh.local_devices, is_full, strict=True) if not full):
            size = min(_excess_bytes(device, num_bytes), _BLOCK_BYTES)
            held.append(jax.block_until_ready(jnp.zeros(size, jnp.uint8, device=device)))
    assert not has_room_for(mesh, num_bytes), "CPU devices cannot be filled"
    try:
        yield
    finally:
        for array in held:
            array.delete()


def _excess_bytes(device: jax.Device, num_bytes: int) -> int:
    """Returns how much must be taken of a device until `num_bytes`, less a margin, are free."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return 0
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return 0 if free < num_bytes else free - num_bytes + _MARGIN_BYTES
