import codecs
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from meshserve.protos import inference_pb2 as pb
from meshserve.runtime.api.errors import InvalidRequestError, UnavailableFeatureError, UnsupportedModelError
from meshserve.runtime.text.chat_messages import template_arguments
from meshserve.runtime.text.tokenizer import TextStream, Tokenizer, open_tokenizer

SNIPPETS = [
    "hello", " world", "  leading", "\n\n", "def f(x):\n    return x\n", "你好世界", "世", "🙂", "👩‍👩‍👧‍👦",
    "👍🏽", "🇩🇪", "é", "e\u0301", "\u200d", "\ufffd", "a", "b", "ab", "abab",
    "END", "<|im_end|>", "<think>", "</think>", "𝄞", "\x00", "Ω≈ç√",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if no_think %}<think></think>{% endif %}{% endif %}"
)


def byte_level_bpe() -> tokenizers.Tokenizer:
    """A small tokenizer of Qwen3's kind, which merges across the bytes of characters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SNIPPETS * 3, trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_level_bpe()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE, "tokenizer_class": "Qwen2Tokenizer"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 11, "model_type": "qwen3"}))
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def cut_at_stop(text: str, stop: tuple[str, ...], include_stop: bool = False) -> tuple[str, bool]:
    """The oracle: the shortest beginning of the text that ends in a stop string, less the longest one it ends in."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            return text[: end if include_stop else end - max(map(len, matches))], True
    return text, False


