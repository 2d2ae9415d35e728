"""Compiles every program of the server for Hopper GPUs, without having one, and checks the compiled code.

    make check-cuda
    python -m meshserve.benchmarks.checks.check_cuda --models qwen3-8b --targets h100:1 --layers 4

For each model, machine and choice of kernels, every declared program must compile and fit, update the KV cache in
place, copy no weights, compute nothing twice, and call the expected kernels and all-reduces. The cache that fits beside
the programs must be the one that `meshserve plan` predicts. Needs jax's CUDA build and nvcc, but no GPU.
"""

import sys
from collections.abc import Iterator, Sequence

from meshserve.runtime.plan.memory_plan import Planner

from . import check_programs

MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")
TARGETS = ("h100:1", "h200:1", "h200:4")
KERNELS = {
    "cuda": {"attention": "cuda", "decode_layers": "cuda"},
    "xla sums": {"attention": "cuda", "decode_layers": "cuda", "all_reduce": "xla"},
    "xla": {"attention": "reference", "decode_layers": "off"},
}
_SEVERAL_DEVICES = {"qwen3-32b"}  # 61 GiB of weights leave no room for a useful cache on one GPU


def planner(model: str, target: str, kernels: str) -> Planner:
    """Plans a server of a published model size on a whole machine, with our kernels or XLA's."""
    return check_programs.planner(model, target, **KERNELS[kernels])


def planned(models: Sequence[str], targets: Sequence[str], kernels: Sequence[str]) -> Iterator[Planner]:
    for target in targets:
        for model in models:
            for name in kernels:
                plan = planner(model, target, name)
                is_different = plan.server.tp > 1 or name != "xla sums"
                if is_different and (plan.server.tp > 1 or model not in _SEVERAL_DEVICES):
                    yield plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check and returns 1 if any expectation fails."""
    parser = check_programs.parser("Compile every program for GPUs, without a GPU.", models=MODELS, targets=TARGETS)
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=tuple(KERNELS), help="default: all")
    options = parser.parse_args(arguments)
    servers = planned(options.models, options.targets, options.kernels)
    return check_programs.verdict(check_programs.check(servers, options))


if __name__ == "__main__":
    sys.exit(main())
