"""Tests that draft tokens are verified in the shapes for decodes, where these exist, and that no token changes."""

import threading
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from meshserve.kernels.decode_layers import sm90
from meshserve.kernels.readback.cuda import PinnedTokens
from meshserve.runtime.api.request import Output, Request
from meshserve.runtime.api.sampling_params import SamplingMode, SamplingParams
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.resolve import buckets, kernel_selection, resolved_server, server_programs
from meshserve.runtime.scheduler.drafts.draft_counts import Acceptance
from meshserve.runtime.scheduler.drafts.payoff import Payoff
from meshserve.runtime.startup.launch import Launched, launch
from tests.waiting import WAIT_SECONDS

PARAMS = [SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True, seed=seed) for seed in range(3)]


class Knowing:
    """Implements `drafter.Drafter`: knows the whole output, and every fourth draft token is wrong."""

    waits_for_tokens = True

    def __init__(self, output: Sequence[int]):
        self.acceptance = Acceptance()
        self._output, self._num_known, self._num_drawn = output, 0, 0

    def fork(self) -> "Knowing":
        raise AssertionError("each request has one sample")

    def push(self, token_id: int) -> None:
        self._num_known += 1

    def guess(self, num_pending: int, num_tokens: int) -> list[int]:
        return [] if num_pending else [self._told(token_id) for token_id in self._next(min(num_tokens, 3))]

    def _next(self, num_tokens: int) -> Sequence[int]:
        return self._output[self._num_known : self._num_known + num_tokens]

    def _told(self, token_id: int) -> int:
        self._num_drawn += 1
        return token_id ^ 1 if self._num_drawn % 4 == 0 else token_id

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        pass


class Outputs:
    """Collects the tokens of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self._changed, self._num_ended = threading.Condition(), 0

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self._num_ended += output.finish_reason is not None
            self._changed.notify()

    def of_run(self, launched: Launched, name: str) -> list[list[int]]:
        """Runs all requests together."""
        expected = self._num_ended + len(PARAMS)
        for index, params in enumerate(PARAMS):
            launched.engine.submit(f"{name}-{index}", launched.tokenizer.encode("To be, or not"), params)
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_ended == expected, WAIT_SECONDS), launched.engine.failure
        return [self.tokens[f"{name}-{index}"] for index in range(len(PARAMS))]


class FakePinnedTokens(PinnedTokens):
    """Receives the tokens by a callback."""

    def __init__(self) -> None:
        self.seconds, self.num_read = {}, 0
        self._tokens: dict[int, np.ndarray] = {}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets the next server use it. Programs with callbacks are not kept in the cache."""
        readback = {"readback": self.write_tokens}
        monkeypatch.setattr(kernel_selection, "Kernels", lambda **kernels: Kernels(**{**kernels, **readback}))
        monkeypatch.setattr(server_programs, "PinnedTokens", lambda device: self)

    def write_tokens(self, tokens: jax.Array, step_number: jax.Array) -> jax.Array:
        def receive(tokens: np.ndarray, step_number: np.ndarray) -> np.ndarray:
            self._tokens[int(step_number[0])] = np.array(tokens)
            return tokens

        return jax.pure_callback(receive, jax.ShapeDtypeStruct(tokens.shape, tokens.dtype), tokens, step_number)

    def wait_for(self, step_number: int, tokens: np.ndarray, sleep_seconds: float, seconds: float) -> bool:
        is_there = step_number in self._tokens
        if is_there:
            tokens[:] = self._tokens.pop(step_number)
        self.num_read += is_there
        return is_there


@pytest.mark.parametrize(("max_fused_tokens", "has_readback"), [(64, False), (4, False), (4, True)])
def test_drafts_are_verified_in_the_shapes_for_decodes(
    max_fused_tokens: int, has_readback: bool, monkeypatch: pytest.MonkeyPatch
):
    """These shapes of twice as many tokens as on fused layers have separate programs."""
    monkeypatch.setattr(sm90, "MAX_CACHED_TOKENS", max_fused_tokens)
    pinned = FakePinnedTokens()
    if has_readback:
        pinned.use(monkeypatch)
    monkeypatch.setattr(buckets, "SamplingMode", (SamplingMode.RANDOM,))  # the mode of `PARAMS`
    monkeypatch.setattr(resolved_server, "declare_buckets", buckets.declare_buckets)  # every shape
    config = ServeConfig(
        model="demo", draft_tokens=3, cpu_devices=8, tp=1, dtype="float32", decode_layers="reference", page_size=8,
        num_pages=64, max_running=8, max_step_tokens=16, max_context=160, logits_processors=False, cache_dir="",
    )  # fmt: skip
    outputs = Outputs()
    launched = launch(config, outputs.deliver)
    engine = launched.engine
    speculation, run, used = engine._scheduler.speculation, engine.runner.run, []
    monkeypatch.setattr(engine.runner, "run", lambda bucket, packed: used.append(bucket) or run(bucket, packed))
    engine.start()

    monkeypatch.setattr(Payoff, "wants_drafts", False)
    plain = outputs.of_run(launched, "plain")
    assert not speculation.num_drafts
    num_plain = len(used)
    used.clear()

    def drafter(request: Request) -> Knowing:
        return Knowing(plain[request.seed])

    speculation.make_drafter = drafter
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    assert outputs.of_run(launched, "drafted") == plain
    launched.close()
    assert 10 < speculation.num_accepted < speculation.num_drafts
    assert len(used) < num_plain
    assert launched.resharder.server.max_fused_tokens == max_fused_tokens
    verifying = [bucket for bucket in used if bucket.num_tokens > len(PARAMS) and bucket.is_decode]
    assert (pinned.num_read > len(verifying)) == has_readback
    assert len(verifying) > 5 and all(bucket.has_drafts for bucket in verifying)
    assert max(bucket.num_tokens for bucket in verifying) == 8


@pytest.mark.parametrize("draft_model", ["demo", "demo-head"])
def test_tokens_are_read_back_if_a_draft_model_proposes(draft_model: str, monkeypatch: pytest.MonkeyPatch):
    pinned = FakePinnedTokens()
    pinned.use(monkeypatch)
    monkeypatch.setattr(buckets, "SamplingMode", (SamplingMode.RANDOM,))
    config = ServeConfig(
        model="demo", draft_tokens=3, cpu_devices=8, tp=1, dtype="float32", decode_layers="reference", page_size=8,
        num_pages=64, max_running=8, max_step_tokens=8, max_context=160, logits_processors=False, cache_dir="",
        draft_model=draft_model,
    )  # fmt: skip
    outputs = Outputs()
    launched = launch(config, outputs.deliver)
    speculation = launched.engine._scheduler.speculation
    launched.engine.start()
    monkeypatch.setattr(Payoff, "wants_drafts", False)
    plain = outputs.of_run(launched, "plain")
    num_read = pinned.num_read
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    assert outputs.of_run(launched, "drafted") == plain
    launched.close()
    assert speculation.num_accepted and 0 < num_read < pinned.num_read
