"""`meshserve.LLM`: loads a model in this process and completes prompts, without a server.

    from meshserve import LLM, SamplingParams

    llm = LLM("Qwen/Qwen3-8B", tp=2)
    for output in llm.generate(["The sea", "The sky"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

The engine is the server's: it batches the prompts, and its thread runs until `close`, or until the process ends.
"""

import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..api.engine_api import ModelInfo
from ..api.errors import ConfigError, EngineStoppedError
from ..api.request import Output
from ..client import messages as client_messages
from ..options.serve_config import ServeConfig, server_only_options
from ..options.toml_file import checked_options
from ..text import chat_messages
from ..text.tokenizer import Tokenizer
from .outputs import RequestOutput, request_output
from .prompt_batch import Batch, Progress, Prompt
from .prompt_forms import Conversation, Prompts, listed_conversations, listed_prompts
from .user_params import SamplingParams

if TYPE_CHECKING:
    from ..startup.launch import Launched

_QUEUE_LENGTH = 2**31 - 1  # all prompts of a call wait in the engine's queue


class LLM:
    """A model that completes prompts in this process.

    The calls of several threads are computed together. Use `close` or a `with` block to free the devices' memory
    before the process ends.

    Args:
      model: A directory, a Hugging Face id, or "demo" for the embedded model; see the option `model`.
      tp: Tensor-parallel size; None uses the option's default.
      show_progress: Whether to print each phase of the start to stderr.
      **options: The options of `meshserve generate` by their names in a TOML file, such as `cpu_devices=4`.

    Raises:
      ConfigError: An option does not exist, has no effect without a server, or has a value that is not allowed.
      MeshserveError, CheckpointError, ValueError, MemoryError: The model or the devices do not allow it.
    """

    def __init__(
        self, model: str | os.PathLike[str] = "", *, tp: int | None = None, show_progress: bool = True, **options: Any
    ) -> None:
        config = offline_config({"model": os.fspath(model)} | ({} if tp is None else {"tp": tp}) | options)
        from ..startup.launch import launch  # not at module level: importing jax takes seconds

        self._batches = _Batches()
        tell = _tell if show_progress else _say_nothing
        self._launched: Launched = launch(config, self._batches.deliver, progress=tell)
        self._launched.engine.start()
        # Also at the end of the process: JAX aborts a process that exits while one of its threads computes.
        self._finalize = weakref.finalize(self, self._launched.close)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the engine. Calls in other threads end with their samples cancelled. Idempotent."""
        self._finalize()

    @property
    def model_info(self) -> ModelInfo:
        """The model, as GetModelInfo of a server describes it."""
        return self._launched.info

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer, which has `encode`, `decode` and `render_chat`."""
        return self._launched.tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts and returns their outputs in the same order.

        Args:
          prompts: One prompt or several. A prompt is text, a list or a one-dimensional numpy array of token ids,
            `{"prompt": text}`, or `{"prompt_token_ids": token ids}`; a two-dimensional array has a prompt in each row.
          sampling_params: For all prompts, or one for each. None uses the model's defaults.
          use_tqdm: Whether to show a progress bar on stderr.

        Raises:
          InvalidRequestError: A prompt or a parameter cannot be served. No output is returned.
          EngineStoppedError: The engine has failed, or was closed.
        """
        return self._run(listed_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any] | str] = (),
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answers conversations, which the model's chat template renders.

        Args:
          messages: One conversation, or several. A conversation is a list of messages such as
            `{"role": "user", "content": "..."}`, oldest first.
          sampling_params, use_tqdm: See `generate`.
          tools: Functions that the model may call, in the format that the chat template expects. Calls are returned as
            text, as the model writes them.
          enable_thinking: Whether the model may reason first. None leaves it to the template.
          add_generation_prompt: Whether to begin a new answer.
          continue_final_message: Continue the last message, of the assistant, instead of beginning a new one.

        Raises:
          UnsupportedModelError: The model has no chat template.
          InvalidRequestError, EngineStoppedError: See `generate`.
        """
        fields: client_messages.ChatFields = {"tools": tools}
        if continue_final_message:
            fields["continue_last_message"] = True
        else:
            fields["add_generation_prompt"] = add_generation_prompt
        if enable_thinking is not None:
            fields["enable_thinking"] = enable_thinking
        rendered = []
        for conversation in listed_conversations(messages):
            request = client_messages.chat_request(conversation, None, fields)
            plain, template_options = chat_messages.template_arguments(request)
            rendered.append(self._launched.tokenizer.render_chat(plain, **template_options))
        return self._run(rendered, sampling_params, use_tqdm)

    def _run(
        self,
        prompts: Sequence[str | tuple[int, ...]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"got {len(prompts)} prompts and {len(sampling_params)} sampling_params; give one for each."
            )
        batch = self._batches.open(
            [params.prompt(prompt) for prompt, params in zip(prompts, sampling_params, strict=True)]
        )
        try:
            with _Bar(sum(map(len, batch.completions)), is_shown=use_tqdm) as bar:
                batch.run(self._launched, progress=bar.show, is_strict=True)
        finally:
            self._batches.close(batch)
        if (failure := self._launched.engine.failure) is not None:
            raise EngineStoppedError(f"the engine has failed: {failure}. Create a new LLM.")
        if not self._finalize.alive:
            raise EngineStoppedError("the LLM was closed before the call ended. Create a new LLM.")
        parts = zip(batch.request_ids, prompts, batch.token_ids, batch.completions, strict=True)
        return [request_output(*each, self._launched.tokenizer) for each in parts]


def offline_config(given: dict[str, Any]) -> ServeConfig:
    """Returns the configuration of an engine without a server.

    Raises:
      ConfigError: An option does not exist, has no effect without a server, or has a value that is not allowed.
    """
    if without_effect := sorted(given.keys() & server_only_options()):
        raise ConfigError(f"LLM: {', '.join(without_effect)} has no effect without a server; leave it out.")
    return dataclasses.replace(ServeConfig(**checked_options(given, "LLM")), max_waiting=_QUEUE_LENGTH)


class _Batches:
    """Passes each output of the engine to the batch of its request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_id = 0
        self._open: dict[int, Batch] = {}

    def open(self, prompts: Sequence[Prompt]) -> Batch:
        with self._lock:
            batch = Batch(prompts, self._next_id)
            self._next_id += len(prompts)
            self._open |= dict.fromkeys(batch.request_ids, batch)
        return batch

    def close(self, batch: Batch) -> None:
        with self._lock:
            for request_id in batch.request_ids:
                del self._open[request_id]

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Called by the engine. Outputs of closed batches are dropped: their requests have been cancelled."""
        found: dict[Batch, list[Output]] = {}
        for output in outputs:
            if (batch := self._open.get(int(output.request_id))) is not None:
                found.setdefault(batch, []).append(output)
        for batch, theirs in found.items():
            batch.deliver(theirs)


class _Bar:
    """The progress bar of a call: finished samples, and output tokens per second."""

    def __init__(self, num_samples: int, *, is_shown: bool):
        from tqdm import tqdm

        self._bar = tqdm(total=num_samples, desc="completed", unit=" samples", dynamic_ncols=True, disable=not is_shown)
        self._began = time.monotonic()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    @property
    def show(self) -> Progress | None:
        return None if self._bar.disable else self._show

    def _show(self, num_finished: int, num_tokens: int) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        self._bar.set_postfix_str(f"{num_tokens / seconds:.0f} tokens/s", refresh=False)
        self._bar.update(num_finished - self._bar.n)


def _tell(phase: str) -> None:
    print(f"meshserve: {phase} ...", file=sys.stderr, flush=True)


def _say_nothing(phase: str) -> None:
    """Takes the place of `_tell` if no progress is wanted."""
