"""What the engine loop carries from one step to the next: the step in flight, and what to do between two steps.

Serves step 8 of 10.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax
import numpy as np

from meshserve.kernels.p2p import sm90 as p2p_sm90

from ..scheduler.step_plan import StepPlan
from .logprobs import StepLogprobs
from .step_record import StepRecord


@dataclass(frozen=True)
class Flight:
    """A dispatched step whose tokens have not been collected."""

    plan: StepPlan
    sampled: jax.Array | np.ndarray
    dispatched: float  # time of the dispatch, in seconds
    record: StepRecord | None
    logprobs: StepLogprobs | None = None
    # How many samples of a request count, by its index; 0 if it was withdrawn. All count where none are named.
    num_valid: Mapping[int, int] = field(default_factory=dict)
    proposed: jax.Array | np.ndarray | None = None  # the plan's draft tokens, if they are yet to be filled in


@dataclass(frozen=True)
class Interlude:
    """Something to do between two steps; with `after_open`, once the requests before it have ended."""

    action: Callable[[], None]
    after_open: bool = False
    done: Future[None] = field(default_factory=Future)


def reason_of(error: BaseException) -> str:
    """Describes why the loop failed: the exception and, for the P2P all-reduce, the GPU that did not answer."""
    timeouts = p2p_sm90.timeouts()
    raised = f"{type(error).__name__}: {error}"
    return raised if timeouts is None else f"{timeouts}; {raised}"
