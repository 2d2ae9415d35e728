"""Where the edge and the engine meet: neither imports the other, both speak of these.

engine thread                                   event loop of the edge
Engine.submit, cancel, load     <----------     one call for each request
Deliver, once a step            ---------->     `queue.OutputQueues.deliver`
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .errors import InvalidRequestError
from .request import FinishReason, Load, Output, RequestOptions
from .sampling_params import SamplingParams, Stage, params_at, params_table

if TYPE_CHECKING:
    from ..text.grammar import Grammar

# Takes all outputs of one step. The engine calls it from its own thread; it returns at once and never raises.
Deliver = Callable[[Sequence[Output]], None]


class Engine(Protocol):
    """What makes tokens. Every method returns at once and may be called from any thread."""

    @property
    def failure(self) -> str | None:
        """Why the engine failed; None while it is healthy. Set before the outputs that the death causes."""

    def check_room(self, tenant: str = "", weight: float = 1.0) -> None:
        """Tells cheaply whether the next request would be refused for want of room, before anything is known of it.

        Raises:
          QueueFullError: it would. Counted as refused.
        """

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        grammar: "Grammar | None" = None,
    ) -> None:
        """Accepts a request; `grammar` is its `params.constraint`, compiled. From now on its outputs are delivered, the
        last one of each sample, and only it, with a finish reason.

        Raises:
          InvalidRequestError: it can never be served.
          QueueFullError: not now.
          EngineStoppedError: not by this engine any more.
        """

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request with `reason`. Its last outputs are still delivered. Unknown and ended ones are ignored."""

    def load(self) -> Load:
        """How busy the engine is now."""

    def flush_prefix_cache(self) -> int:
        """Forgets the pages that are kept for requests to come; returns how many."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What is served. The field names are those of GetModelInfoResponse in inference.proto, which explains them."""

    name: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    tp_degree: int
    dtype: str
    page_size_tokens: int
    num_parameters: int
    num_devices: int
    device_kind: str
    server_version: str
    supports_chat: bool = False
    supports_resume: bool = True
    supports_logprobs: bool = False
    supports_structured_output: bool = False
    supports_penalties: bool = False

    def check(self, params: SamplingParams) -> None:
        """
        Raises:
          InvalidRequestError: a parameter names a token that does not exist, or asks for what this server does not do,
            or they leave no token.
        """
        supported = dict.fromkeys(params_at(Stage.PENALTY, Stage.PROCESSOR), self.supports_penalties)
        supported |= dict.fromkeys(params_at(Stage.LOGPROBS), self.supports_logprobs)
        for name in params.changed_fields(supported):
            if not supported[name]:
                message = "this server was started with --no-logits-processors; leave it out."
                raise InvalidRequestError(f"sampling.{name}", message)
        for name, param in params_table().items():
            for index, token_id in enumerate(getattr(params, name) if param.lists_tokens else ()):
                if not 0 <= token_id < self.vocab_size:
                    message = f"token {index} is {token_id}; allowed is 0 to {self.vocab_size - 1}."
                    raise InvalidRequestError(f"sampling.{name}", message)
        self._check_choice(params)

    def _check_choice(self, params: SamplingParams) -> None:
        """Where no token is left, the device would choose token 0."""
        bad = set(params.bad_token_ids)
        if len(bad) == self.vocab_size:
            message = f"got all {self.vocab_size} tokens of the vocabulary; allowed is to leave one of them."
            raise InvalidRequestError("sampling.bad_token_ids", message)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        if params.min_tokens and params.allowed_token_ids and not set(params.allowed_token_ids) - bad - ends:
            message = f"got {params.min_tokens}, and every one of allowed_token_ids ends the output; allowed is 0."
            raise InvalidRequestError("sampling.min_tokens", message)
