"""`meshserve generate`: completes a file of prompts without a server."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from meshserve.protos import inference_pb2 as pb

from ..api import proto_codec
from ..api.errors import InvalidRequestError, MeshserveError
from ..api.sampling_params import params_table, without_unset
from ..client import messages
from ..offline.prompt_batch import AccumulatedOutput, Prompt, PromptBatch
from ..options.serve_config import ServeConfig
from ..startup.interpreter import take_turns_often
from ..startup.launch import launch

_SAMPLING_FIELDS = tuple(name for name in params_table() if name != "num_resumed_tokens")
_OPTION_FIELDS = ("n", "priority", "cache_salt", "adapter")


def _line(completion: AccumulatedOutput, index: int, sample: int) -> str:
    line: dict[str, Any] = {
        "index": index,
        "sample": sample,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    for name in ("logprobs", "prompt_logprobs"):
        if found := getattr(completion, name):
            line[name] = [_finite(position._asdict()) for position in found]
    if completion.error:
        line["error"] = completion.error
    return json.dumps(line, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_prompts(path: Path) -> list[Prompt]:
    """Reads the prompts of a JSONL file.

    Each line is an object with `prompt` (text) or `prompt_token_ids`, and optionally fields of `SamplingParams` and the
    fields `n`, `priority`, `cache_salt` and `adapter` of `RequestOptions`.

    Raises:
      MeshserveError: The file cannot be read, or a line is invalid. The message gives the line number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines also splits at U+2028, valid in JSON
    except (OSError, UnicodeDecodeError) as error:
        raise MeshserveError(f"--input {path} cannot be read: {error}.") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_prompt(json.loads(line)))
            except (
                ValueError,
                TypeError,
                OverflowError,
                RecursionError,
                json_format.ParseError,
                InvalidRequestError,
            ) as error:
                raise MeshserveError(f"--input {path}, line {number}: {error}") from None
    return prompts


def _prompt(raw: Any) -> Prompt:
    if not isinstance(raw, dict):
        raise ValueError(f"got {type(raw).__name__}; each line must be a JSON object.")
    json.dumps(raw, ensure_ascii=False).encode()  # rejects lone surrogates
    known = ("prompt", "prompt_token_ids", *_OPTION_FIELDS, *_SAMPLING_FIELDS)
    unknown = sorted(raw.keys() - set(known))
    if unknown:
        raise ValueError(f"unknown fields {', '.join(unknown)}; allowed are {', '.join(known)}.")
    text, token_ids = raw.get("prompt"), raw.get("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise ValueError("give exactly one of prompt and prompt_token_ids.")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt is {text!r}; it must be a string.")
    if token_ids is not None and not (isinstance(token_ids, list) and all(type(token) is int for token in token_ids)):
        raise ValueError("prompt_token_ids must be a list of integers.")
    prompt = text if text is not None else tuple(token_ids or ())
    request = _request(raw)
    params, options = proto_codec.sampling_params(request.sampling), proto_codec.request_options(request, None)
    return Prompt(prompt, params, options, request.sampling)


def _request(raw: Mapping[str, Any]) -> pb.GenerateRequest:
    """Returns the public message with a line's sampling parameters and options, by protobuf's JSON mapping.

    Beyond that mapping, `stop` may be one string, and a JSON schema an object.
    """
    sampling = without_unset({name: raw[name] for name in _SAMPLING_FIELDS if name in raw})
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    asked = sampling.pop("constraint", None)
    options = {name: raw[name] for name in _OPTION_FIELDS if name in raw}
    request = json_format.ParseDict(options, pb.GenerateRequest())
    json_format.ParseDict(sampling, request.sampling)
    if asked is not None:
        try:
            request.sampling.constraint.CopyFrom(messages.constraint_message(asked))
        except TypeError as error:
            raise ValueError(f"constraint: {error}") from None
    return request


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MeshserveError(f"--output {target} cannot be written: {error.strerror}.") from None


def generate_file(config: ServeConfig, source: Path, target: Path) -> int:
    """Completes every prompt of `source` and writes the completions to `target`, one line per sample in input order.

    On Ctrl-C, the completions generated so far are written.

    Returns:
      The number of samples that failed. Their lines have `error`.

    Raises:
      MeshserveError: The input is malformed, the output cannot be written, or the engine failed.
    """
    prompts = read_prompts(source)
    with _writing(target):  # fail before anything is computed
        target.open("a").close()
    if target.samefile(source):
        raise MeshserveError(f"--output {target} is the input file. Choose another file.")
    batch = PromptBatch(prompts)
    config = dataclasses.replace(config, max_waiting=max(sum(prompt.options.n for prompt in prompts), 1))
    take_turns_often()
    launched = launch(config, batch.deliver)
    launched.engine.start()
    try:
        batch.run(launched)
    finally:  # also after Ctrl-C: JAX aborts a process that exits while one of its threads computes
        launched.close()
        completions = [
            (completion, index, sample)
            for index, samples in enumerate(batch.completions)
            for sample, completion in enumerate(samples)
        ]
        lines = [_line(completion, index, sample) for completion, index, sample in completions]
        with _writing(target):
            target.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if launched.engine.failure is not None:
        raise MeshserveError(
            f"the engine failed: {launched.engine.failure}. {target} contains what was finished before."
        )
    return sum(bool(completion.error) for completion, *_ in completions)
