"""Times the implementations of an operation that run on this machine: microseconds, rates, share of the roofline.

    meshserve bench kernels --op attention --steps 1x32/1024 1x128/1024 4096 2048x1/65536
    meshserve bench kernels --op decode_layers --model qwen3-8b --weights fp8-block --steps 1x1/1024 1x32/1024
    meshserve bench kernels --op experts --model qwen3-30b-a3b --tokens 1 8 32 128 --skew 1
    meshserve bench kernels --op linear --tp 4 --weights fp8-channel --implementation cuda_fp8 xla --tokens 128 4096
    meshserve bench kernels --op p2p --tp 4
    meshserve bench kernels --op sampling --tokens 1 64 256
    meshserve bench kernels --op attention --case 'qwen3-8b-*'      # cases of kernels/paged_attention/cases.py

Shapes are those of a model on one of `--tp` devices, or the named cases of the operation's tests. Every figure is of a
sequence of calls that the device runs without waiting for the host; median, P10 and P90 are over rounds of such
sequences. Bytes and operations are those of the implementation's own cost (`kernels/implementation.py`), by which a
server is planned. The roofline is the time that they take by the chip's data sheet, whichever takes longest.
"""

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshserve.benchmarks.lib.timing import timed_ms
from meshserve.kernels.decode_layers.cases import FORMATS
from meshserve.sharding.chips import chip_of
from meshserve.sharding.mesh import use_cpu_devices, use_dispatch_threads

from . import attention, decode_layers, experts, linear, p2p, sampling
from .call import TITLES, Call, Operation, Row, relative_error

