"""Counts the experts that a step's tokens chose, on the device and within the step.

Every device routes all tokens, so each counts the choices of all experts, and nothing is communicated.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..model_files.model_config import ModelConfig


def counts_shape(model: ModelConfig) -> jax.ShapeDtypeStruct | None:
    """Returns the shape of the counts, [layers with experts, experts] uint32; None for a model without experts.

    They wrap around: `ExpertTokens` reads them often enough to notice.
    """
    if model.experts is None:
        return None
    return jax.ShapeDtypeStruct((len(model.stacks["layers"]), model.experts.num_experts), jnp.uint32)


def add_choices(counts: jax.Array | None, chosen: Sequence[jax.Array]) -> jax.Array | None:
    """Returns the counts plus those of a step.

    Consecutive layers of one shape are counted together: a GPU then runs two small kernels and not two for each layer.

    Args:
      counts: [layers, experts], as `counts_shape`; None for a model without experts.
      chosen: what the layers' tokens chose, in order: [T, k] of one layer or [layers, T, k] of several. Layers may have
        different T. Numbers that are no expert's, such as -1, are not counted.
    """
    if counts is None:
        return None
    stacks: list[list[jax.Array]] = []
    for choices in chosen:
        if stacks and choices.ndim == 2 and stacks[-1][0].shape == choices.shape:
            stacks[-1].append(choices)
        else:
            stacks.append([choices])
    experts = jnp.arange(counts.shape[1], dtype=jnp.int32)
    added = []
    for stack in stacks:
        whole = stack[0] if stack[0].ndim == 3 else jnp.stack(stack)
        is_chosen = whole.reshape(len(whole), -1)[:, :, None] == experts
        added.append(jnp.sum(is_chosen, axis=1, dtype=jnp.uint32))
    return counts + jnp.concatenate(added)
