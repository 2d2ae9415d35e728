"""Tests `meshserve embed`: its files, and that a killed run continues without a lost or doubled result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshserve.runtime.api.errors import ConfigError, MeshserveError
from meshserve.runtime.commands.cli import main
from meshserve.runtime.commands.embedding_files import (
    Lines,
    Result,
    ResumableFile,
    Rows,
    Text,
    form_of,
    inspect,
    read_texts,
)
from tests import checkpoints
from tests.waiting import WAIT_SECONDS, wait_for

SETTINGS = {"input_sha256": "1", "model": "a"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_embedding_checkpoint(tmp_path_factory.mktemp("embedding") / "model")


def flags(model: Path, source: Path, target: Path, *more: str) -> list[str]:
    return [
        "embed", f"--model={model}", "--dtype=float32", "--max-running=8", "--max-step-tokens=64", "--page-size=16",
        "--num-pages=256", "--cache-dir=", f"--input={source}", f"--output={target}", *more,
    ]  # fmt: skip


def write_texts(path: Path, texts: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    return path


# --- the input


def test_lines_are_texts_or_token_ids_and_have_ids(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a\u2028b", "id": {"k": 1}}\n\n{"token_ids": [1, 2]}\n  \n{"text": ""}', encoding="utf-8")
    source = inspect(path)
    assert source.num_texts == 3
    texts = [Text(1, "a\u2028b", {"k": 1}), Text(3, (1, 2)), Text(5, "")]
    assert list(read_texts(source, 0)) == texts
    assert list(read_texts(source, 2)) == texts[2:]


def test_each_line_of_a_plain_file_is_a_text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes("first \r\n\n  second\u2028line\n".encode())
    assert [text.content for text in read_texts(inspect(path), 0)] == ["first ", "  second\u2028line"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "must be a JSON object"),
        ('{"text": "a", "token_ids": [1]}', "exactly one of text and token_ids"),
        ('{"id": 1}', "exactly one of text and token_ids"),
        ('{"text": 1}', "must be a string"),
        ('{"token_ids": [1.5]}', "list of integers"),
        ('{"text": "a", "n": 2}', "unknown fields n"),
        ("{", "Expecting"),
        ('"\udcff"', "surrogate|codec"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(MeshserveError, match=f"line 2: .*({message})"):
        list(read_texts(inspect(path), 0))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(MeshserveError, match="cannot be read: No such file"):
        inspect(tmp_path / "none.jsonl")


# --- the output


def results(first: int, count: int) -> list[Result]:
    return [
        Result(index, Text(index, str(index), f"id {index}"), np.array([index, 1 / 3, -1e-30], np.float32), 7)
        for index in range(first, first + count)
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".npy"])
@pytest.mark.parametrize("cut", [0, 1, 5, 40])
def test_a_torn_end_is_computed_again(tmp_path, suffix, cut):
    """Whatever part of the last write a kill has left: whole results stay, the rest is written again."""
    target = tmp_path / f"out{suffix}"
    partial = target.with_name(target.name + ".partial")
    form = form_of(target, 9, 3)
    with ResumableFile(target, form, SETTINGS) as output:
        assert output.num_done == 0
        output.append(results(0, 4))
        output.append(results(4, 3))
    os.truncate(partial, partial.stat().st_size - cut)
    with ResumableFile(target, form, SETTINGS) as output:
        assert output.num_done == (7 if cut == 0 else 7 - -(-cut // 12) if suffix == ".npy" else 6)
        output.append(results(output.num_done, 9 - output.num_done))
        output.finish()
    assert sorted(os.listdir(tmp_path)) == [target.name]
    expected = np.stack([result.embedding for result in results(0, 9)])
    if suffix == ".npy":
        np.testing.assert_array_equal(np.load(target), expected)
        return
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(line["index"], line["id"], line["num_tokens"]) for line in lines] == [
        (index, f"id {index}", 7) for index in range(9)
    ]
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], np.float32), expected)


def test_a_head_that_was_cut_is_written_again(tmp_path):
    target = tmp_path / "out.npy"
    ResumableFile(target, Rows(1, 3), SETTINGS).__exit__()
    os.truncate(tmp_path / "out.npy.partial", 10)
    with ResumableFile(target, Rows(1, 3), SETTINGS) as output:
        assert output.num_done == 0
        output.append(results(0, 1))
        output.finish()
    assert np.load(target).shape == (1, 3)


def test_a_run_with_other_settings_does_not_continue(tmp_path):
    target = tmp_path / "out.jsonl"
    with ResumableFile(target, Lines(), SETTINGS) as output:
        output.append(results(0, 1))
        with pytest.raises(MeshserveError, match="being written by another process"):
            ResumableFile(target, Lines(), SETTINGS)
    with pytest.raises(MeshserveError, match=r"begun with model 'a' \(now 'b'\)"):
        ResumableFile(target, Lines(), {**SETTINGS, "model": "b"})
    (tmp_path / "out.jsonl.partial.json").unlink()
    with pytest.raises(MeshserveError, match="Delete both to begin anew"):
        ResumableFile(target, Lines(), SETTINGS)


def test_the_name_decides_the_form(tmp_path):
    with pytest.raises(ConfigError, match="must end in .jsonl, .npy or .parquet"):
        form_of(tmp_path / "out.csv", 1, 1)


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    target = tmp_path / "out.parquet"
    with ResumableFile(target, form_of(target, 3000, 3), SETTINGS) as output:
        output.append(results(0, 3000))
        output.finish()
    table = parquet.read_table(target)
    assert table["index"].to_pylist() == list(range(3000))
    np.testing.assert_array_equal(
        np.array(table["embedding"].to_pylist(), np.float32), np.stack([each.embedding for each in results(0, 3000)])
    )
    assert sorted(os.listdir(tmp_path)) == [target.name]


# --- the command


def test_embeddings_of_a_file(model, tmp_path, capsys):
    """In the order of the input, equal to Hugging Face's; lines that cannot be embedded say why."""
    texts = [{"text": "t" * (1 + 7 * number % 60), "id": number} for number in range(150)]
    texts[70], texts[80], texts[90] = {"text": "x" * 600}, {"token_ids": [5, 320]}, {"token_ids": [1, 2, 3]}
    source = write_texts(tmp_path / "in.jsonl", texts)
    assert main(flags(model, source, tmp_path / "out.jsonl")) == 1
    assert "150 texts" in (said := capsys.readouterr().err) and "2 failed" in said
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(150))
    assert [line.get("id") for line in lines] == [text.get("id") for text in texts]
    assert "601 tokens" in lines[70]["error"] and "320 is not a token id" in lines[80]["error"]
    found = np.array([line["embedding"] for line in lines if "error" not in line])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    kept = [index for index in range(150) if index not in (70, 80)]
    prompts = [texts[index].get("token_ids") or tokenizer.encode(texts[index]["text"]).ids for index in kept]
    expected = checkpoints.pooled_last_tokens(model, prompts).numpy()
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

    assert main(flags(model, source, tmp_path / "out.npy", "--dimensions=5", "--truncate")) == 1
    rows = np.load(tmp_path / "out.npy")
    assert rows.shape == (150, 5) and np.flatnonzero(np.isnan(rows).any(axis=1)).tolist() == [80]
    shortened = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(rows[kept], shortened, rtol=0, atol=1e-5)


