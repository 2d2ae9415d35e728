"""Shapes and random inputs for the tests and benchmarks of the experts."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from meshserve.kernels.linear import E4M3, Matrix, QuantizedMatrix, to_fp8
from meshserve.kernels.linear.cases import random_groups
from meshserve.kernels.linear.formats import SCALE

from . import ExpertWeights, Routing

_FP8_BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One case. The block holds `block_experts` of the experts, from `first_expert` on; 0 means all.

    Every `padding`-th token is padding, which chose no expert; 0 means none. `skew` is the exponent of a Zipf
    distribution of the choices; 0 is uniform.
    """

    name: str
    num_tokens: int
    num_experts: int = 16
    num_chosen: int = 4
    embed: int = 128
    mlp: int = 128
    first_expert: int = 0
    block_experts: int = 0
    padding: int = 0
    skew: float = 0.0
    num_layers: int = 2
    dtype: str = "float32"
    is_zero: bool = False  # no token chose an expert of the block, so that the output holds nothing but zeros
    is_fp8: bool = False  # the weights are 8-bit floats with a scale for each block of 128 x 128
    packed: str = ""  # a key of `linear.cases.PACKED`: the weights have scales for groups of columns
    group: int = 0  # columns of such a group
    is_by_row: bool = False  # instead, 8-bit floats have a scale for each row
    scale_dtype: str = "float32"  # of 8-bit floats

    @property
    def num_local(self) -> int:
        return self.block_experts or self.num_experts


CASES = (
    Case(name="one-token", num_tokens=1),
    Case(name="top-1", num_tokens=19, num_chosen=1),
    Case(name="every-expert", num_tokens=9, num_experts=4),
    Case(name="skewed", num_tokens=200, skew=2.0),
    Case(name="padding", num_tokens=33, padding=3),
    Case(name="all-padding", num_tokens=8, padding=1, is_zero=True),
    Case(name="a-block-of-experts", num_tokens=70, first_expert=4, block_experts=4),
    Case(name="a-block-that-nobody-chose", num_tokens=2, num_chosen=1, first_expert=15, block_experts=1, is_zero=True),
    Case(name="broken-lanes", num_tokens=40, mlp=96),
    Case(name="several-blocks", num_tokens=40, embed=256, mlp=384),
    Case(name="128-experts", num_tokens=64, num_experts=128, num_chosen=8, mlp=32),
    Case(name="bfloat16", num_tokens=48, dtype="bfloat16"),
    Case(name="fp8", num_tokens=21, mlp=256, padding=4, is_fp8=True),
)

PACKED_CASES = (
    Case(name="int4-128", num_tokens=21, mlp=256, padding=4, packed="int4", group=128),
    Case(name="int4-zero-64", num_tokens=70, mlp=192, skew=1.0, packed="int4-zero", group=64),
    Case(name="int4-32-one-token", num_tokens=1, mlp=96, packed="int4", group=32),
    Case(name="int4-block", num_tokens=40, first_expert=4, block_experts=4, packed="int4-zero", group=128),
    Case(name="int4-bfloat16", num_tokens=48, packed="int4", group=128, dtype="bfloat16"),
    Case(name="nvfp4", num_tokens=33, mlp=96, padding=3, packed="nvfp4", group=16),
    Case(name="nvfp4-block", num_tokens=5, packed="nvfp4", group=16, first_expert=4, block_experts=4),
    Case(name="mxfp4", num_tokens=70, mlp=192, skew=1.0, packed="mxfp4", group=32),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `Experts`."""

    x: jnp.ndarray
    weights: ExpertWeights
    routing: Routing


def choices(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Returns the experts that each token chooses, [T, k]."""
    # Events of independent Poisson processes: the first k to happen are a draw without replacement.
    mean_times = np.arange(1, case.num_experts + 1) ** case.skew
    order = np.argsort(rng.exponential(size=(case.num_tokens, case.num_experts)) * mean_times, axis=1)
    return order[:, : case.num_chosen].astype(np.int32)


def make_inputs(case: Case, seed: int) -> Inputs:
    """Returns random inputs. Rows of padding tokens hold NaN."""
    rng = np.random.default_rng(seed)
    shape = (case.num_layers, case.num_local)

    def matrix(*sizes: int) -> Matrix:
        if case.packed:
            return random_groups(rng, case.packed, sizes, case.group)
        values = rng.standard_normal(sizes, np.float32) * sizes[-1] ** -0.5
        if not case.is_fp8:
            return jnp.asarray(values, case.dtype)
        block = (1, sizes[-1]) if case.is_by_row else (_FP8_BLOCK, _FP8_BLOCK)
        grid = (*sizes[:-2], sizes[-2] // block[0], sizes[-1] // block[1])
        scale = (2.0 ** rng.uniform(-1, 1, grid) / 100).astype(jnp.dtype(case.scale_dtype))
        of_each = np.repeat(np.repeat(scale.astype(np.float32), block[0], axis=-2), block[1], axis=-1)
        return QuantizedMatrix(E4M3, to_fp8(jnp.asarray(values / of_each)), {SCALE: jnp.asarray(scale)})

    x = rng.standard_normal((case.num_tokens, case.embed), np.float32)
    experts = choices(case, rng) - case.first_expert
    if case.padding:
        experts[:: case.padding], x[:: case.padding] = -1, np.nan
    weights = ExpertWeights(gate_up=matrix(*shape, 2, case.mlp, case.embed), down=matrix(*shape, case.embed, case.mlp))
    shares = rng.random((case.num_tokens, case.num_chosen), np.float32)
    return Inputs(jnp.asarray(x, case.dtype), weights, Routing(jnp.asarray(experts), jnp.asarray(shares)))
