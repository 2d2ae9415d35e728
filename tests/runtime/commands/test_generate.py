"""Tests `meshserve generate`: the allowed contents of a file of prompts, and the output for each of its lines."""

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.runtime.api.constraint import Constraint
from meshserve.runtime.api.engine_api import Deliver
from meshserve.runtime.api.errors import EngineStoppedError, InvalidRequestError, MeshserveError
from meshserve.runtime.api.request import FinishReason, Output, RequestOptions
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.commands import generate
from meshserve.runtime.commands.cli import main
from meshserve.runtime.commands.generate import generate_file, read_prompts
from meshserve.runtime.offline.prompt_batch import Prompt, PromptBatch
from meshserve.runtime.options.serve_config import ServeConfig
from tests.runtime.loopback import INFO

VOCAB_SIZE = 100


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that writes the input file."""

    def write_text(text: str) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


# --- what is read


def test_prompts_are_text_or_tokens_with_sampling_fields(write):
    path = write(
        '{"prompt": "hi", "max_tokens": 3, "temperature": 0, "top_k": 4, "top_p": 0.5, "seed": 7}\n'
        "\n"
        '{"prompt_token_ids": [1, 2], "ignore_eos": true, "stop": "END", "seed": null, "top_k": -1}\n'
        '{"prompt": "", "stop": ["a", "b"], "include_stop": true, "stop_token_ids": [3]}\n'
        '{"prompt": "x", "constraint": {"json_schema": {"type": "null"}}}\n'
        '{"prompt": "x", "constraint": {"choice": ["a", "b"]}}'
    )
    assert read_prompts(path) == [
        Prompt("hi", SamplingParams(max_tokens=3, temperature=0, top_k=4, top_p=0.5, seed=7)),
        Prompt((1, 2), SamplingParams(ignore_eos=True, stop=("END",))),
        Prompt("", SamplingParams(stop=("a", "b"), include_stop=True, stop_token_ids=(3,))),
        Prompt("x", SamplingParams(constraint=Constraint(kind="json_schema", text='{"type": "null"}'))),
        Prompt("x", SamplingParams(constraint=Constraint(kind="choice", choices=("a", "b")))),
    ]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_only_newlines_end_a_line(write, separator: str):
    """JSON strings may contain these characters unescaped."""
    path = write(json.dumps({"prompt": f"one{separator}prompt"}, ensure_ascii=False) + '\r\n{"prompt": "two"}\n')
    assert [prompt.prompt for prompt in read_prompts(path)] == [f"one{separator}prompt", "two"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "Expecting property name"),
        ('"text"', "got str; each line must be a JSON object"),
        ("{}", "give exactly one of prompt and prompt_token_ids"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "give exactly one of prompt and prompt_token_ids"),
        ('{"prompt": 3}', "prompt is 3; it must be a string"),
        ('{"prompt_token_ids": "12"}', "prompt_token_ids must be a list of integers"),
        ('{"prompt_token_ids": [1, true]}', "prompt_token_ids must be a list of integers"),
        ('{"prompt": "a", "max_token": 3}', "unknown fields max_token; allowed are prompt, .*max_tokens"),
        ('{"prompt": "a", "max_tokens": 3.5}', "Couldn.t parse integer: 3.5 at SamplingParams.max_tokens"),
        ('{"prompt": "a", "max_tokens": true}', "Bool value True .* at SamplingParams.max_tokens"),
        ('{"prompt": "a", "stop": [1]}', "Failed to parse stop field"),
        ('{"prompt": "a", "stop_token_ids": [1, "b"]}', "Failed to parse stop_token_ids field"),
        ('{"prompt": "a", "constraint": {"regex": 1}}', "constraint: "),
        ('{"prompt": "a", "constraint": {"regexp": "a"}}', "regexp"),
        ('{"prompt": "a", "constraint": {}}', "constraint has the kinds none; it takes exactly one"),
        ('{"prompt": "a", "constraint": {"choice": "abc"}}', "choice is the string 'abc'; it takes a list of strings"),
        ('{"prompt": "a", "constraint": {"json_schema": ' + '{"a": ' * 90_000 + "}}", "maximum recursion depth"),
        ('{"prompt": "a", "constraint": {"choice": []}}', "sampling.constraint.choice: got 0 choices"),
        ('{"prompt": "a", "top_p": 0}', "sampling.top_p: got 0.0; allowed is above 0 and at most 1"),
        ('{"prompt": "a", "temperature": NaN}', "NaN.* at SamplingParams.temperature"),
        ('{"prompt": "a", "seed": -2}', "Failed to parse seed field: Value out of range: -2"),
        ('{"prompt": "a", "cache_salt": "\\ud800"}', "surrogates not allowed"),
        ('{"prompt": "a", "logit_bias": {"5": null}}', "not 'NoneType'"),
        ('{"prompt": "a", "temperature": 1' + 400 * "0" + "}", "int too large"),
    ],
)
def test_a_faulty_line_is_named_by_its_number(write, line: str, fault: str):
    path = write(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(MeshserveError, match=f"in.jsonl, line 3: .*{fault}"):
        read_prompts(path)


def test_a_file_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(MeshserveError, match="none.jsonl cannot be read: .*No such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(MeshserveError, match="binary.jsonl cannot be read"):
        read_prompts(tmp_path / "binary.jsonl")


# --- what is written


class FakeEngine:
    """Answers each prompt with its tokens plus 1, each from a separate thread; fails at the prompt [13]."""

    def __init__(self, deliver: Deliver):
        self.failure: str | None = None
        self._deliver = deliver
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        options: RequestOptions,
        grammar: None = None,
    ) -> None:
        assert grammar is None
        if prompt == (13,):
            self.failure = "RuntimeError: device lost"
        if self.failure:
            raise EngineStoppedError(f"the engine has failed: {self.failure}")
        if len(prompt) > 5:
            raise InvalidRequestError("prompt", f"has {len(prompt)} tokens; this server accepts 5.")
        for index in range(options.n):
            threading.Thread(target=self._answer, args=(request_id, index, prompt)).start()

    def _answer(self, request_id: str, index: int, prompt: tuple[int, ...]) -> None:
        sample: dict[str, Any] = {"request_id": request_id, "index": index}
        for token_id in prompt:
            self._deliver([Output(**sample, token_ids=(token_id + 1,), text=chr(token_id + 1))])
        self._deliver([Output(**sample, text="ß\u2028", finish_reason=FinishReason.STOP)])


class Letters:
    @staticmethod
    def encode(text: str) -> tuple[int, ...]:
        return tuple(text.encode())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServeConfig, FakeEngine]]:
    """The engines launched in place of real ones."""
    found = []

    def launch(config: ServeConfig, deliver: Deliver) -> Any:
        found.append((config, FakeEngine(deliver)))
        info = dataclasses.replace(INFO, vocab_size=VOCAB_SIZE)
        engine = found[-1][1]
        return SimpleNamespace(engine=engine, tokenizer=Letters(), info=info, grammars=None, close=engine.stop)

    monkeypatch.setattr(generate, "launch", launch)
    return found


def output_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_one_line_for_each_prompt_in_the_same_order(write, launched, tmp_path: Path):
    path = write("".join(json.dumps({"prompt_token_ids": [index, 70]}) + "\n" for index in range(40)))
    target = tmp_path / "out.jsonl"
    assert generate_file(ServeConfig(max_waiting=1), path, target) == 0
    assert output_lines(target) == [
        {
            "index": index,
            "sample": 0,
            "token_ids": [index + 1, 71],
            "text": f"{chr(index + 1)}Gß\u2028",
            "finish_reason": "stop",
        }
        for index in range(40)
    ]
    ((config, engine),) = launched
    assert config.max_waiting == 40, "the whole file fits into the queue"
    assert engine.calls == ["start", "stop"]


def test_each_sample_has_its_line(write, launched, tmp_path: Path):
    path = write('{"prompt": "A", "n": 2, "priority": 1, "cache_salt": "s", "adapter": "a"}\n{"prompt": "B"}\n')
    target = tmp_path / "out.jsonl"
    assert generate_file(ServeConfig(), path, target) == 0
    lines = [(line["index"], line["sample"], line["text"][0]) for line in output_lines(target)]
    assert lines == [(0, 0, "B"), (0, 1, "B"), (1, 0, "C")]
    assert launched[0][0].max_waiting == 3
    assert [prompt.options.adapter for prompt in read_prompts(path)] == ["a", ""]
    with pytest.raises(MeshserveError, match="Failed to parse priority field: .*'x'"):
        generate_file(ServeConfig(), write('{"prompt": "A", "priority": "x"}'), target)


def test_a_refused_prompt_has_its_reason_and_the_others_are_completed(
    write, launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write(
        '{"prompt": "A"}\n{"prompt": "TOO LONG"}\n{"prompt": "no"}\n{"prompt_token_ids": [1, 100]}\n'
        '{"prompt_token_ids": [-1]}\n{"prompt": "B"}\n'
    )
    target = tmp_path / "out.jsonl"
    assert main(["generate", "--model=m", f"--input={path}", f"--output={target}"]) == 1
    assert "4 samples" in capsys.readouterr().err
    lines = output_lines(target)
    assert [line["finish_reason"] for line in lines] == ["stop", "error", "error", "error", "error", "stop"]
    assert [line.get("error") for line in lines] == [
        None,
        "prompt: has 8 tokens; this server accepts 5.",
        "prompt: 110 is not a token id; allowed are 0 to 99.",  # the tokenizer has more tokens than the model
        "prompt_token_ids: 100 is not a token id; allowed are 0 to 99.",
        "prompt_token_ids: -1 is not a token id; allowed are 0 to 99.",
        None,
    ]
    assert [line["text"] for line in lines] == ["Bß\u2028", "", "", "", "", "Cß\u2028"]


def test_when_the_engine_dies_what_was_finished_is_kept(write, launched, tmp_path: Path):
    path = write('{"prompt": "A"}\n{"prompt_token_ids": [13]}\n{"prompt": "B"}\n')
    target = tmp_path / "out.jsonl"
    with pytest.raises(
        MeshserveError, match="the engine failed: RuntimeError: device lost. .*out.jsonl contains what was"
    ):
        generate_file(ServeConfig(), path, target)
    first, *others = output_lines(target)
    assert (first["text"], first["finish_reason"]) == ("Bß\u2028", "stop")
    assert [line["error"] for line in others] == ["the engine has failed: RuntimeError: device lost"] * 2
    assert launched[0][1].calls == ["start", "stop"]


def test_what_there_is_by_ctrl_c_is_written(write, launched, monkeypatch, tmp_path: Path):
    def interrupt(batch: PromptBatch, engine: Any) -> None:
        batch.deliver([Output(request_id="0", token_ids=(66,), text="B")])
        raise KeyboardInterrupt

    monkeypatch.setattr(PromptBatch, "run", interrupt)
    target = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        generate_file(ServeConfig(), write('{"prompt": "A"}\n'), target)
    assert [line["text"] for line in output_lines(target)] == ["B"]
    assert launched[0][1].calls == ["start", "stop"]  # otherwise jax would abort the process


def test_a_faulty_file_is_reported_before_anything_is_launched(write, launched, tmp_path: Path):
    with pytest.raises(MeshserveError, match="line 1"):
        generate_file(ServeConfig(), write("{"), tmp_path / "out.jsonl")
    assert launched == [] and not (tmp_path / "out.jsonl").exists()


def test_an_output_that_cannot_be_written_is_reported_before_anything_is_launched(write, launched, tmp_path: Path):
    with pytest.raises(MeshserveError, match="--output .*nowhere/out.jsonl cannot be written: No such file"):
        generate_file(ServeConfig(), write('{"prompt": "a"}'), tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(MeshserveError, match="cannot be written: Is a directory"):
        generate_file(ServeConfig(), write('{"prompt": "a"}'), tmp_path)
    prompts = write('{"prompt": "a"}')
    with pytest.raises(MeshserveError, match="is the input file. Choose another file"):
        generate_file(ServeConfig(), prompts, prompts)
    assert launched == []


def test_an_empty_file_gives_an_empty_file(write, launched, tmp_path: Path):
    assert generate_file(ServeConfig(), write(""), tmp_path / "out.jsonl") == 0
    assert output_lines(tmp_path / "out.jsonl") == []
