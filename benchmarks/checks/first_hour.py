"""Pastes README and tutorial into a new environment, block by block as they stand, and prints how long each took.

    make first-hour

Copies the repository's files to an empty folder with an empty home, so that pip, JAX and meshserve have no caches, and
runs the commands there in the order of the page: servers in a separate terminal, the chat and the dashboard in
pseudoterminals with simulated typing. Fails if a block fails, or if text takes longer to appear than it should.
Commands that cannot run everywhere are named, with the reason.
"""

import argparse
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshserve.benchmarks.lib.terminal import Terminal, terminal

PAGES = ("README.md", "docs/tutorial.md")
TEXT_SECONDS, OPENAI_SECONDS = 90.0, 120.0  # from `pip install` to streamed text, and to an answer of OpenAI's API
_LIMIT_SECONDS = 600.0  # per command
_LEFT_OUT = {
    r"make test\b": "takes 15 minutes; CI runs it",
    r"\[(cuda|tpu)": "needs an accelerator",
    r"serve Qwen/": "needs an accelerator, and the network for the weights",
    r"^# serve.toml": "a file",
}
_FENCED = re.compile(r'^```(?P<language>\w*)(?: title="[^"]*")?\n(?P<code>.*?)^```$', re.M | re.S)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)(?:    .*\n|\n(?=    ))+")
_COMMENT = re.compile(r"(?<=\S) +# .*")
_OPENAI = re.compile(r"/v1/(chat/)?completions")


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str  # "bash" or "python"
    code: str

    def commands(self) -> list[str]:
        """Returns the commands of a block of shell code; lines that end with a backslash go on."""
        return [line for line in re.sub(r"\\\n\s*", " ", self.code).splitlines() if line.strip()]


def blocks(text: str) -> list[Block]:
    """Returns the blocks of a page in their order. Indented ones are shell code."""
    found = [(each.start(), Block(each["language"] or "bash", each["code"])) for each in _FENCED.finditer(text)]
    blank = _FENCED.sub(lambda each: "\n" * each[0].count("\n"), text)
    assert blank.count("\n") == text.count("\n")
    lines = {sum(1 for _ in re.finditer("\n", text[:start])): block for start, block in found}
    for each in _INDENTED.finditer(blank):
        code = re.sub("^    ", "", each[0], flags=re.M)
        lines[blank.count("\n", 0, each.start())] = Block("bash", code)
    return [block for _, block in sorted(lines.items())]


