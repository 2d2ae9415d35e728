"""An engine on virtual devices, whose tokens tests compare."""

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest

from meshserve.runtime.api.request import FinishReason, Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.launch import Launched, launch
from tests import checkpoints
from tests.waiting import WAIT_SECONDS

CONFIG = {
    "page_size": 4, "max_running": 2, "max_step_tokens": 2, "max_context": 128, "num_pages": 40, "dtype": "float32",
    "cache_dir": "", "host_cache_gib": 0.002, "logits_processors": False, "strict": True,
}  # fmt: skip  # few shapes, because compiling them is what takes the time
PROMPTS = checkpoints.random_prompts((90, 61, 75, 100), vocab_size=320)  # together twice what the devices hold
SAMPLING = [SamplingParams(max_tokens=6, temperature=0.8 * (index % 2), seed=5, ignore_eos=True) for index in range(4)]


class Server:
    """An engine, whose requests are served one after another or all together."""

    def __init__(self, model: Path, tp: int, **options: object):
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.may_go_on = threading.Event()  # while it is clear, the engine stands still after a step with outputs
        self.may_go_on.set()
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self.launched: Launched = launch(ServeConfig(model=str(model), tp=tp, **(CONFIG | options)), self.deliver)
        assert self.launched.engine.host_cache is not None
        self.host = self.launched.engine.host_cache
        # While the rate of copies is unknown, they are tried, however busy the machine is.
        self.host.rates.copied = lambda num_bytes, seconds: None
        self.copies = self.launched.engine.runner.copies
        self.launched.engine.start()

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.cached[output.request_id] = output.num_cached_tokens
                    self.reasons[output.request_id] = output.finish_reason
            self._changed.notify_all()
        self.may_go_on.wait(WAIT_SECONDS)

    def submit(self, index: int, priority: int = 0) -> str:
        name = f"{index} {next(self._numbers)}"
        options = RequestOptions(priority=priority)
        self.launched.engine.submit(name, tuple(PROMPTS[index]), SAMPLING[index], options)
        return name

    def wait(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.reasons.keys() >= set(names), WAIT_SECONDS), self.reasons
        assert self.launched.engine.failure is None

    def serve(self, index: int) -> tuple[list[int], int]:
        """Returns the tokens of a prompt's request, and how many of its prompt tokens were cached."""
        name = self.submit(index)
        self.wait(name)
        return self.tokens[name], self.cached[name]

    def fail_copies(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes every third copy fail: one `to_device` or `to_host`, of the shards of a block."""
        copy: Callable[..., list[jax.Array]] = getattr(self.copies, method)
        calls = itertools.count()

        def fail_sometimes(shards: Sequence[jax.Array]) -> list[jax.Array]:
            if next(calls) % 3 == 1:
                raise jax.errors.JaxRuntimeError("INTERNAL: the link is down")
            return copy(shards)

        monkeypatch.setattr(self.copies, method, fail_sometimes)
