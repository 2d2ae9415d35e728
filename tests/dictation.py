"""Serves the second model's tokenizer over a fake engine that writes what a test dictates, token by token.

The templates have the traits of the published ones: Qwen3's hybrid models, Thinking-2507, Instruct-2507 and Coder.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.request import FinishReason, Output
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.text.grammar import Grammars
from meshserve.runtime.text.tokenizer import TextStream, Tokenizer, text_stream

from .runtime.loopback import INFO, LISTEN, FakeEngine, Job, Running, serving
from .second_model import CHAT_TEMPLATE, VOCAB_SIZE, save_second_tokenizer

_GENERATION = "{%- if add_generation_prompt %}"
_XML = (
    "Write each call as\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n"
    "</tool_call>"
)
_JSON = 'Write each call as\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>'
_JSON_HISTORY = """{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}"""
_XML_HISTORY = """{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments | items %}
                {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""
_THOUGHTS = """{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}"""
_PARTS = """{%- set parts = message.content.split('</think>') %}
        {%- set thoughts = message.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') %}
"""


def _replaced(template: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in template, old
        template = template.replace(old, new)
    return template


_BODY = CHAT_TEMPLATE[: CHAT_TEMPLATE.index(_GENERATION)]
_WITHOUT_THOUGHTS = _replaced(
    _BODY,
    (_THOUGHTS, ""),
    (_PARTS, ""),
    ("{{- parts[-1].lstrip('\\n') if parts | length > 1 else message.content }}", "{{- message.content }}"),
)


def _ending(text: str) -> str:
    return _GENERATION + "{{- '<|im_start|>assistant\\n" + text + "' }}{% endif %}\n"


TEMPLATES = {
    "hybrid": CHAT_TEMPLATE,
    "thinking": _BODY + _ending("<think>\\n"),
    "instruct": _WITHOUT_THOUGHTS + _ending(""),
    "coder": _replaced(_WITHOUT_THOUGHTS, (_JSON, _XML), (_JSON_HISTORY, _XML_HISTORY)) + _ending(""),
}


@functools.cache
def tokenizer(directory: Path, template: str) -> Tokenizer:
    """Returns the second model's tokenizer with one of the templates. `directory` is an empty one for its files."""
    found = Tokenizer(save_second_tokenizer(directory))
    (directory / "chat_template.jinja").write_text(TEMPLATES[template])
    return found if template == "hybrid" else Tokenizer(directory)


@dataclasses.dataclass
class Dictating(FakeEngine):
    """Writes `said` for every request, up to max_tokens, and ends behind it or at a stop string."""

    said: str = ""
    tokens_per_step: int = 1
    is_end_apart: bool = False  # the end comes behind the last token, as that of a constraint may
    tokenizer: Tokenizer | None = None
    _texts: dict[str, TextStream] = dataclasses.field(default_factory=dict)

    def advance(self, job: Job) -> Output:
        assert self.tokenizer is not None
        resumed = job.params.num_resumed_tokens
        tokens = self.tokenizer.encode(self.said)
        if not job.num_output:
            self._texts[job.request_id] = text_stream(self.tokenizer, job.params)
            assert job.prompt[len(job.prompt) - resumed :] == tokens[:resumed], "other tokens than were sent"
            self._texts[job.request_id].push(tokens[:resumed])
        limit = job.params.max_tokens or len(tokens)
        done = resumed + job.num_output
        new = tokens[done : min(done + self.tokens_per_step, resumed + limit)]
        job.num_output += len(new)
        text, has_stopped = self._texts[job.request_id].push(new)
        is_cut = job.num_output == limit and done + len(new) < len(tokens)
        if not (has_stopped or is_cut or done + len(new) == len(tokens)):
            return Output(request_id=job.request_id, token_ids=new, text=text)
        if self.is_end_apart and new:
            return Output(request_id=job.request_id, token_ids=new, text=text)
        del self.jobs[job.request_id]
        text += self._texts.pop(job.request_id).flush()
        return self.last(job, FinishReason.LENGTH if is_cut else FinishReason.STOP, token_ids=new, text=text)


@contextlib.contextmanager
def dictating(model: Tokenizer, listen: Listen = LISTEN, *, has_grammars: bool = False) -> Iterator[Running]:
    """Runs a server until the block ends. Its engine is a `Dictating`."""
    info: ModelInfo = dataclasses.replace(
        INFO, vocab_size=VOCAB_SIZE, max_context_tokens=4096, eos_token_ids=tuple(model.eos_token_ids)
    )
    room = OutputQueues(max_undelivered_tokens=2**20)
    engine = Dictating(room.deliver, tokenizer=model, step_seconds=0.0002)
    grammars = Grammars(model.directory / "tokenizer.json", VOCAB_SIZE, info.eos_token_ids) if has_grammars else None
    edge = Edge(room)
    edge.attach(Backend(engine, model, info, grammars))  # type: ignore[arg-type]
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        with serving(edge, room, listen) as server:
            yield server
    finally:
        engine.is_running = False
        thread.join()
