"""The interface between the server and the engine, which do not import each other.

engine thread                                   event loop of the server
Engine.submit, cancel, load     <----------     one call per request
Deliver, once per step          ---------->     `output_queue.OutputQueues.deliver`
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .adapters import AdapterCatalog, AdapterInfo
from .errors import NEEDS_TOKENIZER, InvalidRequestError, UnavailableFeatureError, WrongTaskError
from .request import FinishReason, Load, Output, RequestOptions
from .sampling_params import SamplingParams, Stage, params_at, params_table
from .tasks import GENERATE

if TYPE_CHECKING:
    from ..text.grammar import Grammar

# Receives all outputs of one step. The engine calls it on its own thread. It returns immediately and never raises.
Deliver = Callable[[Sequence[Output]], None]


class EngineApi(Protocol):
    """Generates tokens. Every method returns immediately and may be called from any thread."""

    @property
    def failure(self) -> str | None:
        """Why the engine failed; None while it is healthy. Set before the resulting outputs are delivered."""

    @property
    def adapters(self) -> AdapterCatalog:
        """The adapters that requests may name."""

    def check_room(self, tenant: str = "", weight: float = 1.0) -> None:
        """Checks quickly, before a request has been parsed, that the queue has room for one more of this tenant.

        Raises:
          QueueFullError: The queue is full. The request is counted as refused.
        """

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        grammar: "Grammar | None" = None,
    ) -> None:
        """Accepts a request, whose outputs are then delivered. Only the last output of each sample has a finish reason.

        `grammar` is the compiled `params.constraint`.

        Raises:
          InvalidRequestError: The request can never be served.
          UnknownAdapterError, AdaptersOffError: It names an adapter that is not loaded.
          AdapterChangedError: Its adapter has another digest than it asks for.
          QueueFullError: The queue is full.
          EngineStoppedError: The engine is stopping or has failed.
        """

    def submit_prompts(
        self,
        request_id: str,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        """Accepts several prompts, all or none, as the samples of one request; `options.n` is not used.

        Raises:
          As `submit`.
        """

    def hold(self, is_held: bool) -> bool:
        """Keeps an engine that has no requests from beginning a step, until called with False. Returns whether it does.

        So that requests which arrive together share the first step. An engine that has requests cannot be held, and a
        cancellation ends the hold. Call it on one thread only.
        """

    def cancel(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request with `reason`, and delivers its last outputs. Ignores unknown and ended requests."""

    def load(self) -> Load:
        """Returns the current load."""

    def flush_prefix_cache(self) -> int:
        """Drops all evictable pages from the prefix cache and returns their number."""

    def between_steps(self, action: Callable[[], None]) -> None:
        """Runs `action` while no step is in flight, and waits for it. If it raises, the engine fails.

        Raises:
          EngineStoppedError: The engine is not running, or is already pausing for another action.
        """


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The served model. The fields are those of GetModelInfoResponse in inference.proto, which explains them."""

    name: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    tp_size: int
    dtype: str
    page_size_tokens: int
    num_parameters: int
    num_devices: int
    device_kind: str
    server_version: str
    quantization: str = ""
    kv_cache_dtype: str = ""
    supports_chat: bool = False
    supports_resume: bool = True
    supports_logprobs: bool = False
    supports_structured_output: bool = False
    supports_penalties: bool = False
    supports_text: bool = True
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    task: str = GENERATE
    embedding_dimensions: int = 0
    draft_tokens: int = 0
    draft_model: str = ""
    adapters: tuple[AdapterInfo, ...] = ()  # with the fields that a caller may know; see `proto_codec.model_info`

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which requests may ask for the model: its own, and the last part of one like Qwen/Qwen3-8B."""
        short = self.name.rpartition("/")[2]
        return (self.name, short) if short not in ("", self.name) else (self.name,)

    @property
    def size(self) -> str:
        """The number of parameters as people write it, such as 8.2 B."""
        millions = self.num_parameters / 1e6
        return f"{millions / 1e3:.1f} B" if millions >= 1e3 else f"{millions:.1f} M"

    def require(self, task: str) -> None:
        """Checks that the served model has a task.

        Raises:
          WrongTaskError: It has another one.
        """
        if self.task != task:
            raise WrongTaskError(
                f"this server was started to {self.task} with {self.name}, and the method needs a model that can "
                f"{task}. Call a server of such a model, or restart this one with --task {task} if the model can."
            )

    def check(self, params: SamplingParams) -> None:
        """Checks sampling parameters against the model and the features of this server.

        Raises:
          InvalidRequestError: A parameter names a token that does not exist, or needs a feature that this server does
            not have, or the parameters exclude every token.
          UnavailableFeatureError: A stop string is given, and the server does not convert tokens to text.
          WrongTaskError: The model does not generate tokens.
        """
        self.require(GENERATE)
        if params.stop and not self.supports_text:
            raise UnavailableFeatureError(f"sampling.stop: {NEEDS_TOKENIZER}")
        supported = dict.fromkeys(params_at(Stage.PENALTY, Stage.PROCESSOR), self.supports_penalties)
        supported |= dict.fromkeys(params_at(Stage.LOGPROBS), self.supports_logprobs)
        for name in params.changed_fields(supported):
            if not supported[name]:
                message = "this server was started with --no-logits-processors; omit the parameter."
                raise InvalidRequestError(f"sampling.{name}", message)
        for name, param in params_table().items():
            for index, token_id in enumerate(getattr(params, name) if param.lists_tokens else ()):
                if not 0 <= token_id < self.vocab_size:
                    message = f"token {index} is {token_id}; allowed is 0 to {self.vocab_size - 1}."
                    raise InvalidRequestError(f"sampling.{name}", message)
        self._check_choice(params)

    def _check_choice(self, params: SamplingParams) -> None:
        """Checks that a token can be sampled; otherwise the device would sample token 0."""
        bad = set(params.bad_token_ids)
        if len(bad) == self.vocab_size:
            message = f"got all {self.vocab_size} tokens of the vocabulary; at least one must remain."
            raise InvalidRequestError("sampling.bad_token_ids", message)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        if params.min_tokens and params.allowed_token_ids and not set(params.allowed_token_ids) - bad - ends:
            message = f"got {params.min_tokens}, and every one of allowed_token_ids ends the output; allowed is 0."
            raise InvalidRequestError("sampling.min_tokens", message)
