"""Describes what `bench kernels` times: a program with calls of one implementation, and its row of the table."""

import argparse
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from meshserve.kernels.implementation import Cost
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.chips import Chip
from meshserve.sharding.layout import ShardLayout


class Case(Protocol):
    """A shape of an operation: a dataclass, such as those of `kernels/<operation>/cases.py`."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Case)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A program that calls one implementation several times, one call after another.

    Attributes:
      run: Maps the program's state to the next one.
      state: The first state, which `run` may donate.
      num_calls: Calls in the program.
      cost: What the implementation says that a call takes at least.
      link_bytes: What a device must receive from other devices in a call.
      overhead: The program without the calls, whose time is subtracted; None if that is little.
      result: Returns the result of one call, for `--check`; None if implementations may differ.
    """

    run: Callable[[Any], Any]
    state: Any
    num_calls: int
    cost: Cost = Cost()
    link_bytes: float = 0.0
    overhead: Callable[[Any], Any] | None = None
    result: Callable[[], jax.Array] | None = None

    def least_seconds(self, chip: Chip | None) -> float:
        """Returns the minimum time of a call by the chip's data sheet, or 0 if that is not known."""
        if chip is None:
            return 0.0
        rates = (
            (self.cost.num_bytes, chip.hbm_bytes_per_second),
            (self.cost.operations, chip.flops_per_second),
            (self.cost.fp8_operations, chip.fp8_flops_per_second),
            (self.cost.float32_operations, chip.vector_flops_per_second),
            (self.link_bytes, chip.link_bytes_per_second),
        )
        return max(amount / rate if rate else 0.0 for amount, rate in rates)

    @property
    def num_operations(self) -> float:
        return self.cost.operations + self.cost.fp8_operations + self.cost.float32_operations


class Operation(Protocol):
    """A module of this package that defines what is timed of one operation."""

    @property
    def IMPLEMENTATIONS(self) -> Sequence[str]:
        """The names that `--implementation` takes."""
        ...

    def add_options(self, group: Any) -> None:
        """Adds the options that this operation alone has."""
        ...

    def cases(self, options: argparse.Namespace) -> Sequence[Any]:
        """Returns the cases that the options select."""
        ...

    def call(self, options: argparse.Namespace, case: Any, name: str) -> Call:
        """Returns the calls of an implementation. Raises ValueError if it does not support this device or case."""
        ...


TITLES = (
    f"{'case':44} {'implementation':14} {'us':>10} {'P10':>10} {'P90':>10} {'GB/s':>8} {'TFLOP/s':>8} {'roofline':>8}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table, of medians over rounds."""

    op: str
    case: str
    implementation: str
    device: str
    us: float
    us_p10: float
    us_p90: float
    gb_per_second: float
    tflops: float
    roofline_share: float | None  # None: the device's rates are not known
    error: float | None  # norm of the difference to the reference's result over that of the result
    shape: dict[str, Any]  # the fields of the case

    def text(self) -> str:
        share = "" if self.roofline_share is None else f"{self.roofline_share:.0%}"
        error = "" if self.error is None else f"  error {self.error:.1e}"
        return (
            f"{self.case:44} {self.implementation:14} {self.us:10.2f} {self.us_p10:10.2f} {self.us_p90:10.2f} "
            f"{self.gb_per_second:8,.0f} {self.tflops:8,.1f} {share:>8}{error}"
        )


def matching(found: Iterable[C], patterns: Sequence[str]) -> list[C]:
    """Returns the cases whose names match one of the patterns.

    Raises:
      SystemExit: There are none.
    """
    cases = list(found)
    chosen = [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name for case in cases))
        raise SystemExit(f"--case {' '.join(patterns)} matches none of the cases {names}.")
    return chosen


def sizes(options: argparse.Namespace, **settings: Any) -> tuple[ModelConfig, ShardLayout]:
    """Returns the model of `--model` and how `--tp` devices share it."""
    model = named_model(options.model)
    return model, model_layout(model, options.tp, **settings)


def relative_error(found: Any, expected: Any) -> float:
    """Returns the norm of the difference over the norm of what is expected."""
    wide = np.asarray(expected, np.float64)
    return float(np.linalg.norm(np.asarray(found, np.float64) - wide) / max(float(np.linalg.norm(wide)), 1e-30))
