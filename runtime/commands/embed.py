"""`meshserve embed`: embeds a file of texts without a server."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ..api.errors import EngineStoppedError, InvalidRequestError, MeshserveError
from ..api.request import FinishReason, Output, RequestOptions
from ..api.tasks import EMBED
from ..api.versions import installed_version
from ..options.serve_config import ServeConfig
from ..program.pooled_rows import POOLING_PARAMS
from ..retrieval.prompt_formats import PromptFormat, checked_instruction
from ..retrieval.results import EmbeddingForm
from ..scheduler.limits import check_prompt_length
from ..startup.interpreter import take_turns_often
from ..startup.launch import Launched, launch
from .embedding_files import InputSummary, Result, ResumableFile, Text, form_of, inspect, read_texts

_GROUP_TEXTS = 64  # written at a time
_OPEN_GROUPS = 32  # tokenised and submitted ahead of the device; bounds the memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """The options of the command besides those of the model."""

    instruction: str | None = None  # None: the model's default prompt; empty: neither
    dimensions: int = 0  # 0: those of the model
    is_normalized: bool | None = None  # None: as the model's files say
    truncate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run has done."""

    num_texts: int
    num_failed: int
    num_tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.num_texts:,} texts with {self.num_tokens:,} tokens in {self.seconds:.1f} s: "
            f"{self.num_tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
        )


def embed_file(config: ServeConfig, source: Path, target: Path, options: EmbedOptions) -> Summary:
    """Embeds every text of `source` and writes the embeddings to `target`, in the order of the input.

    The name of `target` decides its form: .jsonl, .npy or .parquet. A run that was interrupted is continued by the next
    one with the same input and options; see `embedding_files`. Texts that cannot be embedded get the reason as `error`
    in JSONL, and a row of NaN otherwise.

    Returns:
      What this run has done.

    Raises:
      MeshserveError: The input is malformed, the output cannot be written, the model is no embedding model, or the
        engine failed.
    """
    texts = inspect(source)
    if target.exists() and target.samefile(source):
        raise MeshserveError(f"--output {target} is the input file. Choose another file.")
    form_of(target, 1, 1)  # fail before the model is loaded
    checked_instruction(options.instruction or "")
    window = _Window()
    config = dataclasses.replace(config, max_waiting=_GROUP_TEXTS * (_OPEN_GROUPS + 1))
    take_turns_often()
    launched = launch(config, window.deliver, task=EMBED)
    try:
        length = launched.info.embedding_dimensions
        form = launched.embedding.form(length, options.dimensions or None, options.is_normalized)
        settings = {
            "input_sha256": texts.sha256, "model": config.model, "revision": config.revision,
            "dtype": launched.info.dtype, "quantization": launched.info.quantization,
            "meshserve": installed_version(), **dataclasses.asdict(options),
        }  # fmt: skip
        launched.engine.start()
        with ResumableFile(target, form_of(target, texts.num_texts, form.dimensions), settings) as output:
            summary = _Run(launched, form, options, window).run(texts, output)
            output.finish()
        return summary
    finally:  # also after Ctrl-C: JAX aborts a process that exits while one of its threads computes
        launched.close()


class _Group:
    """Some consecutive texts, and what is known of their results."""

    def __init__(self, first: int, texts: Sequence[Text]):
        self.first, self.texts = first, texts
        self.errors: dict[int, str] = {}  # by place in the group, of texts that were not submitted
        self.submitted: list[int] = []  # places of the prompts of the request
        self.outputs: dict[int, Output] = {}  # by index of the prompt

    @property
    def is_done(self) -> bool:
        return len(self.outputs) == len(self.submitted)

    def results(self, form: EmbeddingForm) -> Iterator[Result]:
        by_place = {place: self.outputs[index] for index, place in enumerate(self.submitted)}
        for place, text in enumerate(self.texts):
            output = by_place.get(place)
            pooled: np.ndarray | None = output.pooled if output is not None else None
            yield Result(
                self.first + place,
                text,
                form.embedding(pooled) if pooled is not None else None,
                output.num_prompt_tokens if output is not None else 0,
                self.errors.get(place) or (output.message if output is not None else ""),
            )


