"""`meshserve.LLM`: loads a model in this process and completes prompts, without a server.

    from meshserve import LLM, SamplingParams

    llm = LLM("Qwen/Qwen3-8B", tp=2)
    for output in llm.generate(["The sea", "The sky"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

The engine is the server's: it batches the prompts, and its thread runs until `close`, or until the process ends.
"""

import asyncio
import contextlib
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ..api.engine_api import ModelInfo
from ..api.errors import ConfigError, EngineStoppedError, UnavailableFeatureError
from ..api.request import Output
from ..client import messages as client_messages
from ..options.serve_config import ServeConfig, server_only_options
from ..options.toml_file import Tell, checked_options
from ..text import chat_messages
from ..text.tokenizer import Tokenizer
from .llm_options import LLMOptions
from .outputs import RequestOutput, request_output
from .prompt_batch import Progress, Prompt, PromptBatch
from .prompt_forms import Conversation, Prompts, listed_conversations, listed_prompts
from .user_params import LLMSamplingParams

if TYPE_CHECKING:
    from ..startup.launch import Launched
    from ..weight_updates.weight_updater import WeightUpdate

_QUEUE_LENGTH = 2**31 - 1  # all prompts of a call wait in the engine's queue


class LLM:
    """A model that completes prompts in this process.

    The calls of several threads are computed together. Use `close` or a `with` block to free the devices' memory
    before the process ends.

    Args:
      model: A directory, a Hugging Face id, or "demo" for the embedded model; see the option `model`.
      tp: Tensor-parallel size; None uses the option's default.
      show_progress: Whether to print each phase of the start to stderr.
      adapters: Adapters (LoRA) that `generate` and `chat` may name: their directories, or Hugging Face ids, by name.
      **options: The options of `meshserve generate` by their names in a TOML file, such as `cpu_devices=4`, or by
        those of vLLM.

    Raises:
      ConfigError: An option does not exist, has no effect without a server, or has a value that is not allowed.
      MeshserveError, CheckpointError, ValueError, MemoryError: The model or the devices do not allow it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        tp: int | None = None,
        show_progress: bool = True,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        given = {"model": os.fspath(model)} | ({} if tp is None else {"tp": tp}) | options
        given |= {"adapter": {name: os.fspath(path) for name, path in adapters.items()}} if adapters else {}
        config = offline_config(given, _note if show_progress else _say_nothing)
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

    @property
    def weight_version(self) -> str:
        """The version of the weights that compute the next tokens: "0" until the first `update_weights`."""
        return self._launched.weights.version

    def update_weights(
        self,
        source: Any,
        *,
        version: str | None = None,
        running: Literal["continue", "finish", "abort"] = "continue",
        partial: bool = False,
        donate: bool = False,
    ) -> "WeightUpdate":
        """Replaces the model's weights between two steps, without compiling the model's programs again.

        The weights are checked first: names, shapes and dtypes, and that all numbers are finite. If this fails, or the
        devices have no room, an exception is raised and the old weights go on serving.

        Args:
          source: A tree of `jax.Array`s on any devices, which are not changed unless donated, with Hugging Face's names
            (`model.layers.0.mlp.up_proj.weight`), or the paths of Tunix's or MaxText's Qwen3 or of our own model's
            state; or a directory, or a Hugging Face id.
          version: Their name in `CompletionOutput.weight_spans`; None numbers them from 1.
          running: What becomes of calls in other threads. "continue": their samples recompute their tokens with the new
            weights and go on; "finish": they end first; "abort": they end with the tokens that they have.
          partial: Whether `source` may lack some of the weights, which stay as they are.
          donate: Whether the arrays of `source` on devices may be deleted, each as soon as it has been used, to save
            memory. They are lost then, also if the update fails after it has begun to use them.

        Returns:
          The version, the bytes replaced on each device, and the seconds that it took.

        Raises:
          InvalidRequestError: The weights are not those of this model, damaged, or not finite.
          UnavailableFeatureError: The LLM has a draft model.
          MemoryError: The devices have no room.
          EngineStoppedError: The engine has failed, or was closed.
        """
        launched = self._launched
        lacked_weights = launched.weights.lacks_weights
        update = launched.weights.update(
            source, version=version, running=running, is_partial=partial, is_donated=donate
        )
        if lacked_weights:
            launched.control.resume()
        return update

    def sleep(self, *, drop_weights: bool = False) -> int:
        """Frees the devices' memory of the KV cache and the weights until `wake`. Compiled programs stay.

        Calls in other threads wait, and go on afterwards.

        Args:
          drop_weights: Whether no copy is kept in host memory. `update_weights` must then follow `wake`.

        Returns:
          The bytes freed on each device.

        Raises:
          UnavailableFeatureError: The LLM sleeps already, or has a draft model.
          EngineStoppedError: The engine has failed, or was closed.
        """
        return self._launched.control.sleep(drop_weights=drop_weights)

    def wake(self) -> None:
        """Takes the memory back. Without effect on an LLM that does not sleep.

        Raises:
          MemoryError: The devices have no room. It goes on sleeping.
          EngineStoppedError: The engine has failed, or was closed.
        """
        self._launched.control.wake()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer, which has `encode`, `decode` and `render_chat`."""
        return self._launched.tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: LLMSamplingParams | Sequence[LLMSamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts and returns their outputs in the same order.

        Args:
          prompts: One prompt or several. A prompt is text, a list or a one-dimensional numpy array of token ids,
            `{"prompt": text}`, or `{"prompt_token_ids": token ids}`; a two-dimensional array has a prompt in each row.
          sampling_params: For all prompts, or one for each. None uses the model's defaults.
          use_tqdm: Whether to show a progress bar on stderr.
          adapter: The name of an adapter for all prompts, or one for each. None is the model itself.

        Raises:
          InvalidRequestError: A prompt or a parameter cannot be served. No output is returned.
          UnknownAdapterError, AdaptersOffError: There is no such adapter.
          EngineStoppedError: The engine has failed, or was closed.
        """
        return self._run(listed_prompts(prompts), sampling_params, use_tqdm, adapter)

    def generate_as_finished(
        self,
        prompts: Prompts,
        sampling_params: LLMSamplingParams | Sequence[LLMSamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes prompts like `generate`, and yields each output as soon as all its samples have finished.

        `int(output.request_id)` grows in the order of the prompts. Ending the iteration cancels the others.

        Args:
          prompts, sampling_params, adapter: See `generate`.

        Raises:
          As `generate`.
        """
        listed = listed_prompts(prompts)
        batch = self._opened(listed, sampling_params, adapter)
        try:
            with contextlib.closing(batch.run_as_finished(self._launched)) as indices:
                for index in indices:
                    yield self._output(batch, listed, index)
        finally:
            self._batches.close(batch)

    async def generate_async(
        self,
        prompts: Prompts,
        sampling_params: LLMSamplingParams | Sequence[LLMSamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Does the same as `generate_as_finished` in asyncio. Ending or cancelling the iteration cancels the others."""
        listed = listed_prompts(prompts)
        batch = self._opened(listed, sampling_params, adapter)
        loop, has_changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have been closed
                loop.call_soon_threadsafe(has_changed.set)

        batch.on_done = wake
        try:
            await asyncio.to_thread(batch.submit, self._launched)
            for num_yielded in range(len(listed)):
                while len(batch.done) <= num_yielded:
                    await has_changed.wait()
                    has_changed.clear()
                yield self._output(batch, listed, batch.done[num_yielded])
        finally:
            batch.cancel(self._launched)
            self._batches.close(batch)

    def _output(self, batch: PromptBatch, prompts: Sequence[str | tuple[int, ...]], index: int) -> RequestOutput:
        """Returns the output of a prompt that has finished."""
        self._check_running()
        parts = batch.request_ids[index], prompts[index], batch.token_ids[index], batch.completions[index]
        return request_output(*parts, self._launched.tokenizer)

    def score(self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None) -> list[tuple[float, ...]]:
        """Returns the log-probability of every token but the first, given those before it, in one pass each.

        They refer to the model's own distribution, at temperature 1.

        Args:
          token_ids: Sequences of two tokens or more, such as prompts with their outputs. Each must leave room for one
            more token in the context.
          adapter: The name of an adapter; None is the model itself.

        Raises:
          InvalidRequestError, EngineStoppedError: See `generate`.
        """
        params = LLMSamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0, ignore_eos=True)
        scores = []
        for output in self._run([tuple(map(int, each)) for each in token_ids], params, False, adapter):
            found = zip((output.prompt_logprobs or [None])[1:], output.prompt_token_ids[1:], strict=True)
            scores.append(tuple(position[token_id].logprob for position, token_id in found if position is not None))
        return scores

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: LLMSamplingParams | Sequence[LLMSamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any] | str] = (),
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, which the model's chat template renders.

        Args:
          messages: One conversation, or several. A conversation is a list of messages such as
            `{"role": "user", "content": "..."}`, oldest first, in OpenAI's form or in that of `Client.chat`.
          sampling_params, use_tqdm, adapter: See `generate`.
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
        return self._run(rendered, sampling_params, use_tqdm, adapter)

    def _run(
        self,
        prompts: Sequence[str | tuple[int, ...]],
        sampling_params: LLMSamplingParams | Sequence[LLMSamplingParams] | None,
        use_tqdm: bool,
        adapter: str | Sequence[str | None] | None,
    ) -> list[RequestOutput]:
        batch = self._opened(prompts, sampling_params, adapter)
        try:
            with _Bar(sum(map(len, batch.completions)), is_shown=use_tqdm) as bar:
                batch.run(self._launched, progress=bar.show, is_strict=True)
        finally:
            self._batches.close(batch)
        self._check_running()
        parts = zip(batch.request_ids, prompts, batch.token_ids, batch.completions, strict=True)
        return [request_output(*each, self._launched.tokenizer) for each in parts]

    def _opened(
        self,
        prompts: Sequence[str | tuple[int, ...]],
        sampling_params: LLMSamplingParams | Sequence[LLMSamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> PromptBatch:
        if self._launched.control.is_asleep:
            raise UnavailableFeatureError("the LLM sleeps. Call wake first.")
        if self._launched.weights.lacks_weights:
            raise UnavailableFeatureError("the weights were dropped. Call update_weights first.")
        if not isinstance(sampling_params, Sequence):
            sampling_params = [sampling_params or LLMSamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"got {len(prompts)} prompts and {len(sampling_params)} sampling_params; give one for each."
            )
        adapters = [adapter] * len(prompts) if isinstance(adapter, str | None) else list(adapter)
        if len(adapters) != len(prompts):
            raise ValueError(
                f"got {len(prompts)} prompts and {len(adapters)} adapters; give one for each, or one name."
            )
        return self._batches.open(
            [
                params.prompt(prompt).with_adapter(name or "")
                for prompt, params, name in zip(prompts, sampling_params, adapters, strict=True)
            ]
        )

    def _check_running(self) -> None:
        if (failure := self._launched.engine.failure) is not None:
            raise EngineStoppedError(f"the engine has failed: {failure}. Create a new LLM.")
        if not self._finalize.alive:
            raise EngineStoppedError("the LLM was closed before the call ended. Create a new LLM.")


def offline_config(given: Mapping[str, Any], tell: Tell) -> ServeConfig:
    """Returns the configuration of an engine without a server. `tell` is as in `checked_options`.

    Raises:
      ConfigError: An option does not exist, has no effect without a server, or has a value that is not allowed.
    """
    checked = checked_options(given, "LLM", tell)
    if without_effect := sorted(checked.keys() & server_only_options()):
        raise ConfigError(f"LLM: {', '.join(without_effect)} has no effect without a server; leave it out.")
    return dataclasses.replace(ServeConfig(**checked), max_waiting=_QUEUE_LENGTH)


class _Batches:
    """Passes each output of the engine to the batch of its request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_id = 0
        self._open: dict[int, PromptBatch] = {}

    def open(self, prompts: Sequence[Prompt]) -> PromptBatch:
        with self._lock:
            batch = PromptBatch(prompts, self._next_id)
            self._next_id += len(prompts)
            self._open |= dict.fromkeys(batch.request_ids, batch)
        return batch

    def close(self, batch: PromptBatch) -> None:
        with self._lock:
            for request_id in batch.request_ids:
                del self._open[request_id]

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Called by the engine. Outputs of closed batches are dropped: their requests have been cancelled."""
        found: dict[PromptBatch, list[Output]] = {}
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


def _note(note: str) -> None:
    print(f"meshserve: {note}", file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    """Takes the place of `_tell` and `_note` if no progress is wanted."""
