"""What the engine needs of the devices: the interface of runners. Serves step 8 of 10."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from ..adapters.changes import AdapterChanges
from ..program.batch import Bucket
from ..program.processors.processor_batch import Logprobs, Sampled


class Runner(Protocol):
    """Dispatches steps, which the device runs in order. Implemented by `step_runner.StepRunner`."""

    def set_page_row(self, page_row: np.ndarray) -> None:
        """Sets one slot's row of the page table for the following steps; see `batch.Batch`."""

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array | np.ndarray:
        """Dispatches a step and returns its tokens, possibly not computed yet: [B] or [bucket.num_steps, B]."""

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        """Sets the state that `sample` uses for a newly assigned slot; see `processor_batch.SlotAdjustments`."""

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[Any]:
        """Samples the last `run` again with logits processors. May be called at any time before the next `run`."""

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[Any]:
        """Returns the log-probabilities of `targets`, the tokens that follow those of the last `run`."""

    def change_adapters(self, changes: AdapterChanges) -> None:
        """Dispatches changes of the adapters on the devices, for the following steps."""

    def copy_pages(self, command: np.ndarray) -> None:
        """Dispatches a command of the host cache; see `host_cache.commands`."""


@runtime_checkable
class AdapterCalls(Protocol):
    """What a runner has in addition, so that several processes change their adapters alike."""

    def adapter_calls(self, changes: AdapterChanges) -> Iterator[tuple[str, Any]]:
        """Yields the calls, methods with an argument each, that together do what `Runner.change_adapters` does."""
