"""The products of a layer on one device's block, plain or quantized, each with the operation before it.

Each call of a program multiplies by another layer of a stack. The operation before a product (a norm, SiLU) is left out
with `--plain`; the costs are those of the product alone. The error is that of the product by `reference`,
which does not round activations: implementations that round them to FP8 are off by some 3e-2. `--tune` sets arguments
of the implementation, such as candidate=3 of cuda_fp8.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshserve.benchmarks.lib.random_arrays import random_array, random_matrix
from meshserve.kernels import linear
from meshserve.kernels.decode_layers.cases import FORMATS, CaseFormat
from meshserve.kernels.linear import E4M3, INT4, Format, Matrix, Prologue, RMSNorm, silu_product
from meshserve.kernels.linear.cases import CASES, MATRIX_CASES, Case
from meshserve.sharding.chips import compiler_options
from meshserve.sharding.mesh import make_mesh

from .call import Call, matching, sizes

IMPLEMENTATIONS = tuple(linear.IMPLEMENTATIONS)
PROJECTIONS = ("qkv", "o", "gate_up", "down")
_KINDS: dict[str, Format] = {"fp8": E4M3, "int4": INT4}  # by the kind of a case


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductCase(Case):
    """A product, and the name of the projection, which says what comes before it."""

    projection: str = ""
    num_layers: int = 1


def add_options(group: Any) -> None:
    group.add_argument("--plain", action="store_true", help="leave out the operation before each product")


def cases(options: argparse.Namespace) -> list[ProductCase]:
    if options.case:
        return [ProductCase(**vars(case)) for case in matching((*CASES, *MATRIX_CASES), options.case)]
    found = []
    for tokens in options.tokens:
        for projection in options.projections or PROJECTIONS:
            rows, columns = shape_of(options, projection)
            case = ProductCase(
                name=f"{options.model} tp {options.tp} {options.weights} {projection} {tokens}",
                **_format_fields(options.weights, columns),
                tokens=tokens,
                rows=rows,
                columns=columns,
                dtype=options.dtype,
                projection="" if options.plain else projection,
                num_layers=options.layers or 6,
            )
            found.append(case)
    return found


def shape_of(options: argparse.Namespace, projection: str) -> tuple[int, int]:
    """Returns the rows and columns of a projection on one device."""
    model, layout = sizes(options)
    embed, mlp = model.embed_dim, layout.mlp_dim // options.tp
    groups, queries = layout.num_groups // options.tp, layout.group_size * model.head_dim
    return {
        "qkv": (groups * (queries + 2 * model.head_dim), embed),
        "o": (embed, groups * queries),
        "gate_up": (2 * mlp, embed),
        "down": (embed, mlp),
    }[projection]


def _format_fields(weights: str, columns: int) -> dict[str, Any]:
    """Returns the fields of a case that say how its matrix is quantized."""
    if weights == "bfloat16":
        return {"kind": "plain"}
    form = FORMATS[weights]
    kind = next(kind for kind, format in _KINDS.items() if format == form.format)
    block = (form.block[0], form.block[1] or columns)
    return {"kind": f"{kind}-zero" if form.has_zero else kind, "block": block, "scale_dtype": form.scale_dtype}


def _format_of(case: Case) -> CaseFormat | None:
    kind, _, zero = case.kind.partition("-")
    return None if kind == "plain" else CaseFormat(_KINDS[kind], case.block, case.scale_dtype, bool(zero))


def call(options: argparse.Namespace, case: ProductCase, name: str) -> Call:
    shape = (case.num_layers, *case.leading, case.rows, case.columns)
    weights = random_matrix(shape, 0, _format_of(case), case.dtype)
    prologue = _prologue(case)
    x = random_array((case.tokens, (2 if prologue is silu_product else 1) * case.columns), 3, case.dtype) * 32
    product: Callable[..., jax.Array] = linear.implementation(name)
    if options.tune and name == "cuda_fp8":
        product = partial(product, **options.tune)

    def products(weights: Matrix, x: jax.Array) -> list[jax.Array]:
        layers = [jax.tree.map(lambda stack, layer=layer: stack[layer], weights) for layer in range(case.num_layers)]
        return [product(x, layer, prologue=prologue) for layer in layers]

    layer = jax.eval_shape(lambda stack: jax.tree.map(lambda array: array[0], stack), weights)
    settings = compiler_options(make_mesh(1), has_library_gemms=True)
    program = jax.jit(products).lower(weights, x).compile(compiler_options=settings)
    return Call(
        run=lambda _: program(weights, x),
        state=None,
        num_calls=case.num_layers,
        cost=linear.IMPLEMENTATIONS[name].cost(layer, case.tokens, x.dtype),
        result=lambda: program(weights, x)[-1],
    )


def _prologue(case: ProductCase) -> Prologue | None:
    """Returns the operation that the model has before a projection."""
    if case.projection in ("", "o"):
        return None
    if case.projection == "down":
        return silu_product
    return RMSNorm(jnp.asarray(random_array((case.columns,), 4, case.dtype) * 32), 1e-6)