def test_a_killed_run_continues_without_a_lost_or_doubled_line(model, tmp_path):
    """Kills the process twice, whatever it is doing, and compares the result with that of one run."""
    texts = [{"text": f"text {number} " * (1 + number % 5)} for number in range(900)]
    source = write_texts(tmp_path / "in.jsonl", texts)
    target, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    partial = tmp_path / "out.jsonl.partial"

    def size() -> int:
        with contextlib.suppress(FileNotFoundError):
            return partial.stat().st_size
        return 0

    for _ in range(2):
        before = size()
        process = subprocess.Popen(
            [sys.executable, "-m", "meshserve", *flags(model, source, target, "--cpu-devices=1")],
            stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(lambda before=before, process=process: size() > before or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        assert not target.exists()
    assert main(flags(model, source, target)) == 0
    assert main(flags(model, source, whole)) == 0
    lines, expected = ([json.loads(line) for line in path.read_text().splitlines()] for path in (target, whole))
    assert [line["index"] for line in lines] == list(range(900))
    np.testing.assert_allclose(
        [line["embedding"] for line in lines], [line["embedding"] for line in expected], rtol=0, atol=1e-5
    )
    assert not partial.exists()


def test_a_model_that_generates_text_is_refused_before_it_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("meshserve.runtime.startup.launch.build_engine", None)
    source = write_texts(tmp_path / "in.jsonl", [{"text": "a"}])
    model = checkpoints.save_checkpoint(tmp_path / "model")
    assert main(flags(model, source, tmp_path / "out.npy")) == 2
    assert "needs a model that can embed" in capsys.readouterr().err
