"""Tests `meshserve chat` as a separate process, on a pipe and on a terminal, against a server on loopback."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from meshserve.runtime.api.tenants import new_token
from meshserve.runtime.commands.chat_calls import ReadableCalls
from meshserve.runtime.commands.chat_terminal import StreamedAnswer, end_of_block
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.text.answers.answer_parts import ArgumentsPart, CallPart, ContentPart, ReasoningPart
from tests.certificates import certificate
from tests.dictation import Dictating, dictating, tokenizer
from tests.runtime.fake_adapters import FakeCatalog
from tests.runtime.loopback import Running, running
from tests.waiting import WAIT_SECONDS, wait_for

CHAT = [sys.executable, "-m", "meshserve", "chat", "--temperature=0"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def piped(target: str, lines: str, *flags: str) -> subprocess.CompletedProcess:
    command = [*CHAT, f"--target={target}", *flags]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=WAIT_SECONDS)


def test_a_pipe_gets_an_answer_for_each_line(server):
    done = piped(server.target, "hi\n\nagain\n/quit\nnever\n", "--max-tokens=3")
    assert (done.stdout, done.stderr, done.returncode) == ("11 12 13 \n11 12 13 \n", "", 0)


def test_an_adapter_answers(server, monkeypatch):
    monkeypatch.setattr(server.engine, "adapters", FakeCatalog("law"))
    done = piped(server.target, "hi\n", "--max-tokens=2", "--adapter=law")
    assert (done.stdout, done.stderr, done.returncode) == ("11 12 \n", "", 0)
    assert server.engine.options[-1].adapter == "law"


def test_errors_are_printed_and_the_conversation_goes_on(server):
    done = piped(server.target, f"{'a' * 70}\nhi\n", "--max-tokens=1")
    assert done.stdout == "11 \n"
    assert "INVALID_ARGUMENT" in done.stderr and "accepts 63" in done.stderr
    assert done.returncode == 1


def test_the_conversation_is_kept_until_it_is_reset(server):
    """Uses the fake model's context of 64 tokens: two short turns fit, the third only fits after a reset."""
    done = piped(server.target, "123456789\n123456789\n123456789\n/reset\n123456789\n", "--max-tokens=3", "--system=s")
    assert done.stdout == "11 12 13 \n11 12 13 \n11 12 13 \n"
    assert done.stderr.count("INVALID_ARGUMENT") == 1