OPERATIONS: Mapping[str, Operation] = {
    "attention": attention,
    "decode_layers": decode_layers,
    "experts": experts,
    "linear": linear,
    "p2p": p2p,
    "sampling": sampling,
}
_LEAST_MS = 1e-6  # what remains of a call that takes no longer than its overhead
_REFERENCE = "reference"  # timed by default only where nothing else runs


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.model = options.model or ("qwen3-30b-a3b" if options.op == "experts" else "qwen3-8b")
    options.tune = {key: int(value) for key, _, value in (pair.partition("=") for pair in options.tune)}
    if options.cpu_devices:
        use_cpu_devices(options.cpu_devices)
    elif options.op == "p2p":
        use_dispatch_threads()
    if options.op == "p2p" and options.check_seconds:
        checked = [row for each in _each_tp(options) for row in p2p.check(each)]
        _write(options.json, checked)
        return 1 if any(row["num_wrong"] for row in checked) else 0
    operation = OPERATIONS[options.op]
    if unknown := set(options.implementation or ()) - set(operation.IMPLEMENTATIONS):
        parser().error(f"--implementation {' '.join(unknown)}: {options.op} has {', '.join(operation.IMPLEMENTATIONS)}")
    print(f"{options.op} on {jax.devices()[0].device_kind}\n{TITLES}", flush=True)
    rows = [row for each in _each_tp(options) for case in operation.cases(each) for row in _rows(each, operation, case)]
    if not rows:
        print("no implementation supports these cases on this machine")
        return 1
    _write(options.json, [dataclasses.asdict(row) for row in rows])
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshserve bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=OPERATIONS, required=True)
    parser.add_argument(
        "--implementation", nargs="+", help="default: all that run on this machine, the reference only if it is alone"
    )
    parser.add_argument("--case", nargs="+", help="names or patterns of the tests' cases, instead of a model's shapes")
    parser.add_argument("--model", help="published size (default: qwen3-8b, of experts qwen3-30b-a3b)")
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1], help="number of devices: one is measured; for p2p and sampling all"
    )
    parser.add_argument(
        "--steps", nargs="+", default=["1x1/1024", "1x32/1024"], metavar="NxB/C",
        help="steps of attention and decode_layers: B requests with N new tokens each and C in all, + adds more",
    )  # fmt: skip
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1, 32, 128],
        help="tokens per step of experts and linear, requests of sampling",
    )
    parser.add_argument(
        "--projections", nargs="+", choices=linear.PROJECTIONS, help="products to time alone (linear: all by default)"
    )
    parser.add_argument("--weights", choices=("bfloat16", *FORMATS), default="bfloat16", help="format of the weights")
    parser.add_argument(
        "--kv-dtype", default="", help="dtype of the KV cache, such as float8_e4m3fn (default: --dtype)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0, help="layers in the stack, 0 for the operation's own number")
    parser.add_argument(
        "--tune", nargs="+", default=[], metavar="KEY=N", help="arguments of the CUDA implementation, for tuning"
    )
    parser.add_argument("--check", action="store_true", help=f"compare each result with that of {_REFERENCE!r}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time per figure")
    parser.add_argument("--cpu-devices", type=int, default=0, help="use virtual CPU devices")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    for name, operation in OPERATIONS.items():
        operation.add_options(parser.add_argument_group(f"options for {name}"))
    return parser


def _each_tp(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Returns the options once for each TP size. Named cases have shapes of their own."""
    sizes = options.tp[:1] if options.case else options.tp
    return [argparse.Namespace(**{**vars(options), "tp": tp}) for tp in sizes]


def _rows(options: argparse.Namespace, operation: Operation, case: Any) -> list[Row]:
    """Times the implementations of one case, and prints their rows."""
    expected = _result(options, operation, case, _REFERENCE) if options.check else None
    names = options.implementation or [name for name in operation.IMPLEMENTATIONS if name != _REFERENCE]
    rows = [row for name in names if (row := _row(options, operation, case, name, expected)) is not None]
    if not rows and not options.implementation and _REFERENCE in operation.IMPLEMENTATIONS:
        rows = [row for row in [_row(options, operation, case, _REFERENCE, expected)] if row is not None]
    return rows


def _row(
    options: argparse.Namespace, operation: Operation, case: Any, name: str, expected: np.ndarray | None
) -> Row | None:
    """Times one implementation. Prints and returns its row, or prints why there is none."""
    gc.collect()  # frees the weights and pages of the call before
    try:
        found = _result(options, operation, case, name) if expected is not None else None
        call = operation.call(options, case, name)
        figures = _figures(call, options)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = f"{case.name:44} {name:14} is not supported here: {str(error).splitlines()[0][:120]}"
        print(reason, file=sys.stdout if options.implementation else sys.stderr, flush=True)
        return None
    us, p10, p90 = (1e3 * float(np.percentile(figures, percent)) for percent in (50, 10, 90))
    least = 1e6 * call.least_seconds(chip_of(jax.devices()[0]))
    row = Row(
        op=options.op,
        case=case.name,
        implementation=name,
        device=jax.devices()[0].device_kind,
        us=us,
        us_p10=p10,
        us_p90=p90,
        gb_per_second=(call.cost.num_bytes or call.link_bytes) / us / 1e3,
        tflops=call.num_operations / us / 1e6,
        roofline_share=least / us if least else None,
        error=None if found is None or expected is None else relative_error(found, expected),
        shape={**dataclasses.asdict(case), "name": case.name},
    )
    print(row.text(), flush=True)
    return row


def _figures(call: Call, options: argparse.Namespace) -> list[float]:
    """Returns the milliseconds of a call, by round."""
    figures, _ = timed_ms(call.run, call.state, call.num_calls, options.rounds, options.seconds)
    if call.overhead is None:
        return figures
    others, _ = timed_ms(call.overhead, call.state, call.num_calls, options.rounds, options.seconds)
    overhead = float(np.median(others))
    return [max(_LEAST_MS, figure - overhead) for figure in figures]


def _result(options: argparse.Namespace, operation: Operation, case: Any, name: str) -> np.ndarray | None:
    """Returns the result of one call of an implementation, or None if it is not to be compared."""
    call = operation.call(options, case, name) if name in operation.IMPLEMENTATIONS else None
    found = call.result() if call is not None and call.result is not None else None
    return None if found is None else np.asarray(found, np.float32)


def _write(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps(rows, indent=1, default=str))


if __name__ == "__main__":
    raise SystemExit(main())
