"""What the tests of the experts on GPUs since Ampere share: cases, and results in float64."""

import dataclasses

import jax
import numpy as np

from meshserve.kernels.experts import cases
from meshserve.kernels.linear.cases import exact_matrix

BOUND = 8e-3  # limit of ||out - expected|| / ||expected||; rounding to bfloat16 alone: 2e-3 to 4e-3

# Small ones, which are also run on the host.
CASES = (
    *(dataclasses.replace(case, dtype="bfloat16") for case in cases.CASES),
    *(
        dataclasses.replace(case, dtype="bfloat16")
        for case in cases.PACKED_CASES
        if case.packed.startswith("int4") and case.name != "int4-bfloat16"
    ),
    cases.Case(name="int4-32", num_tokens=21, padding=4, dtype="bfloat16", packed="int4", group=32),
    cases.Case(name="int4-64-zero", num_tokens=7, mlp=256, dtype="bfloat16", packed="int4-zero", group=64),
    cases.Case(name="int4-128-zero", num_tokens=90, embed=256, dtype="bfloat16", packed="int4-zero", group=128),
    cases.Case(name="fp8-rows", num_tokens=12, mlp=192, dtype="bfloat16", is_fp8=True, is_by_row=True,
               scale_dtype="bfloat16"),
    cases.Case(name="fp8-blocks", num_tokens=70, embed=256, mlp=384, num_experts=4, num_chosen=2, skew=1.0,
               padding=5, dtype="bfloat16", is_fp8=True),
)  # fmt: skip


def expected(inputs: cases.Inputs, layer: int) -> np.ndarray:
    """Returns the output [T, D] in float64, expert by expert, of exactly dequantized weights."""
    chosen, shares = (np.asarray(array) for array in inputs.routing)
    x = np.nan_to_num(np.asarray(inputs.x, np.float64))
    outputs = np.zeros(x.shape)
    for expert in range(inputs.weights.down.shape[1]):
        tokens, slots = np.nonzero(chosen == expert)
        if len(tokens):
            gate_up, down = (
                exact_matrix(jax.tree.map(lambda array: array[layer, expert], stack))  # noqa: B023
                for stack in inputs.weights
            )
            gate, up = (x[tokens] @ matrix.T for matrix in gate_up)
            outputs[tokens] += shares[tokens, slots, None] * (gate / (1 + np.exp(-gate)) * up @ down.T)
    return outputs


def check(found: np.ndarray, truth: np.ndarray, *, bound: float = BOUND) -> None:
    """Checks that each token's output is the truth up to rounding, and 0 where that is 0."""
    found = np.asarray(found).astype(np.float64)
    assert np.isfinite(found).all()
    is_here = (np.abs(truth).sum(axis=1) > 0)[:, None]
    np.testing.assert_array_equal(np.where(is_here, 0, found), 0)
    error = np.linalg.norm(found - truth, axis=1)
    assert (error <= 4 * bound * np.linalg.norm(truth, axis=1)).all(), error / np.linalg.norm(truth, axis=1)
    assert np.linalg.norm(error) <= bound * np.linalg.norm(truth), np.linalg.norm(error) / np.linalg.norm(truth)
