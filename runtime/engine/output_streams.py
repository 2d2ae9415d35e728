"""Tracks the unfinished samples and builds their outputs. Serves step 8 of 10.

In: the progress of a step. Out: `Output`s in order of creation; only the last output of each sample has a finish
reason. All access requires the engine's lock, except where noted.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..api.errors import InvalidRequestError
from ..api.request import NOT_FINITE, FinishReason, Output, Request, TokenLogprobs, WeightSpan
from ..api.sampling_params import SamplingParams
from ..program.pooled_rows import PooledRows
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_plan import Progress
from ..text.constrained_samples import ConstrainedSamples, End
from ..text.tokenizer import TextStream, Tokenizer, text_stream
from .logprobs import StepLogprobs

if TYPE_CHECKING:
    import numpy as np

    from ..text.grammar import Grammar

INITIAL_VERSION = "0"  # of the weights with which an engine starts


class OpenSamples:
    """The texts, constraints and outputs of the samples that are being served.

    Args:
      scheduler: Notified of the ends that it cannot detect itself: a stop string, the end of a constraint.
      tokenizer: If None, all texts are empty and stop strings are ignored.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None):
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._samples: dict[str, list[Request]] = {}  # by request id
        self._texts: dict[Request, TextStream] = {}
        self.constrained = ConstrainedSamples(scheduler.speculation.foresee)
        self._outputs: list[Output] = []
        self.weight_version = INITIAL_VERSION  # of the weights that compute the next tokens
        self._spans: dict[Request, list[WeightSpan]] = {}  # by earlier versions, of samples that have such tokens

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """All unfinished samples."""
        return tuple(sample for samples in self._samples.values() for sample in samples)

    def begin_version(self, version: str) -> None:
        """Notes that other weights compute the following tokens. Call it while no step is in flight."""
        for request in self.unfinished:
            if spans := self._spans_of(request):
                self._spans[request] = spans
        self.weight_version = version

    def _spans_of(self, request: Request) -> list[WeightSpan]:
        """Returns which weights computed the output tokens so far."""
        spans = self._spans.get(request, [])
        num_new = len(request.output_token_ids) - sum(span.num_tokens for span in spans)
        return [*spans, WeightSpan(self.weight_version, num_new)] if num_new > 0 else spans

    def of(self, request_id: str) -> tuple[Request, ...]:
        """Returns the unfinished samples of a request."""
        return tuple(self._samples.get(request_id, ()))

    def check_new(self, request_id: str) -> None:
        """Checks that a request id is not in use.

        Raises:
          InvalidRequestError: The id is in use.
        """
        if request_id in self._samples:
            message = f"{request_id!r} is still being served. Use another, or wait until it has ended."
            raise InvalidRequestError("request_id", message)

    def text_after(self, params: SamplingParams, resumed: Sequence[int]) -> TextStream | None:
        """Returns the text stream of a sample that resumes after the tokens `resumed`. Needs no lock."""
        if self._tokenizer is None:
            return None
        text = text_stream(self._tokenizer, params)
        text.push(resumed)
        return text

    def add(self, samples: list[Request], grammar: "Grammar | None", text: TextStream | None) -> None:
        """Adds all samples of a request, with its grammar and the result of `text_after`."""
        self._samples[samples[0].request_id] = samples
        if grammar is not None:
            for sample in samples:
                self.constrained.open(sample, grammar)
        if text is not None:
            self._texts.update((sample, text.fork()) for sample in samples)

    @property
    def num_outputs(self) -> int:
        """Outputs since the last `take_outputs`. Needs no lock."""
        return len(self._outputs)

    def take_outputs(self) -> list[Output]:
        """Returns and clears the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def stream_prompts(self, logprobs: StepLogprobs | None) -> None:
        """Adds outputs for the prompt log-probabilities of a step."""
        for request, found in logprobs.of_prompts if logprobs is not None else ():
            if not request.is_finished:
                self._put(request, prompt_logprobs=found)

    def stream(
        self, progress: Progress, now: float, logprobs: StepLogprobs | None, pooled: PooledRows | None = None
    ) -> None:
        """Converts a sample's new token to an output. Ends the sample at a stop string or the end of its constraint."""
        request, token_id = progress
        if request.finish_reason is FinishReason.ERROR:
            self._close(request, message=NOT_FINITE)
            return
        token_ids = () if token_id is None else (token_id,)
        logprob = logprobs.of_output(request, token_id) if logprobs is not None and token_id is not None else None
        found = () if logprob is None else (logprob,)
        reason, message = (request.is_constrained and self.constrained.advance(request, token_id)) or (None, "")
        is_wrong = reason is FinishReason.ERROR and token_id is not None
        if is_wrong:
            token_ids, found = (), ()
        text, stream = "", self._texts.get(request)
        if stream is not None:
            text, has_stopped = stream.push(token_ids)
            reason = FinishReason.STOP if has_stopped else reason
        if reason is not None:
            self._scheduler.finish_at_token(request, reason, now, is_dropped=is_wrong)
        is_open = reason is None and request.is_constrained and request.finish_reason is FinishReason.LENGTH
        if request.is_finished and not is_open:  # a constraint may be complete with the last token: `end_constrained`
            row = pooled.row(request) if pooled is not None else None
            self._close(request, token_ids=token_ids, text=text, message=message, logprobs=found, pooled=row)
        else:
            self._put(request, token_ids=token_ids, text=text, logprobs=found)

    def end(self, request: Request, reason: FinishReason, now: float, message: str = "") -> bool:
        """Ends a sample early. Returns False if it has already ended."""
        has_ended = self._scheduler.finish(request, reason, now)
        if has_ended:
            self._close(request, message=message)
        return has_ended

    def end_constrained(self, request: Request, end: End, now: float) -> None:
        """Ends a sample as its constraint says, unless it has ended otherwise."""
        reason, message = end
        if request.finish_reason is FinishReason.LENGTH and request in self._samples.get(request.request_id, ()):
            self._scheduler.finish_at_token(request, reason, now)
            self._close(request, message=message)
        else:
            self.end(request, reason, now, message)

    def expired(self, request: Request, message: str) -> None:
        """Adds the last output of a sample that the scheduler has ended because of its deadline."""
        self._close(request, message=message)

    def end_all(self, reason: FinishReason, now: float, message: str) -> None:
        """Ends every request, also those that the scheduler has ended in a step that then failed."""
        self._scheduler.stop_publishing()  # because publishing may be what failed
        for request in self.unfinished:
            self._scheduler.finish_at_token(request, reason, now)
            self._close(request, message=message)

    def _close(
        self,
        request: Request,
        *,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        message: str = "",
        logprobs: tuple[TokenLogprobs, ...] = (),
        pooled: "np.ndarray | None" = None,
    ) -> None:
        """Adds the last output of a finished sample, including all text that was held back."""
        stream = self._texts.pop(request, None)
        self.constrained.close(request)
        spans = self._spans_of(request)
        self._spans.pop(request, None)
        samples = self._samples[request.request_id]
        samples.remove(request)
        if not samples:
            del self._samples[request.request_id]
        self._put(
            request,
            token_ids=token_ids,
            text=text + (stream.flush() if stream is not None else ""),
            logprobs=logprobs,
            pooled=pooled,
            finish_reason=request.finish_reason,
            message=message,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            weight_spans=tuple(spans),
        )

    def _put(self, request: Request, **content: Any) -> None:
        self._outputs.append(Output(request_id=request.request_id, index=request.index, **content))
