"""The experts of one layer on one device's block, with uniform or skewed routing.

Each call of a program computes another layer of the stack. Tokens choose experts independently, by a Zipf distribution
of exponent `--skew`; 0 is uniform. `--tune` sets arguments of the CUDA kernels, such as most_few_tokens=8.
"""

import argparse
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.benchmarks.lib.random_arrays import random_array, random_matrix
from meshserve.kernels import experts
from meshserve.kernels.decode_layers.cases import FORMATS
from meshserve.kernels.experts import ExpertShapes, ExpertStep, ExpertWeights, Routing
from meshserve.kernels.experts.cases import CASES, Case, choices

from .call import Call, matching, sizes

IMPLEMENTATIONS = tuple(name for name in experts.IMPLEMENTATIONS if not name.endswith("_interpreted"))
_FP8 = "fp8-block"


def add_options(group: Any) -> None:
    group.add_argument("--expert-parallel", action="store_true", help="devices hold whole experts")
    group.add_argument("--skew", type=float, default=0.0, help="exponent of the choices' Zipf distribution")


def cases(options: argparse.Namespace) -> list[Case]:
    if options.case:
        return matching(CASES, options.case)
    model, layout = sizes(options, expert_parallel=options.expert_parallel)
    if model.experts is None or layout.experts is None:
        raise SystemExit(f"{options.model} has no experts; take one of the mixture-of-experts sizes.")
    split = " by expert" if options.expert_parallel else ""
    skew = f" skew {options.skew:g}" if options.skew else ""
    case = Case(
        name="",
        num_tokens=0,
        num_experts=model.experts.num_experts,
        num_chosen=model.experts.num_chosen,
        embed=model.embed_dim,
        mlp=layout.experts.block_mlp_dim,
        block_experts=layout.experts.block_experts,
        skew=options.skew,
        num_layers=options.layers or 2,
        dtype=options.dtype,
        is_fp8=options.weights == _FP8,
    )
    form = "" if options.weights == "bfloat16" else f" {options.weights}"
    return [
        dataclasses.replace(
            case, name=f"{options.model} tp {options.tp}{split}{form}{skew} {tokens}", num_tokens=tokens
        )
        for tokens in options.tokens
    ]


def call(options: argparse.Namespace, case: Case, name: str) -> Call:
    kernel: Any = experts.implementation(name, jax.devices()[0])
    if options.tune and name in ("cuda", "portable"):
        kernel = partial(kernel, **options.tune)
    chosen = choices(case, np.random.default_rng(0)) - case.first_expert
    if case.padding:
        chosen[:: case.padding] = -1
    form = FORMATS.get(_FP8 if case.is_fp8 else options.weights)
    block = case.num_layers, case.num_local
    shapes = ((*block, 2, case.mlp, case.embed), (*block, case.embed, case.mlp))
    weights = ExpertWeights(*(random_matrix(shape, seed, form, case.dtype) for seed, shape in enumerate(shapes)))
    routing = Routing(jnp.asarray(chosen), jnp.full(chosen.shape, 1 / case.num_chosen, jnp.float32))
    x = random_array((case.num_tokens, case.embed), 2, case.dtype)

    @partial(jax.jit, static_argnums=3)
    def run(weights: ExpertWeights, routing: Routing, x: jax.Array, num_layers: int) -> jax.Array:
        for layer in range(num_layers):
            x += kernel(x, weights, routing, layer=layer, num_experts=case.num_experts)
        return x

    here = chosen[(chosen >= 0) & (chosen < case.num_local)]
    step = ExpertStep(case.num_tokens, len(np.unique(here)), here.size, case.num_experts)
    return Call(
        run=lambda x: run(weights, routing, x, case.num_layers),
        state=x,
        num_calls=case.num_layers,
        cost=experts.IMPLEMENTATIONS[name].cost(ExpertShapes(weights=weights, dtype=x.dtype), step),
        result=lambda: run(weights, routing, x, 1),
    )