@dataclass
class Visitor:
    """A user that pastes the commands of a page.

    Attributes:
      folder: The copy of the repository.
      environment: Variables of each command.
      installed: When `pip install` was begun.
      text_seconds, openai_seconds: Until the first streamed text, and until an answer of OpenAI's API; None so far.
      failures: Commands that failed.
    """

    folder: Path
    environment: Mapping[str, str]
    installed: float | None = None
    text_seconds: float | None = None
    openai_seconds: float | None = None
    failures: list[str] = field(default_factory=list)
    server: subprocess.Popen[str] | None = None

    def paste(self, block: Block) -> None:
        """Runs a block, command by command, and prints how long each took."""
        for command in [block.code] if block.language == "python" else block.commands():
            title = command.strip().splitlines()[0][:96]
            if (reason := self._why_left_out(block, command)) is not None:
                print(f"{'left out':>21}  {title}  ({reason})", flush=True)
                continue
            if "pip install" in command and self.installed is None:
                self.installed = time.monotonic()
            began, used = time.monotonic(), self._processor_seconds()
            try:
                is_done = self._run(command, block.language)
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                print(error, flush=True)
                is_done = False
            seconds, used = time.monotonic() - began, self._processor_seconds() - used
            print(f"{seconds:9.1f} s {used:7.1f} s  {title}{'' if is_done else '  FAILED'}", flush=True)
            if not is_done:
                self.failures.append(title)

    def _processor_seconds(self) -> float:
        """Returns the processor time of all commands so far, and of the server if one runs."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = ended.ru_utime + ended.ru_stime
        if self.server is not None and self.server.poll() is None:
            times = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
            seconds += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        return seconds

    def _why_left_out(self, block: Block, command: str) -> str | None:
        for pattern, reason in _LEFT_OUT.items():
            if re.search(pattern, command if pattern.startswith("make") else _COMMENT.sub("", block.code), re.M):
                return reason
        if command.startswith("buf ") and shutil.which("buf", path=self.environment["PATH"]) is None:
            return "buf is not installed"
        return None

    def _run(self, command: str, language: str) -> bool:
        if language == "bash" and re.match(r"meshserve (serve|chat|top)\b(?!.*--screens)", command):
            name = command.split()[1]
            return {"serve": self._serve, "chat": self._chat, "top": self._top}[name](command)
        if self.server is not None and self.server.poll() is None and re.search(r"LLM|meshserve generate", command):
            self.stop()  # later blocks need no server, but its memory and processors
        is_openai = _OPENAI.search(command) is not None
        process = self._start([sys.executable, "-c", command] if language == "python" else ["bash", "-ec", command])
        assert process.stdout is not None
        with process:
            first = process.stdout.read(1)
            if first and language == "python":
                self._note("text")
            rest = process.stdout.read()
        if is_openai and process.returncode == 0 and '"content"' in rest:
            self._note("openai")
        if process.returncode:
            print(first + rest, flush=True)
        return process.returncode == 0 and (bool(first) or language == "bash")

    def _note(self, what: str) -> None:
        """Notes the time since `pip install`, the first time."""
        if self.installed is not None and getattr(self, f"{what}_seconds") is None:
            setattr(self, f"{what}_seconds", time.monotonic() - self.installed)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        pipe, everything = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            self._activated(command), cwd=self.folder, env=self.environment, stdout=pipe, stderr=everything, text=True
        )

    def _activated(self, command: list[str]) -> list[str]:
        """Returns a command for a shell in which the environment is activated, if there is one."""
        if command[0] == sys.executable:
            command = ["python", *command[1:]]
        activate = 'if [ -e .venv/bin/activate ]; then . .venv/bin/activate; fi; exec "$@"'
        return ["bash", "-c", activate, "bash", *command]

    def _serve(self, command: str) -> bool:
        """Starts a server, and waits until it says that it can be used."""
        self.stop()
        self.server = self._start(["bash", "-ec", f"exec {command}"])
        wanted = "answers OpenAI's API" if "--openai-port" in command else "is ready"
        assert self.server.stdout is not None
        said = []
        for line in self.server.stdout:
            said.append(line)
            if wanted in line:
                _relay(self.server)
                return True
        print("".join(said), flush=True)
        return False

    def _terminal(self, command: str) -> contextlib.AbstractContextManager[Terminal]:
        return terminal(
            self._activated(["bash", "-ec", command]), folder=self.folder, environment=self.environment
        )  # fmt: skip

    def _chat(self, command: str) -> bool:
        with self._terminal(command) as chat:
            chat.wait_for(r">\s", _LIMIT_SECONDS)
            chat.type("Who art thou?\r")
            chat.wait_for(r"Who art thou\?", _LIMIT_SECONDS)
            chat.wait_for(r"\w", _LIMIT_SECONDS)
            self._note("text")
            chat.wait_for(r"\n>\s", _LIMIT_SECONDS)
            chat.type("/quit\r")
            return chat.read_until_end(_LIMIT_SECONDS) == 0

    def _top(self, command: str) -> bool:
        with self._terminal(command) as top:
            top.wait_for("KV cache", _LIMIT_SECONDS)
            top.type("\x03")
            return top.read_until_end(_LIMIT_SECONDS) in (0, 130)

    def stop(self) -> None:
        """Stops the server with Ctrl-C."""
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGINT)
            if self.server.wait():
                self.failures.append("stopping the server")
        self.server = None


def _relay(server: subprocess.Popen[str]) -> None:
    """Reads what a server says from now on, so that it never waits for a reader."""
    assert server.stdout is not None
    threading.Thread(target=server.stdout.read, daemon=True).start()


@contextlib.contextmanager
def fresh_machine(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields a copy of the repository's files, and an environment with an empty home."""
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder, home = Path(name) / "meshserve", Path(name) / "home"
        home.mkdir()
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=root, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for path in filter(None, listed.split("\0")):
            if os.path.lexists(root / path):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / path, folder / path, follow_symlinks=False)
        kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "LANG", "LC_", "SSL_"))}
        config = os.environ.get("XDG_CONFIG_HOME", str(Path.home() / ".config"))  # has pip's package index
        python = Path(sys.base_prefix) / "bin"
        own = {
            "HOME": str(home),
            "PATH": f"{python}:{os.environ['PATH']}:{_tools(Path(name) / 'tools')}",
            "XDG_CONFIG_HOME": config,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "COLUMNS": "120",
        }
        yield folder, kept | own


def _tools(folder: Path) -> Path:
    """Returns a folder with the programs of pages that meshserve does not install, as far as they are there."""
    folder.mkdir()
    for name in ("buf",):
        if found := shutil.which(name, path=str(Path(sys.executable).parent)):
            (folder / name).symlink_to(found)
    return folder


def visit(root: Path, page: str) -> bool:
    """Pastes one page, and returns whether all went well and fast enough."""
    print(f"{page}, load average {os.getloadavg()[0]:.1f} at the start; wall time, processor time:", flush=True)
    found = blocks((root / page).read_text())
    made = [block for block in found if block.code.startswith("make ")]
    failures: list[str] = []
    with fresh_machine(root) as (folder, environment):
        visitor = Visitor(folder, environment, failures=failures)
        try:
            for block in found:
                if block not in made:
                    visitor.paste(block)
        finally:
            visitor.stop()
    for block in made:  # these install into the same folder, and would find what is installed there
        with fresh_machine(root) as (folder, environment):
            Visitor(folder, environment, failures=failures).paste(block)
    is_fast = True
    for what, seconds, limit in (
        ("streamed text", visitor.text_seconds, TEXT_SECONDS),
        ("an answer of OpenAI's API", visitor.openai_seconds, OPENAI_SECONDS),
    ):
        shown = "never" if seconds is None else f"after {seconds:.1f} s"
        is_fast &= seconds is not None and seconds <= limit
        print(f"from `pip install` to {what}: {shown}; wanted within {limit:g} s")
    print(f"load average {os.getloadavg()[0]:.1f} at the end; failed: {', '.join(failures) or 'nothing'}\n")
    return is_fast and not failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", default=PAGES, help="pages to paste (%(default)s)")
    root = Path(__file__).resolve().parents[2]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would Ctrl-C
    return 0 if all([visit(root, page) for page in parser.parse_args().pages]) else 1


if __name__ == "__main__":
    sys.exit(main())
