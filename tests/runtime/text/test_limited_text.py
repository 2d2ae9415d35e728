"""Tests that templates and tokenizers which do not end are ended, by an error that names them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.errors import InvalidRequestError, UnsupportedModelError
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.checks import check_before_listening
from meshserve.runtime.text import limited_text, tokenizer
from meshserve.runtime.text.chat_template import ChatTemplate
from meshserve.runtime.text.known_text_files import is_known_template, is_known_tokenizer
from meshserve.runtime.text.tokenizer import Tokenizer, read_tokenizer
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.checkpoints import save_byte_tokenizer
from tests.second_model import save_second_tokenizer

ASKED = [{"role": "user", "content": "Hello?"}]
SIMPLE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOO_LARGE = "needed more than 512 MiB of memory|made [0-9]+ characters"
TOO_LONG = "took more than 1 s, and was stopped"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Templates that take all memory or do not end, wherever the work is done.
ENDLESS = {
    "multiplied": ("{{ ('a' * 1000) * 10000000 }}", TOO_LARGE),  # a constant, computed when the template is compiled
    "multiplied later": ("{{ (messages[0].role * 1000) * 10000000 }}", TOO_LARGE),
    "power": ("{{ 10 ** (10 ** 10) }}", f"{TOO_LONG}|{TOO_LARGE}"),
    "padded": ("{{ messages[0].role.ljust(10 ** 10) }}", TOO_LARGE),
    "formatted": ("{{ '%010000000000d' | format(1) }}", TOO_LARGE),
    "bytes": ("{{ (1).to_bytes(10 ** 10, 'big') }}", TOO_LARGE),
    "loops": (LOOPS, TOO_LONG),
    "recursion": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TOO_LONG
    ),
    "shared lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        f"{TOO_LONG}|{TOO_LARGE}",
    ),
    "long": ("{{ ('a' * 9000000) }}", "made 9000000 characters; allowed are 8388608"),
}  # fmt: skip


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_text, "SECONDS", 1.0)


def template(directory: Path, text: str) -> ChatTemplate:
    save_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(text)
    return ChatTemplate(directory)


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize("name", ENDLESS)
def test_templates_without_end_are_ended(name: str, tmp_path: Path) -> None:
    text, reason = ENDLESS[name]
    with pytest.raises(UnsupportedModelError, match=rf"the chat template of \S+ ({reason})") as caught:
        template(tmp_path, text).render(ASKED)
    assert "use the file that the model was published with" in str(caught.value)


@pytest.mark.usefixtures("one_second")
def test_a_template_that_was_ended_works_for_other_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_text, "_MAX_WORKERS", 1)
    picky = template(tmp_path, "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}" + SIMPLE)
    assert picky.render(ASKED) == "user: Hello?\n"
    for _ in range(2):  # more than there are workers
        with pytest.raises(UnsupportedModelError, match=TOO_LONG):
            picky.render([{"role": "user", "content": "loop"}])
    assert picky.render(ASKED) == "user: Hello?\n"


@pytest.mark.usefixtures("one_second")
def test_a_server_does_not_open_a_port_with_a_template_without_end(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, model)
    for text in (LOOPS, ENDLESS["multiplied"][0]):
        (model / "chat_template.jinja").write_text(text)
        with pytest.raises(UnsupportedModelError, match=rf"the chat template of {model} (took more|needed more)"):
            check_before_listening(ServeConfig(model=str(model), port=0, cache_dir=""))
    ChatTemplate(DEMO_DIRECTORY).check()


def test_limited_templates_render_as_known_ones(tmp_path: Path) -> None:
    text = (DEMO_DIRECTORY / "chat_template.jinja").read_text()
    known, limited = Tokenizer(DEMO_DIRECTORY), template(tmp_path, text + "{# a comment #}")
    for messages, options in (
        (ASKED, {}),
        ([{"role": "system", "content": "é\ud7ff 你"}, *ASKED], {"add_generation_prompt": False}),
        ([*ASKED, {"role": "assistant", "content": "I am"}],
         {"continue_last_message": True, "add_generation_prompt": False}),
    ):  # fmt: skip
        assert limited.render(messages, **options) == known.render_chat(messages, **options)
    with pytest.raises(InvalidRequestError, match="messages: this template takes only what JSON can express"):
        limited.render(ASKED, tools=[print])


def test_which_templates_are_known() -> None:
    text = (DEMO_DIRECTORY / "chat_template.jinja").read_text()
    assert is_known_template(text) and is_known_template(text.strip() + "\n")
    assert not is_known_template(text + "a") and not is_known_template("")


# --- tokenizers


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


BACKTRACKING = split("(a|aa)+$|(a+)+b")
EXPANDING = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10_000_000}
# Changes of a tokenizer.json, and why it is ended at the latest when it encodes 40 letters.
ENDLESS_TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "backtracking": ({"pre_tokenizer": BACKTRACKING}, f"{TOO_LONG}|cannot encode this text: .*"),
    "one of several": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        BACKTRACKING, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}},
        f"{TOO_LONG}|cannot encode this text: .*"),
    "expanding": ({"normalizer": EXPANDING}, f"{TOO_LARGE}|{TOO_LONG}|made [0-9]+ tokens"),
}  # fmt: skip


def changed(directory: Path, change: dict[str, Any]) -> Path:
    save_byte_tokenizer(directory)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return path


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize("name", ENDLESS_TOKENIZERS)
def test_tokenizers_without_end_are_ended(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_PROBE", "")  # which would end the start of these, too
    change, reason = ENDLESS_TOKENIZERS[name]
    path = changed(tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=rf"the tokenizer {path} ({reason})"):
        Tokenizer(tmp_path).encode("a" * 40 + "c")


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize("regex", ["((a{1000}){1000}){1000}", "( +)+x|a"])
def test_a_tokenizer_that_is_slow_in_long_runs_is_refused_at_the_start(regex: str, tmp_path: Path) -> None:
    """These compile at once and are fast for short texts, so that only a long one shows what they cost."""
    path = changed(tmp_path, {"pre_tokenizer": split(regex)})
    with pytest.raises(UnsupportedModelError, match=f"the tokenizer {path}, tried with runs of 100000 equal"):
        Tokenizer(tmp_path)


def test_rules_that_are_not_known_apply(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    plain = Tokenizer(tmp_path)
    changed(tmp_path, {"normalizer": {"type": "Replace", "pattern": {"String": "x"}, "content": "yz"}})
    replacing = Tokenizer(tmp_path)
    assert replacing.encode("axb") == plain.encode("ayzb") and replacing.encode("") == ()
    assert replacing.decode(replacing.encode("axb")) == "ayzb" and replacing.vocab_size == plain.vocab_size
    with pytest.raises(InvalidRequestError, match="half a surrogate pair"):
        replacing.encode("\ud800")


def test_limited_tokenizers_encode_as_others_do(tmp_path: Path) -> None:
    save_second_tokenizer(tmp_path)
    import tokenizers

    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), Tokenizer(tmp_path)
    for text in ("", "Grüße, 你好! <think> 123\n\n  x", "e\u0301" * 50, "<|im_start|>user\n"):
        for is_completed in (False, True):
            assert (
                list(ours.encode(text, is_completed=is_completed))
                == theirs.encode(text, add_special_tokens=is_completed).ids
            )


def edit(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def edited(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return edited


@pytest.mark.parametrize(
    "change",
    [
        edit("normalizer", to=EXPANDING), edit("normalizer", to={"type": "Sequence", "normalizers": [EXPANDING]}),
        edit("normalizer", to=[1]), edit("pre_tokenizer", to=BACKTRACKING), edit("pre_tokenizer", to="ByteLevel"),
        edit("pre_tokenizer", to={"type": "Sequence", "pretokenizers": [BACKTRACKING]}),
        edit("pre_tokenizer", to={"type": "Sequence", "pretokenizers": 7}), edit("model", "type", to="Unigram"),
        edit("post_processor", to={"type": "TemplateProcessing", "single": ["a"] * 100_000}),
        edit("post_processor", to="a"),
    ],
)  # fmt: skip
def test_which_tokenizers_are_known(change: Callable[[dict[str, Any]], None]) -> None:
    content, _ = read_tokenizer(DEMO_DIRECTORY / "tokenizer.json")
    assert is_known_tokenizer(content)
    change(content)
    assert not is_known_tokenizer(content)
