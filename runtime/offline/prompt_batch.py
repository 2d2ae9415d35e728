"""Completes a set of prompts with a launched engine: submits them all, and collects their outputs until all ended."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.errors import (
    AdapterError,
    EngineStoppedError,
    InvalidRequestError,
    QuotaExceededError,
    UnavailableFeatureError,
)
from ..api.request import FinishReason, Output, RequestOptions, TokenLogprobs, WeightSpan
from ..api.sampling_params import SamplingParams
from ..text.grammar import compiled

if TYPE_CHECKING:
    from ..startup.launch import Launched

# Errors that concern one prompt. Others end the batch.
_REJECTIONS = (InvalidRequestError, UnavailableFeatureError, QuotaExceededError, EngineStoppedError, AdapterError)

# Receives the numbers of finished samples and of output tokens so far. Called when a sample has finished.
Progress = Callable[[int, int], None]


@dataclasses.dataclass
class AccumulatedOutput:
    """Accumulated output of one sample."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    num_cached_tokens: int = 0
    weight_spans: tuple[WeightSpan, ...] = ()

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.error = output.message
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.num_cached_tokens = output.num_cached_tokens
            self.weight_spans = output.weight_spans


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, as text or token ids, and what its request asks for."""

    prompt: str | tuple[int, ...]
    params: SamplingParams  # without the model's defaults
    options: RequestOptions = RequestOptions()
    sampling: pb.SamplingParams = dataclasses.field(default_factory=pb.SamplingParams, compare=False)  # what is given

    def with_adapter(self, name: str) -> "Prompt":
        """Returns this prompt for an adapter; "" is none."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, adapter=name)) if name else self


class PromptBatch:
    """Collects the outputs of a set of prompts.

    The engine calls `deliver`. The request ids are consecutive numbers from `first_id`. `completions` holds the
    completions of each prompt, and `token_ids` its tokens once it has been submitted; both are indexed by prompt.
    """

    def __init__(self, prompts: Sequence[Prompt], first_id: int = 0):
        self.completions = [[AccumulatedOutput() for _ in range(prompt.options.n)] for prompt in prompts]
        self.token_ids: list[tuple[int, ...]] = []
        self._prompts = prompts
        self._first_id = first_id
        self._num_open = 0
        self._num_left = [prompt.options.n for prompt in prompts]  # unfinished samples, by prompt
        self._done: list[int] = []  # prompts of which all samples have finished, in this order
        self._num_finished = 0
        self._num_tokens = 0
        self._is_cancelled = False
        self.on_done: Callable[[], None] = lambda: None  # called on the engine's thread; must not raise
        self._changed = threading.Condition()

    @property
    def request_ids(self) -> range:
        return range(self._first_id, self._first_id + len(self._prompts))

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            num_open = self._num_open
            for output in outputs:
                index = int(output.request_id) - self._first_id
                self.completions[index][output.index].add(output)
                if output.finish_reason is not None:
                    self._num_left[index] -= 1
                    if not self._num_left[index]:
                        self._done.append(index)
                self._num_open -= output.finish_reason is not None
                self._num_tokens += len(output.token_ids)
            if self._num_open < num_open:
                self._num_finished += num_open - self._num_open
                self._changed.notify()
                self.on_done()

    def run(self, launched: "Launched", *, progress: Progress | None = None, is_strict: bool = False) -> None:
        """Submits every prompt and waits until all have finished.

        Args:
          launched: The engine, which must have been started.
          progress: Receives the progress.
          is_strict: Whether a rejected prompt ends the batch. Otherwise its completions get the reason as `error`.

        Raises:
          MeshserveError: A prompt was rejected and `is_strict` is set. The other requests have been cancelled.
        """
        with self._cancelling(launched):
            for index, prompt in enumerate(self._prompts):
                try:
                    self._submit(launched, self._first_id + index, prompt)
                except _REJECTIONS as error:
                    if is_strict:
                        raise
                    for completion in self.completions[index]:
                        completion.finish_reason, completion.error = "error", str(error)
            self._wait(progress)

    def run_as_finished(self, launched: "Launched") -> Generator[int, None, None]:
        """Submits every prompt, and yields each prompt's index once all its samples have finished, in this order.

        Ending the iteration early cancels the others.

        Raises:
          MeshserveError: A prompt was rejected. The other requests have been cancelled.
        """
        with self._cancelling(launched):
            self.submit(launched)
            for num_yielded in range(len(self._prompts)):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._done) > num_yielded)  # noqa: B023
                yield self._done[num_yielded]

    @property
    def done(self) -> Sequence[int]:
        """The prompts of which all samples have finished, in this order."""
        return self._done

    def submit(self, launched: "Launched") -> None:
        """Submits every prompt, until `cancel`.

        Raises:
          MeshserveError: A prompt was rejected. The other requests have been cancelled.
        """
        with self._cancelling(launched):
            for index, prompt in enumerate(self._prompts):
                self._submit(launched, self._first_id + index, prompt)
                if self._is_cancelled:
                    launched.engine.cancel(str(self._first_id + index), FinishReason.CANCELLED)
                    return

    def cancel(self, launched: "Launched") -> None:
        """Cancels the requests that have not ended, also while another thread submits them."""
        self._is_cancelled = True
        for request_id in self.request_ids[: len(self.token_ids)]:
            launched.engine.cancel(str(request_id), FinishReason.CANCELLED)

    def _submit(self, launched: "Launched", request_id: int, prompt: Prompt) -> None:
        self.token_ids.append(())
        params = proto_codec.sampling_params(prompt.sampling, launched.info.default_sampling)
        launched.info.check(params)
        grammar = compiled(params.constraint, launched.grammars)  # a batch resumes no output
        self.token_ids[-1] = token_ids = _token_ids(launched, prompt)
        with self._changed:
            self._num_open += prompt.options.n
        try:
            launched.engine.submit(str(request_id), token_ids, params, prompt.options, grammar)
        except BaseException:
            with self._changed:
                self._num_open -= prompt.options.n
            raise

    def _wait(self, progress: Progress | None) -> None:
        while True:
            with self._changed:
                num_open, counts = self._num_open, (self._num_finished, self._num_tokens)
            if progress is not None:
                progress(*counts)
            if not num_open:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._num_finished > counts[0])  # noqa: B023

    @contextlib.contextmanager
    def _cancelling(self, launched: "Launched") -> Iterator[None]:
        """Cancels what has been submitted if the block ends by an exception, such as Ctrl-C."""
        try:
            yield
        except BaseException:
            self.cancel(launched)
            raise


def _token_ids(launched: "Launched", prompt: Prompt) -> tuple[int, ...]:
    is_text = isinstance(prompt.prompt, str)
    token_ids = launched.tokenizer.encode(prompt.prompt) if isinstance(prompt.prompt, str) else prompt.prompt
    vocab_size = launched.info.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                "prompt" if is_text else "prompt_token_ids",
                f"{token_id} is not a token id; allowed are 0 to {vocab_size - 1}.",
            )
    return token_ids
