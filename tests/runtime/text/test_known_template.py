"""Known templates are rendered without transformers, with the same text and for the same reasons to refuse."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import pytest

from meshserve.runtime.text.known_template import KnownTemplate
from meshserve.runtime.text.template_renderer import Renderer, template_files
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.dictation import TEMPLATES
from tests.second_model import save_second_tokenizer
from tests.waiting import WAIT_SECONDS

DEMO = (DEMO_DIRECTORY / "chat_template.jinja").read_text()
ALL = {"demo": DEMO, **TEMPLATES}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"é": "<a & 'b'>", "n": [1, 2.5, None]}}}
TOOL = {"type": "function", "function": {"name": "find", "description": "<b>", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "Hello?"}
LONG = [
    {"role": "system", "content": " be brief \n"},
    ASKED,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.", "name": None},
    {"role": "user", "content": "\ud7ff 你\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "look it up"},
    {"role": "tool", "content": "42"},
    {"role": "tool", "content": "43"},
]
UNFINISHED: dict[str, Any] = {"add_generation_prompt": False, "continue_last_message": True}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "question": ([ASKED], {}),
    "without a prompt for an answer": ([ASKED], {"add_generation_prompt": False}),
    "without thinking": ([ASKED], {"enable_thinking": False}),
    "tools": ([ASKED], {"tools": [TOOL, TOOL]}),
    "history": (LONG, {"tools": [TOOL]}),
    "reasoning": ([ASKED, {"role": "assistant", "content": "a", "thinking": "b"}], {"add_generation_prompt": False}),
    "continued": ([ASKED, {"role": "assistant", "content": "I am"}], UNFINISHED),
    "continued after a space": ([ASKED, {"role": "assistant", "content": "I am  "}], UNFINISHED),
    "continued question": ([{"role": "user", "content": "I am\n"}], UNFINISHED),
}


@pytest.fixture(scope="module", params=ALL)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[KnownTemplate, Renderer]:
    """Returns a template in both forms."""
    directory = tmp_path_factory.mktemp(request.param)
    save_second_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(ALL[request.param])
    with template_files(directory) as folder:
        return KnownTemplate(ALL[request.param]), Renderer(folder)


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_that_of_transformers(both: tuple[KnownTemplate, Renderer], case: str):
    known, transformers = both
    messages, options = CASES[case]
    before = str(messages)
    text = known.render(messages, **options)
    assert text and text == transformers.render(messages, **options)
    assert str(messages) == before, "the caller's messages stay as they are"


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ([ASKED], {"continue_last_message": True}),
        ([{"role": "user"}], UNFINISHED),
        ([{"role": "user", "content": [{"type": "image"}]}], UNFINISHED),
    ],
)
def test_what_transformers_refuses_is_refused(
    both: tuple[KnownTemplate, Renderer], messages: list[dict[str, Any]], options: dict[str, Any]
):
    for each in both:
        with pytest.raises(ValueError, match=r"."):
            each.render(messages, **options)


def test_blocks_of_text_are_continued_in_the_last():
    template = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]
    assert KnownTemplate(template).render([{"role": "user", "content": blocks}], **UNFINISHED) == "[a][b "
    dropped = KnownTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(ValueError, match="drops parts of the last message"):
        dropped.render([ASKED], **UNFINISHED)
    with pytest.raises(jinja2.TemplateError, match="^no$"):
        KnownTemplate("{{ raise_exception('no') }}").render([ASKED])


def test_known_templates_need_no_names_of_tokens():
    """transformers would define those of the tokenizer's special tokens."""
    variables = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(DEMO))
    assert variables <= {"messages", "tools", "add_generation_prompt", "enable_thinking"}


def test_a_known_template_does_not_import_transformers(tmp_path: Path):
    code = (
        "import sys\n"
        "from meshserve.runtime.text.tokenizer import Tokenizer\n"
        "from meshserve.runtime.weights.locate import DEMO_DIRECTORY\n"
        f"print(Tokenizer(DEMO_DIRECTORY).render_chat([{ASKED}]).count('Hello'), 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.stdout == "1 False\n", done.stderr
