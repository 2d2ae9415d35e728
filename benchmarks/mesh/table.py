"""The lines of the table: what was measured, beside the roofline, the time in all-reduces, and vLLM."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.plan.roofline import Roofline
from meshserve.runtime.resolve.kernel_shapes import KernelShapes
from meshserve.runtime.weights.orbax_layout import model_layout

from .machine import Machine

MS_A_TOKEN, TOKENS_PER_SECOND = "ms a token", "output tokens/s"
_MAX_STEP_TOKENS, _PAGE_TOKENS = 8192, 32  # a server's defaults on GPUs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One measured figure.

    Attributes:
      all_reduces: Their number in a decode step, and the kilobytes of each.
      ideal: The figure at the roofline: reading the weights and the KV cache at the memory's rate by the data sheet,
        and prefill at the peak of the tensor cores, without all-reduces.
      aim: What it should be at most, or for rates at least.
    """

    row: str
    workload: str
    figure: str
    value: float
    vllm: float | None = None
    ideal: float | None = None
    aim: float | None = None
    all_reduces: tuple[int, float] | None = None
    note: str = ""

    @property
    def is_rate(self) -> bool:
        return self.figure == TOKENS_PER_SECOND


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a mesh, from which the roofline of a workload follows."""

    machine: Machine
    model: ModelConfig
    tp: int
    expert_parallel: bool = False

    @property
    def _roofline(self) -> Roofline:
        layout = model_layout(self.model, self.tp, expert_parallel=self.expert_parallel)
        dtype = jnp.dtype("bfloat16")
        shapes = KernelShapes(model=self.model, layout=layout, dtype=dtype, cache_dtype=dtype, page_size=_PAGE_TOKENS)
        return Roofline(shapes=shapes, chip=self.machine.chip, has_p2p=True)

    def step_ms(self, batch: int, context: int) -> float:
        return 1e3 * self._roofline.decode(batch, context).seconds

    def tokens_per_second(self, num_requests: int, num_in: int, num_out: int) -> float:
        """Returns the rate of requests that start together and run at once."""
        step = self._roofline.pooling(num_in, _MAX_STEP_TOKENS)
        prefill_seconds = num_requests * num_in * step.seconds / step.num_tokens
        step_seconds = self._roofline.decode(num_requests, num_in + num_out // 2).seconds
        return num_requests * num_out / (prefill_seconds + num_out * step_seconds)

    def all_reduces(self, batch: int) -> tuple[int, float] | None:
        """Returns the number of all-reduces of a decode step, and the kilobytes of each."""
        if self.tp == 1:
            return None
        return 2 * self.model.num_layers + 1, batch * self.model.embed_dim * 2 / 1024


def sum_microseconds(sums: Sequence[Mapping[str, Any]], tp: int, kilobytes: float) -> float | None:
    """Returns the time of an all-reduce of this size from rows of `bench kernels --op p2p`, or None.

    Where both were measured, it is that of P2P. Between two measured sizes the time is interpolated; below the smallest
    it is that of the smallest.
    """
    found: dict[float, float] = {}
    for row in sorted(sums, key=lambda row: row["implementation"] == "p2p"):
        if row["shape"]["tp"] == tp:
            found[row["shape"]["kilobytes"]] = row["us"]
    points = sorted(found.items())
    if not points or kilobytes > points[-1][0]:
        return None
    before = points[0]
    for size, microseconds in points:
        if size >= kilobytes:
            share = 0.0 if size == before[0] else max(0.0, (kilobytes - before[0]) / (size - before[0]))
            return before[1] + share * (microseconds - before[1])
        before = size, microseconds
    return None


def table(lines: Sequence[Line], sums: Sequence[Mapping[str, Any]], tp_of: Mapping[str, int]) -> str:
    """Formats the lines as Markdown.

    Args:
      lines: In the order of the table.
      sums: The rows of `bench kernels --op p2p`.
      tp_of: The TP size of each row.
    """
    titles = (
        "workload", "figure", "meshserve", "vLLM", "ours : vLLM", "aim", "of the roofline", "in all-reduces", "the rest"
    )  # fmt: skip
    text = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for line in lines:
        in_sums, rest = _parts(line, sums, tp_of.get(line.row, 0))
        ratio = None if not line.vllm else line.value / line.vllm if line.is_rate else line.vllm / line.value
        ideal = None if not line.ideal else line.value / line.ideal if line.is_rate else line.ideal / line.value
        cells = [
            line.workload,
            line.figure,
            _number(line.value, line) + (f" ({line.note})" if line.note else ""),
            _number(line.vllm, line),
            "" if ratio is None else f"{ratio:.2f}",
            _number(line.aim, line),
            "" if ideal is None else f"{ideal:.0%}",
            "" if in_sums is None else f"{in_sums:.2f} ms",
            "" if rest is None else f"{rest:.2f} ms",
        ]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def _parts(line: Line, sums: Sequence[Mapping[str, Any]], tp: int) -> tuple[float | None, float | None]:
    """Returns the milliseconds of a step in all-reduces, and what neither they nor the roofline explain."""
    if line.figure != MS_A_TOKEN or line.ideal is None:
        return None, None
    if line.all_reduces is None:
        return None, line.value - line.ideal
    number, kilobytes = line.all_reduces
    microseconds = sum_microseconds(sums, tp, kilobytes)
    if microseconds is None:
        return None, None
    in_sums = number * microseconds / 1e3
    return in_sums, line.value - line.ideal - in_sums


def _number(value: float | None, line: Line) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if line.is_rate or value == int(value) else f"{value:.4g}"


def heading(machine: Machine, command: str, problems: Mapping[str, str]) -> str:
    """Says where, when and how the table was made, and which rows are missing."""
    import jax

    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = [
        f"{machine}, {day}, jax {jax.__version__}. Command: `{command}`",
        "",
        "The roofline is the data sheet's: weights and KV cache at the memory's rate, prompts at the tensor cores' "
        "peak. The time in all-reduces is their number in a step times the time of one alone. The rest is kernels "
        "beyond their bytes, the host and gRPC.",
    ]
    if machine.is_virtual:
        text.append("This is a dry run with tiny models in place of those named: the figures mean nothing.")
    text += [f"* not in the table: {name}: {problem}" for name, problem in problems.items()]
    return "\n".join(text)