class _Window:
    """The groups that are being computed. The engine's thread delivers; the main thread adds and takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: deque[_Group] = deque()

    def deliver(self, outputs: Sequence[Output]) -> None:
        with self._changed:
            groups = {str(group.first): group for group in self._groups}
            for output in outputs:
                name, _, index = output.request_id.partition("/")
                if output.finish_reason is not None and (group := groups.get(name)) is not None:
                    group.outputs[int(index) if index else output.index] = output
            self._changed.notify()

    def refuse(self, group: _Group, index: int, error: str) -> None:
        """Records why a prompt was not submitted."""
        with self._changed:
            group.outputs[index] = Output(request_id="", finish_reason=FinishReason.ERROR, message=error)

    def add(self, group: _Group) -> None:
        with self._changed:
            self._groups.append(group)

    def take(self, most: int) -> Iterator[_Group]:
        """Yields finished groups from the first on, and waits until at most `most` are left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._groups) <= most or self._groups[0].is_done)
                if not self._groups or not self._groups[0].is_done:
                    return
                group = self._groups.popleft()
            yield group


class _Run:
    """Embeds the texts of a file that are not in the output yet."""

    def __init__(self, launched: Launched, form: EmbeddingForm, options: EmbedOptions, window: _Window):
        self._launched, self._form, self._window = launched, form, window
        self._max_context = launched.info.max_context_tokens
        max_tokens = self._max_context - 1 if options.truncate else None
        prompt = launched.embedding.prompt if options.instruction is None else ""
        self._prompts = PromptFormat(launched.tokenizer, options.instruction or "", max_tokens, prompt)
        self._num_failed = self._num_tokens = 0

    def run(self, source: InputSummary, output: ResumableFile) -> Summary:
        """Writes all results that are missing."""
        began, first = time.monotonic(), output.num_done
        if first:
            print(f"meshserve: {first:,} of {source.num_texts:,} texts were embedded by an earlier run", flush=True)
        with tqdm(total=source.num_texts, initial=first, unit=" texts", disable=None) as progress:
            for group in self._groups(source, first):
                self._submit(group)
                self._write(self._window.take(_OPEN_GROUPS - 1), output, progress)
            self._write(self._window.take(0), output, progress)
        return Summary(
            num_texts=source.num_texts - first, num_failed=self._num_failed, num_tokens=self._num_tokens,
            seconds=time.monotonic() - began,
        )  # fmt: skip

    @staticmethod
    def _groups(source: InputSummary, first: int) -> Iterator[_Group]:
        texts: list[Text] = []
        for text in read_texts(source, first):
            texts.append(text)
            if len(texts) == _GROUP_TEXTS:
                yield _Group(first, texts)
                first, texts = first + len(texts), []
        if texts:
            yield _Group(first, texts)

    def _submit(self, group: _Group) -> None:
        prompts = []
        for place, text in enumerate(group.texts):
            try:
                prompts.append(self._tokens(text))
                group.submitted.append(place)
            except InvalidRequestError as error:
                group.errors[place] = str(error)
        self._window.add(group)
        submit = self._launched.engine.submit_prompts
        try:
            if prompts:
                submit(str(group.first), prompts, POOLING_PARAMS, RequestOptions())
        except InvalidRequestError:  # one of the texts does not fit in the cache
            self._submit_one_by_one(group, prompts)

    def _submit_one_by_one(self, group: _Group, prompts: Sequence[tuple[int, ...]]) -> None:
        for index, prompt in enumerate(prompts):
            try:
                name = f"{group.first}/{index}"
                self._launched.engine.submit_prompts(name, [prompt], POOLING_PARAMS, RequestOptions())
            except InvalidRequestError as error:
                self._window.refuse(group, index, str(error))

    def _tokens(self, text: Text) -> tuple[int, ...]:
        """
        Raises:
          InvalidRequestError: The text cannot be embedded.
        """
        if isinstance(text.content, str):
            token_ids = self._prompts.embedded(text.content)
        else:
            token_ids = text.content[: self._prompts.max_tokens]
        check_prompt_length("text", len(token_ids), self._max_context)
        vocab_size = self._launched.info.vocab_size
        if (bad := next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)) is not None:
            raise InvalidRequestError("token_ids", f"{bad} is not a token id; allowed are 0 to {vocab_size - 1}.")
        return token_ids

    def _write(self, groups: Iterator[_Group], output: ResumableFile, progress: tqdm) -> None:
        for group in groups:
            results = list(group.results(self._form))
            if (failure := self._launched.engine.failure) is not None:
                raise EngineStoppedError(f"the engine failed: {failure}. The same command continues from here.")
            if any(each.finish_reason is FinishReason.CANCELLED for each in group.outputs.values()):
                raise EngineStoppedError("the engine was stopped. The same command continues from here.")
            output.append(results)
            self._num_failed += sum(result.embedding is None for result in results)
            self._num_tokens += sum(result.num_tokens for result in results)
            progress.update(len(results))