def cut_at_late_stop(
    tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...], num_free_tokens: int
) -> tuple[str, bool]:
    """The oracle, where the first tokens are free: stop strings are looked for behind the characters they complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    free = decoder.decode(b"".join(map(tokenizer.token_bytes, token_ids[:num_free_tokens])))
    rest, is_stopped = cut_at_stop(tokenizer.decode(token_ids)[len(free) :], stop)
    return free + rest, is_stopped


def chunked(items: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(items[start : start + size])
        start += size
    return [*chunks, items[start:]]


def stream(
    tokenizer: Tokenizer, chunks: list[list[int]], stop: tuple[str, ...], **options: Any
) -> tuple[list[str], bool]:
    text_stream, pieces = TextStream(tokenizer, stop, **options), []
    for chunk in chunks:
        other, text_stream = text_stream, text_stream.fork()
        other.push(reversed(chunk))  # which is nothing to the one that goes on
        text, is_stopped = text_stream.push(chunk)
        pieces.append(text)
        if is_stopped:
            assert text_stream.flush() == ""
            return pieces, True
    pieces.append(text_stream.flush())
    assert text_stream.flush() == ""
    return pieces, False


texts = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=4), max_size=12).map("".join)
sizes = st.lists(st.integers(0, 5), max_size=40)


@settings(max_examples=400)
@given(data=st.data(), text=texts, sizes=sizes, include_stop=st.booleans())
def test_stream_of_text_equals_the_whole_cut_at_the_first_stop(data, tokenizer, text, sizes, include_stop):
    token_ids = list(tokenizer.encode(text))
    whole = tokenizer.decode(token_ids)
    found = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 5)).map(
        lambda at: whole[at[0] : at[0] + at[1]] or "x"
    )
    stop = tuple(data.draw(st.lists(found | st.sampled_from(["ab", "aba", "bab", "b", "\ufffd", "世界"]), max_size=4)))
    pieces, is_stopped = stream(tokenizer, chunked(token_ids, sizes), stop, include_stop=include_stop)
    assert ("".join(pieces), is_stopped) == cut_at_stop(whole, stop, include_stop)


@settings(max_examples=400)
@given(data=st.data(), sizes=sizes)
def test_stream_of_any_tokens_equals_the_whole(data, tokenizer, sizes):
    # Any ids at all: broken UTF-8, special tokens, and ids outside the vocabulary, as a model may produce them.
    ids = st.integers(0, tokenizer.vocab_size + 5)
    token_ids = data.draw(st.lists(ids, max_size=40))
    stop = tuple(data.draw(st.lists(st.text("ab \ufffd世", min_size=1, max_size=3), max_size=3)))
    whole, has_stop = cut_at_stop(tokenizer.decode(token_ids), stop)
    pieces, _ = stream(tokenizer, chunked(token_ids, sizes), stop)
    assert "".join(pieces) == whole
    if not has_stop and "\ufffd" not in whole:
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=200)
@given(data=st.data(), text=texts, sizes=sizes, num_free_tokens=st.integers(0, 12))
def test_the_first_tokens_may_be_free_of_stops(data, tokenizer, text, sizes, num_free_tokens):
    token_ids = list(tokenizer.encode(text))
    stop = tuple(data.draw(st.lists(st.sampled_from(["ab", "aba", "b", "世", "\n", "hello"]), max_size=4)))
    pieces, is_stopped = stream(tokenizer, chunked(token_ids, sizes), stop, num_free_tokens=num_free_tokens)
    assert ("".join(pieces), is_stopped) == cut_at_late_stop(tokenizer, token_ids, stop, num_free_tokens)


@pytest.mark.parametrize("text", ["你好", "👩‍👩‍👧‍👦 family", "naïve é", "  two spaces"])
def test_every_piece_is_whole_characters(tokenizer, text):
    pieces, _ = stream(tokenizer, [[token_id] for token_id in tokenizer.encode(text)], ())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def bytes_as_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    table = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [table[bytes([byte])] for byte in data]


def test_a_character_waits_for_its_last_byte(tokenizer):
    text_stream = TextStream(tokenizer)
    got = [text_stream.push([token_id])[0] for token_id in bytes_as_tokens(tokenizer, "é世🙂".encode())]
    assert got == ["", "é", "", "", "世", "", "", "", "🙂"]


def test_an_unfinished_character_comes_out_at_the_end(tokenizer):
    text_stream = TextStream(tokenizer)
    assert text_stream.push(bytes_as_tokens(tokenizer, b"ok \xf0\x9f\x99")) == ("ok ", False)
    assert text_stream.flush() == "\ufffd"


def test_invalid_bytes_do_not_hold_up_the_text(tokenizer):
    text_stream = TextStream(tokenizer)
    assert text_stream.push(bytes_as_tokens(tokenizer, b"a\xff\xf0\x9fb")) == ("a\ufffd\ufffdb", False)


def test_text_is_held_only_while_a_stop_string_may_follow(tokenizer):
    text_stream = TextStream(tokenizer, ("abac", "END"))
    letters = [bytes_as_tokens(tokenizer, letter.encode()) for letter in "ababacx"]
    got = [text_stream.push(letter) for letter in letters]
    # "aba" may become "abac"; the "b" after it decides that the first "ab" cannot.
    assert got == [("", False), ("", False), ("", False), ("ab", False), ("", False), ("", True), ("", True)]
    assert text_stream.flush() == ""


def test_held_text_is_flushed_when_the_stop_string_does_not_come(tokenizer):
    text_stream = TextStream(tokenizer, ("END",))
    assert text_stream.push(tokenizer.encode("the EN")) == ("the ", False)
    assert text_stream.flush() == "EN"


def test_a_push_looks_at_the_new_tokens_only(tokenizer, monkeypatch):
    looked_up: list[int] = []
    original = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i: looked_up.append(i) or original(self, i))
    text_stream = TextStream(tokenizer, ("END",))
    for token_id in range(100):
        text_stream.push([token_id])
    assert looked_up == list(range(100))


def test_special_tokens_have_no_text_and_other_added_tokens_do(tokenizer):
    token_ids = tokenizer.encode("<think>a<|im_end|></think>")
    assert len(token_ids) == 4
    assert tokenizer.decode(token_ids) == "<think>a</think>"
    assert stream(tokenizer, [list(token_ids)], ())[0][0] == "<think>a</think>"


ADDED = ["café", "straße", "Ünïcödé", "naïve\u0301", "<é>", "a b", "漢字", "§§", "Ġhello"]


def test_added_tokens_have_their_texts(tmp_path: Path):
    """Also if all of their characters stand for bytes in other tokens."""
    changed = byte_level_bpe()
    assert changed.add_tokens(ADDED) == len(ADDED)
    changed.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "x".join(ADDED)
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == 2 * len(ADDED) - 1
    assert tokenizer.decode(token_ids) == text
    assert "".join(stream(tokenizer, [[token_id] for token_id in token_ids], ())[0]) == text
    broken = [*bytes_as_tokens(tokenizer, "é".encode()[:1]), tokenizer.token_id("café")]
    assert tokenizer.decode(broken) == "".join(stream(tokenizer, [broken], ())[0]) == "\ufffdcafé"


@given(st.lists(st.integers(0, 350), max_size=60), st.integers(1, 7))
def test_decoding_in_pieces_makes_the_same_text(tokenizer, token_ids, num_tokens: int):
    """Pieces begin neither within a character nor after a special token that stands within one."""
    [whole] = tokenizer._tokenizer.decode_batch([token_ids], skip_special_tokens=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshserve.runtime.text.tokenizer._DECODED_TOKENS", num_tokens)
        assert tokenizer.decode(token_ids) == whole
        assert tokenizer.decode(pb.DetokenizeRequest(token_ids=token_ids).token_ids) == whole


@pytest.mark.parametrize("is_encoded", [True, False])
def test_other_threads_go_on_while_a_long_text_is_turned_over(tokenizer, is_encoded: bool):
    """The engine and the event loop are such threads."""
    text = "hello world 🙂 你好" * 60_000
    work = (tokenizer.encode, text) if is_encoded else (tokenizer.decode, tokenizer.encode(text))
    num_ticks = 0
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(*work)
        while not done.done():
            num_ticks += 1
            time.sleep(0.001)
    assert num_ticks > 20


def test_end_tokens_are_the_models_and_the_tokenizers(directory, tokenizer, tmp_path: Path):
    """Those of generation_config.json, while config.json names others, and that of tokenizer_config.json."""
    end, beside = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")
    generation, of_tokenizer = ("generation_config.json",), ("tokenizer_config.json",)
    assert tokenizer.eos_files == {7: generation, 9: generation, end: of_tokenizer}
    assert tokenizer.eos_token_ids == {7, 9, end}
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert Tokenizer(copy).eos_files == {end: generation + of_tokenizer}
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer(copy).eos_files == {end: generation, beside: of_tokenizer}
    (copy / "tokenizer_config.json").write_text("{}")
    assert Tokenizer(copy).eos_token_ids == {end}
    (copy / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert Tokenizer(copy).eos_files == {end: generation, beside: ("special_tokens_map.json",)}
    (copy / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<unknown>"}))
    assert Tokenizer(copy).eos_token_ids == {end}


def test_special_tokens_have_text_where_they_are_asked_for(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b<|im_start|>c")
    assert "".join(stream(tokenizer, [ids], ())[0]) == "abc"
    assert "".join(stream(tokenizer, [ids], (), skip_special_tokens=False)[0]) == "a<|im_end|>b<|im_start|>c"
    stopped, is_stopped = stream(tokenizer, [ids], ("<|im_start|>",), skip_special_tokens=False)
    assert ("".join(stopped), is_stopped) == ("a<|im_end|>b", True)
    assert not stream(tokenizer, [ids], ("<|im_start|>",))[1]


def test_without_a_tokenizer_text_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    tokenizer = open_tokenizer(tmp_path)
    assert not tokenizer.has_text and not tokenizer.has_chat_template and tokenizer.eos_token_ids == {3}
    text = TextStream(tokenizer)
    assert text.push([1, 2, 3]) == ("", False) and text.flush() == ""
    for refused in (
        lambda: tokenizer.encode("a"),
        lambda: tokenizer.decode([1]),
        lambda: tokenizer.render_chat([]),
        lambda: tokenizer.directory,
    ):
        with pytest.raises(UnavailableFeatureError, match="this server's model directory has no tokenizer.json"):
            refused()


@pytest.mark.parametrize("value", [-1, "</s>", True, [7, None], 1.0])
def test_end_tokens_that_are_none_are_refused(directory: Path, tmp_path: Path, value: object):
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(UnsupportedModelError, match=r"n_config.json: eos_token_id is .*; allowed are token ids"):
        Tokenizer(copy)


def test_chat_template(tokenizer):
    rendered = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], no_think=True).endswith("<think></think>")


# Qwen3's own template has these parts; this one has little else.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tools")
    byte_level_bpe().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return Tokenizer(path)


def rendered(tokenizer: Tokenizer, asked: pb.Conversation) -> str:
    messages, options = template_arguments(asked)
    return tokenizer.render_chat(messages, **options)


USER = pb.ChatMessage(role="user", content="hi")


def test_tools_and_calls_reach_the_template(with_tools):
    call = pb.ToolCall(name="f", arguments='{"x": "é"}')
    assistant = pb.ChatMessage(role="assistant", content="", reasoning_content="hm", tool_calls=[call, call])
    result = pb.ChatMessage(role="tool", content="42")
    asked = pb.Conversation(messages=[USER, assistant, result], tools=['{"name": "f"}', '{"name": "g"}'])
    assert rendered(with_tools, asked) == (
        '<tool>{"name": "f"}</tool>\n<tool>{"name": "g"}</tool>\n<|im_start|>user\nhi<|im_end|>\n'
        '<|im_start|>assistant\n<think>hm</think>\n<call>f {"x": "é"}</call><call>f {"x": "é"}</call><|im_end|>\n'
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )


def test_json_that_takes_long_to_parse_is_refused():
    long = '{"a": "' + "x" * 262_144 + '"}'
    call = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", arguments=long)])
    for asked, field in (
        (pb.Conversation(messages=[USER], tools=["{}", long]), r"tools\[1\]"),
        (pb.Conversation(messages=[USER, call]), r"messages\[1\].tool_calls\[0\].arguments"),
    ):
        with pytest.raises(InvalidRequestError, match=f"{field}: has 262153 characters; allowed are 262144"):
            template_arguments(asked)


def test_an_assistant_message_may_go_on(with_tools):
    begun = pb.ChatMessage(role="assistant", content="The answer is")
    whole = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is"
    asked = pb.Conversation(messages=[USER, begun], continue_last_message=True)
    assert rendered(with_tools, asked) == whole
    asked = pb.Conversation(messages=[USER, begun], add_generation_prompt=False)
    assert rendered(with_tools, asked) == whole + "<|im_end|>\n"


def test_chat_says_nothing_of_torch_which_servers_have_not(directory):
    code = (
        "import sys; sys.modules['torch'] = None; from meshserve.runtime.text.tokenizer import Tokenizer; "
        f"print(Tokenizer({str(directory)!r}).render_chat([{{'role': 'user', 'content': 'hi'}}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hi<|im_end|>" in done.stdout
    assert done.stderr == ""


def test_errors_say_what_to_do(tokenizer, directory, tmp_path):
    with pytest.raises(match="tokenizer.json does not exist"):
        Tokenizer(tmp_path)
    with pytest.raises(InvalidRequestError, match="surrogate pair at character 1"):
        tokenizer.encode("a\ud800")
    other = byte_level_bpe()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(match="no chat template"):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "hi"}])
    other.decoder = tokenizers.decoders.Metaspace()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="Metaspace"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(match="not a readable tokenizer"):
        Tokenizer(tmp_path)
