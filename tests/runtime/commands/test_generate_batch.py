"""`meshserve generate` with OpenAI's batch format: all kinds of lines, interruptions, and files of another kind."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.runtime.api.engine_api import Deliver
from meshserve.runtime.api.errors import EngineStoppedError, MeshserveError
from meshserve.runtime.commands import generate_batch
from meshserve.runtime.commands.cli import main
from meshserve.runtime.commands.generate_batch import answer_batch
from meshserve.runtime.openai.batches.answer_file import AnswerFile
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.retrieval.embedding_defaults import EmbeddingDefaults
from tests.runtime.loopback import INFO, FakeEngine, Job, Letters

URL = "/v1/completions"


class Engine(FakeEngine):
    """A fake engine that can be started. It fails after `num_until_failure` requests."""

    num_until_failure = 10**9

    def start(self) -> None:
        threading.Thread(target=self.run).start()

    def close(self) -> None:
        self.is_running = False

    def submit(self, *arguments: Any) -> None:
        if self.num_submits == self.num_until_failure:
            self.failure = "RuntimeError: device lost"
        super().submit(*arguments)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """The engines launched in place of real ones."""
    found: list[Engine] = []

    def launch(config: ServeConfig, deliver: Deliver) -> Any:
        engine = Engine(deliver)
        found.append(engine)
        limits = SimpleNamespace(
            max_running=4, max_waiting=config.max_waiting, max_decode_steps=1, draft_tokens=0, max_step_tokens=64
        )
        return SimpleNamespace(
            engine=engine, tokenizer=Letters(), info=INFO, grammars=None, embedding=EmbeddingDefaults(),
            limits=limits, close=engine.close,
        )  # fmt: skip

    monkeypatch.setattr(generate_batch, "launch", launch)
    yield found
    for engine in found:
        engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> "Folder":
    return Folder(tmp_path)


class Folder:
    """The files of a run."""

    def __init__(self, path: Path):
        self.source, self.target, self.errors = path / "in.jsonl", path / "out.jsonl", path / "out.errors.jsonl"

    def write(self, *lines: dict[str, Any] | str) -> None:
        self.source.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))

    def run(self) -> tuple[int, int]:
        """Returns the numbers of answers and failures."""
        counts = answer_batch(ServeConfig(), self.source, self.target, self.errors)
        return counts.completed, counts.failed

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]

    def failures(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.read_text().splitlines()]


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "A", "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


def test_every_line_is_answered_as_the_port_answers(engines, folder):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    response = {"input": "Hi", "max_output_tokens": 3}
    folder.write(
        line("text", prompt="A"),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "response", "method": "POST", "url": "/v1/responses", "body": response},
    )
    assert folder.run() == (3, 0) and not folder.errors.exists()
    found = {answer["custom_id"]: answer for answer in folder.answers()}
    assert found["text"].keys() == {"id", "custom_id", "response", "error"} and found["text"]["error"] is None
    assert found["text"]["response"]["status_code"] == 200
    assert found["text"]["response"]["body"]["choices"][0]["text"] == "66 67 "
    assert found["text"]["response"]["body"]["id"] == f"cmpl-{found['text']['response']['request_id']}"
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert found["response"]["response"]["body"]["object"] == "response"


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ("{", "invalid_json_line"),
        ("[]", "invalid_json_line"),
        ('{"custom_id": NaN}', "invalid_json_line"),
        ('{"a": ' * 90_000 + "1" + "}" * 90_000, "invalid_json_line"),
        ({"method": "POST", "url": URL, "body": {}}, "invalid_custom_id"),
        (line("a" * 513), "invalid_custom_id"),
        (line("x") | {"method": "GET"}, "invalid_method"),
        (line("x") | {"url": "/v1/models"}, "invalid_url"),
        (line("x") | {"url": ["x"]}, "invalid_url"),
        (line("x") | {"body": "{}"}, "invalid_body"),
        (line("x") | {"model": "m"}, "unknown_key"),
        (line("first"), "duplicate_custom_id"),
        (line("x", max_tokens=0), 400),
        (line("x", max_token=1), 400),
        (line("x", stream=True), 400),
        (line("x", model="gpt-5"), 404),
        (line("x") | {"url": "/v1/embeddings", "body": {"input": "a"}}, 404),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) and len(str(value)) < 30 else "",
)
def test_a_bad_line_harms_no_other(engines, folder, bad: Any, code: str | int):
    folder.write(line("first"), "", bad, line("last"))
    assert folder.run() == (2, 1)
    assert {answer["custom_id"] for answer in folder.answers()} == {"first", "last"}
    [failure] = folder.failures()
    if isinstance(code, str):
        assert failure["response"] is None and (failure["error"]["code"], failure["error"]["line"]) == (code, 3)
    else:
        assert failure["error"] is None and failure["response"]["status_code"] == code
        assert failure["response"]["body"]["error"]["message"]
    assert folder.run() == (2, 1), "what has failed is not tried again"
    assert engines[1].num_submits == 0


def test_a_run_goes_on_where_a_kill_has_ended_another(engines, folder, monkeypatch: pytest.MonkeyPatch):
    folder.write("{", *(line(str(number)) for number in range(20)))
    monkeypatch.setattr(Engine, "num_until_failure", 9)
    with pytest.raises(EngineStoppedError, match="device lost"):
        folder.run()
    num_done = len(folder.answers())
    assert 0 < num_done < 20
    with folder.target.open("a") as file:
        file.write('{"id": "batch_req_')  # a kill in the middle of a line
    monkeypatch.setattr(Engine, "num_until_failure", 10**9)
    assert folder.run() == (20, 1)
    assert engines[1].num_submits == 20 - num_done
    assert sorted(int(answer["custom_id"]) for answer in folder.answers()) == [*range(20)]
    assert len(folder.failures()) == 1


def test_answers_are_written_as_they_come(engines, folder, monkeypatch: pytest.MonkeyPatch):
    """A line that takes forever does not hold back the others."""

    def is_held(job: Job) -> bool:
        return job.params.max_tokens == 3 and len(folder.answers()) < 10

    monkeypatch.setattr(Engine, "__init__", lambda self, deliver: FakeEngine.__init__(self, deliver, is_held=is_held))
    folder.write(line("slow", max_tokens=3), *(line(str(number)) for number in range(10)))
    assert folder.run() == (11, 0)
    assert folder.answers()[-1]["custom_id"] == "slow"


def test_a_file_of_another_kind_is_not_touched(engines, folder):
    folder.write(line("a"))
    folder.target.write_text('{"index": 0}\n')
    with pytest.raises(MeshserveError, match=r"out.jsonl, line 1: is no answer of a batch"):
        folder.run()
    assert folder.target.read_text() == '{"index": 0}\n' and not engines
    with pytest.raises(MeshserveError, match="must be three files"):
        answer_batch(ServeConfig(), folder.source, folder.source, folder.errors)


def test_two_runs_do_not_write_the_same_file(engines, folder):
    folder.write(line("a"))
    with AnswerFile(folder.target), pytest.raises(MeshserveError, match="another process writes"):
        folder.run()
    assert folder.run() == (1, 0)


def test_the_command_knows_the_form_of_a_file(engines, folder, capsys: pytest.CaptureFixture[str]):
    arguments = ["generate", "--model=m", f"--input={folder.source}", f"--output={folder.target}"]
    folder.write(line("a"), line("b"))
    assert main(arguments) == 0
    assert "of 2 lines 2 are answered" in capsys.readouterr().err
    folder.write(line("a"), line("b"), line("c", max_tokens=-1))
    assert main(arguments) == 1
    assert f"1 failed; see {folder.errors}" in capsys.readouterr().err
    folder.write({"prompt": "A"})
    with contextlib.suppress(SystemExit):
        assert main([*arguments, f"--errors={folder.errors}"]) == 2
    assert "--errors is for files in OpenAI's batch format" in capsys.readouterr().err
