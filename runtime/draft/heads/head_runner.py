"""Runs a trained head beside the served model.

Serves step 6 of 10. In: the packed vectors of steps. Out: the same tokens as without a head, and draft tokens.

What the head needs of each token is computed by the served model's own steps and kept in their state
(`drafting.head_contract`). Draft tokens come from one dispatch, a chain of the head's layer, in which each sampled
token and each output is the input of the next position. As for a draft model, it draws with the noise of the request's
seed and position (docs/decisions/058).
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from meshserve.sharding.memory import added_bytes, shard_bytes

from ...program.batch import BatchBuilder, Bucket
from ...program.device_figures import DeviceFigures
from ...program.step_runner import StepRunner
from ...scheduler.step_plan import StepPlan
from ..model.draft_filling import DraftFilling
from ..model.drafting_runner import RunnerBeside


class HeadRunner(RunnerBeside):
    """Runs a head beside the served model.

    Args:
      served: The runner of the served model, started with the head's weights.
      fill: See `RunnerBeside`.
      weights: The head's weights.
      chains: The compiled dispatches that propose draft tokens; see `head_programs`.
    """

    def __init__(
        self,
        served: StepRunner,
        fill: DraftFilling,
        weights: tuple[jax.Array, ...],
        chains: Mapping[Bucket, jax.stages.Compiled],
    ):
        super().__init__(served, fill)
        self._weights, self._chains = weights, dict(chains)

    def prepare(self, plan: StepPlan, chain: StepPlan | None, batches: BatchBuilder, *, is_drafting: bool) -> bool:
        """Does nothing. Steps keep what the head needs, so that nothing is ever missing."""
        return False

    def _propose(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        state = self.served.state
        followed, proposed = self._chains[bucket](self._weights, state.followed, state.page_table, packed)
        self.served.set_followed(followed)
        return proposed

    def release(self) -> nnx.State:
        """Frees the device state at once and returns the parameters of the served model."""
        self._weights = ()
        return super().release()

    @property
    def figures(self) -> DeviceFigures:
        """The memory used on each device by model and head. Their programs run one after another."""
        served = self.served.figures
        return dataclasses.replace(
            served,
            weight_bytes=served.weight_bytes + shard_bytes(self._weights),
            scratch_bytes=max(served.scratch_bytes, *(added_bytes(chain) for chain in self._chains.values())),
            num_programs=served.num_programs + len(self._chains),
        )

    @property
    def device_bytes(self) -> int:
        """The bytes of parameters and state on each device."""
        return self.served.device_bytes + shard_bytes(self._weights)