# Runs the command line with a client that does not wait for a server to open its port.
WITHOUT_WAITING = """
import sys
from meshserve.runtime.client import readiness
from meshserve.runtime.commands.cli import main
readiness._UNREACHABLE_SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_that_is_not_there():
    command = [sys.executable, "-c", WITHOUT_WAITING, *CHAT[3:], "--target=127.0.0.1:1"]
    done = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert "UNAVAILABLE" in done.stderr and "Traceback" not in done.stderr and done.returncode == 1


def test_a_secured_server_is_shown_a_token(tmp_path: Path):
    files, (token, lines) = certificate(tmp_path, "server"), new_token("a")
    (tmp_path / "tokens.toml").write_text(lines)
    (tmp_path / "token").write_text(f"{token}\n")
    with running(tokens=tmp_path / "tokens.toml", listen=Listen(tls=files)) as server:
        trust = f"--tls-ca={files.certificate}"
        done = piped(server.target, "hi\n", "--max-tokens=2", trust, f"--token-file={tmp_path / 'token'}")
        assert (done.stdout, done.returncode) == ("11 12 \n", 0), done.stderr
        assert "UNAUTHENTICATED" in piped(server.target, "hi\n", trust).stderr
        done = piped(server.target, "hi\n", trust, "--token-file=/nowhere")
        assert (done.stderr, done.returncode) == ("meshserve: /nowhere cannot be read: No such file or directory.\n", 2)


# Makes its standard input the controlling terminal, so that Ctrl-C there becomes a signal, and runs the given command.
ON_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROMPT = r">[\s\x08]"


class Terminal:
    """A chat on a pseudo-terminal. `said` is what it printed, without escape sequences."""

    def __init__(self, target: str, home: Path, *flags: str):
        self.said = ""
        self._fd, inner = pty.openpty()
        command = [sys.executable, "-c", ON_TERMINAL, *CHAT, f"--target={target}", *flags]
        # No terminal answers, so that the position of the cursor must not be asked for.
        environment = os.environ | {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "HOME": str(home)}
        self._process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment)
        os.close(inner)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str, keys: str = "") -> None:
        """Waits until the chat prints the pattern after the previous match; types the keys, repeatedly if nothing
        comes.
        """
        end = time.monotonic() + WAIT_SECONDS
        self.type(keys)
        while (found := re.search(pattern, self.said)) is None:
            assert time.monotonic() < end, self.said
            if not select.select([self._fd], [], [], 1.0)[0]:
                self.type(keys)
                continue
            try:
                self.said += _ESCAPES.sub("", os.read(self._fd, 4096).decode(errors="replace"))
            except OSError:
                raise AssertionError(f"the chat has ended: {self.said}") from None
        self.said = self.said[found.end() :]

    def status(self) -> int:
        return self._process.wait(WAIT_SECONDS)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


def test_a_terminal_can_stop_an_answer_and_go_on(server, tmp_path: Path):
    terminal = Terminal(server.target, tmp_path, "--max-tokens=100000")
    try:
        terminal.wait_for("/quit")
        terminal.type("hi\n")
        terminal.wait_for("11 12 13 ")
        terminal.type("\x03")  # Ctrl-C
        terminal.wait_for(r"\[stopped\]")
        wait_for(lambda: server.room.num_open == 0)  # the request was cancelled
        terminal.wait_for(PROMPT)
        terminal.wait_for("/quit or Ctrl-D exits", "\x03")  # at the prompt there is nothing to stop
        terminal.wait_for(PROMPT)
        terminal.type("/reset\n")
        terminal.type("hi\n")
        terminal.wait_for("11 12 13 ")
        terminal.type("\x03")
        terminal.wait_for(r"\[stopped\]")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")  # Ctrl-D
        assert terminal.status() == 0
    finally:
        terminal.close()


def test_a_terminal_keeps_its_history_and_knows_commands(server, tmp_path: Path):
    for _ in range(2):
        terminal = Terminal(server.target, tmp_path, "--max-tokens=2")
        try:
            terminal.wait_for(PROMPT)
            terminal.type("/hel\r")
            terminal.wait_for(r"there is no command /hel. Did you mean /help\?")
            terminal.wait_for(PROMPT)
            terminal.type("good morrow\r")
            terminal.wait_for(PROMPT)
            terminal.type("\x1b[A\r")  # the line before this one, again
            terminal.wait_for("good morrow")
            terminal.wait_for(PROMPT)
            terminal.type("/quit\r")
            assert terminal.status() == 0
        finally:
            terminal.close()
    history = (tmp_path / ".cache" / "meshserve" / "chat_history").read_text()
    assert history.count("+good morrow\n") >= 2


def test_the_commands_on_a_pipe(server, tmp_path: Path):
    saved = tmp_path / "saved.json"
    lines = f"/help\nhi\n/undo\n/undo\nhi\n/retry\n/set max_tokens 2\nhi\n/set top 1\n/info\n//x\n/save {saved}\n"
    done = piped(server.target, lines, "--max-tokens=1")
    assert "/set [NAME [VALUE]]" in done.stdout and "toy (8.6 B parameters, bfloat16) on 2 x cpu" in done.stdout
    assert re.findall(r"^\d[\d ]* $", done.stdout, re.MULTILINE)[:4] == ["11 ", "11 ", "11 ", "11 12 "]
    assert "there is no message to forget" in done.stderr and "'top' is not a parameter" in done.stderr
    contents = [message["content"] for message in json.loads(saved.read_text()) if message["role"] == "user"]
    assert contents == ["hi", "hi", "/x"]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("one line", None),
        ("a\n\nb", 3),
        ("\n\na\n\nb", 5),
        ("```\ncode\n\nmore\n", None),
        ("```py\ncode\n\nmore\n```\n\nb", 22),
        ("a\n", None),
    ],
)
def test_a_block_of_markdown_ends_at_a_blank_line_outside_of_code(text: str, end: int | None):
    assert end_of_block(text) == end


def test_markdown_is_shown_whole_and_in_order_whatever_its_parts():
    text = "# Title\n\nSome *words*.\n\n```\ncode\n\nmore code\n```\n\n1. one\n2. two\n"
    for size in (1, 3, 7, 100):
        file = io.StringIO()
        shown = StreamedAnswer(Console(file=file, width=60, force_terminal=False))
        for start in range(0, len(text), size):
            shown.add(ContentPart(text[start : start + size]))
        shown.close()
        said = file.getvalue()
        found = [said.index(part) for part in ("Title", "Some words.", "code", "more code", "1 one", "2 two")]
        assert found == sorted(found) and "*" not in said and "```" not in said, said


def test_thinking_is_told_from_the_answer():
    parts = (
        ReasoningPart("hm *a*\n\nhm "), ReasoningPart("b"), ContentPart("The *answer*."), CallPart(0, "f"),
        ArgumentsPart(0, '{"x": '), ArgumentsPart(0, "1}"), CallPart(1, "g"), ArgumentsPart(1, "{}"),
    )  # fmt: skip
    file = io.StringIO()
    shown = StreamedAnswer(Console(file=file, width=60, force_terminal=True, color_system="standard"))
    for part in parts:
        shown.add(part)
    shown.close()
    said = re.sub(r"\x1b\[\?25.|\x1b\[1A|\x1b\[2K|\r", "", file.getvalue())
    assert "\x1b[2;3mhm *a*" in said and "\x1b[2;3mhm b" in said and "The answer." not in said.split("hm b")[0]
    assert said.index("hm b") < said.index("answer") < said.index('-> f({"x": 1})') < said.index("-> g({})")
    calls = ReadableCalls()
    assert "".join(map(calls.text, parts)) + calls.end() == 'The *answer*.\n-> f({"x": 1})\n-> g({})'


def test_reasoning_and_tool_calls_on_a_pipe(tmp_path: Path):
    """A result of a tool goes back to the model with its call, and the reasoning with it."""
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": {"name": "f"}}]))
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    with dictating(tokenizer(tmp_path, "hybrid")) as server:
        assert isinstance(server.engine, Dictating)
        server.engine.said = f"<think>\nhm\n</think>\n\nSo.\n{call}"
        lines = f"/result early\n/tools {tmp_path / 'tools.json'}\n/think on\nhi\n/result 4\n/undo\n/think\nhi\n"
        done = piped(server.target, f"{lines}/save {tmp_path / 'saved.json'}\n")
    assert done.stdout.count('So.\n-> f({"x": 1})\n/result TEXT gives the model the result of f.\n') == 3, done.stdout
    assert done.stderr == "meshserve: there is no tool call without a result.\n"
    [question, answer] = json.loads((tmp_path / "saved.json").read_text())
    assert question["content"] == "hi" and answer["content"] == "So." and answer["reasoning_content"] == "hm"
    assert answer["tool_calls"] == [{"name": "f", "arguments": '{"x": 1}'}]


def test_a_pipe_ends_at_a_signal_between_answers(server):
    process = subprocess.Popen([*CHAT, f"--target={server.target}", "--max-tokens=1"], stdin=-1, stdout=-1, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("hi\n")
    process.stdin.flush()
    assert process.stdout.readline() == "11 \n"
    said = " [stopped]\n"
    while said:  # a signal before the answer's end only stops the answer
        assert said == " [stopped]\n"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write("\n")  # wakes the chat if it started to wait for a line just when the signal came
            process.stdin.flush()
        said = process.stdout.readline()
    assert process.wait(WAIT_SECONDS) == 130


def test_a_line_that_is_no_utf8_ends_no_conversation(server):
    command = [*CHAT, f"--target={server.target}", "--max-tokens=1"]
    done = subprocess.run(command, input=b"a\xff\nhi\n", capture_output=True, timeout=WAIT_SECONDS)
    assert (done.stdout, done.stderr, done.returncode) == (b"11 \n11 \n", b"", 0)


def test_a_reader_who_has_had_enough_ends_it_without_a_trace(server):
    pipe = subprocess.PIPE
    command = [*CHAT, f"--target={server.target}", "--max-tokens=1"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write("hi\n")
        process.stdin.flush()
        assert process.stdout.readline() == "11 \n"
        process.stdout.close()
        process.stdin.write("hi\n")
        process.stdin.flush()
        assert process.wait(WAIT_SECONDS) == 141 and process.stderr.read() == ""
