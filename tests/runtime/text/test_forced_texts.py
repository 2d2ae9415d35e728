"""Constraints that leave no choice, with the second model's tokenizer: its normalizer and added tokens change no text.

Forced texts are what llguidance tokenises itself; see `constraint_vocabulary`.
"""

import json
import random
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.text.constraint_vocabulary import ConstraintVocabulary
from meshserve.runtime.text.grammar import Grammars
from meshserve.runtime.text.mask_exchange import MaskExchange
from meshserve.runtime.text.tokenizer import Tokenizer
from tests.runtime.following import Follower
from tests.second_model import END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS, TEXT_TOKENS, VOCAB_SIZE

from .test_grammar import allowed, of, walk


@pytest.fixture(scope="module")
def tokenizer(second_model: Path) -> Tokenizer:
    return Tokenizer(second_model)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(tokenizer.directory / "tokenizer.json", VOCAB_SIZE, tokenizer.eos_token_ids)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> ConstraintVocabulary:
    return ConstraintVocabulary(tokenizer.directory / "tokenizer.json", VOCAB_SIZE, sorted(tokenizer.eos_token_ids))


def written(grammars: Grammars, tokenizer: Tokenizer, kind: str, said: object, seed: int = 0) -> str:
    """A text that the constraint allows."""
    eos = tokenizer.eos_token_ids
    return tokenizer.decode(walk(grammars, MaskExchange(), of(kind, said), eos, random.Random(seed)))


def escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\|/.*+?[](){}^$" else char for char in text)


# Texts that NFC changes: decomposed, out of order, replaced by one character, and composed ones that it decomposes.
NOT_NFC = [
    "e\u0301", "Vie\u0323\u0302t", "a\u0301\u0323", "\u1112\u1161\u11ab", "\u0915\u093c", "\u0958", "\u212b", "\u2126",
    "\ufb1d", "q\u0323\u0307", "が".replace("が", "\u304b\u3099"), "\u0344", "x\u0958\u0301 \u00e9",
]  # fmt: skip
ADDED = [*TEXT_TOKENS, *SPECIAL_TOKENS]
FORCED = [
    *NOT_NFC, *ADDED, f"x{IM_END}", f"{IM_END}x", "<think>\nHm.\n</think>\n\n", "<thi", "nk>", "<|im_",
    "a<think>b<think", "<<think>>", "<think>e\u0301</think>\u212b", f"{IM_START}user\n{END_OF_TEXT}",
    '<tool_call>\n{"name": "f"}\n</tool_call>',
]  # fmt: skip


@pytest.mark.parametrize("text", FORCED)
def test_each_kind_of_constraint_yields_the_text(grammars: Grammars, tokenizer: Tokenizer, text: str):
    quoted = json.dumps(text, ensure_ascii=False)
    for kind, said in {
        "choice": [text],
        "regex": escaped(text),
        "grammar": f"start: {quoted}",
    }.items():
        assert written(grammars, tokenizer, kind, said) == text, kind
    assert written(grammars, tokenizer, "grammar", f"root ::= {quoted}") == text
    for schema in ({"const": text}, {"enum": [text]}, {"type": "string", "pattern": f"^{escaped(text)}$"}):
        assert json.loads(written(grammars, tokenizer, "json_schema", schema)) == text, schema
    named = {"type": "object", "properties": {text: {"const": text}}, "required": [text], "additionalProperties": False}
    assert json.loads(written(grammars, tokenizer, "json_schema", named)) == {text: text}


def every_normal_form() -> list[str]:
    """The strings of Unicode's NormalizationTest.txt, and more: each code point that a normal form changes, its forms,
    and combining characters in each order behind letters.
    """
    forms = ("NFC", "NFD", "NFKC", "NFKD")
    points = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    changed = [char for char in points if any(not unicodedata.is_normalized(form, char) for form in forms)]
    combining = [char for char in points if unicodedata.combining(char)]
    ordered = [
        f"{letter}{first}{second}{letter}"
        for letter in "aq가"
        for first, second in zip(combining, combining[1:] + combining[:1], strict=True)
    ]
    texts = changed + ordered + [second + first for first, second in zip(combining, combining[1:], strict=False)]
    return [*texts, *(unicodedata.normalize(form, text) for form in forms for text in changed)]


def test_the_tokens_of_every_normal_form_have_its_bytes(vocabulary: ConstraintVocabulary):
    texts = every_normal_form()
    assert len(texts) > 80_000
    for text in [*texts, *("".join(texts[start::997]) for start in range(997))]:
        assert b"".join(vocabulary.texts[token_id] for token_id in vocabulary.encode(text)) == text.encode()


@pytest.mark.parametrize("seed", range(3))
def test_normal_forms_beside_added_tokens(grammars: Grammars, tokenizer: Tokenizer, seed: int):
    """In one constant, where each token depends on what is before it."""
    rng = random.Random(seed)
    text = "".join(rng.sample(every_normal_form(), 60) + rng.sample(ADDED, len(ADDED)))
    assert json.loads(written(grammars, tokenizer, "json_schema", {"const": text})) == text


@pytest.mark.parametrize("text", TEXT_TOKENS)
def test_an_added_token_with_a_text_is_forced_as_the_token(grammars: Grammars, tokenizer: Tokenizer, text: str):
    """As the model was trained to write it; where there is a choice, the model may also spell it."""
    assert walk(grammars, MaskExchange(), of("regex", text), frozenset(), random.Random(0)) == [
        tokenizer.token_id(text)
    ]
    mask = grammars.compile(of("regex", f"{text}|<x>")).mask
    assert {tokenizer.token_id(text), tokenizer.token_id("<")} <= set(allowed(mask))


def test_special_tokens_are_in_no_mask(grammars: Grammars, tokenizer: Tokenizer):
    special = {tokenizer.token_id(text) for text in SPECIAL_TOKENS}
    for constraint in (of("regex", r"(?s:.){3,}"), of("json_object", ""), of("choice", [*ADDED, "x"])):
        follower = Follower(grammars.compile(constraint))
        assert not special & set(allowed(follower.matcher.mask))


@pytest.mark.parametrize(
    ("grammar", "expression"),
    [
        ('start: <think> "\\n" /[a-z]{1,9}/ "\\n" </think> "x"', "<think>\n[a-z]{1,9}\n</think>x"),
        ("start: <think> /[^<]{0,9}/ </think> # <think>", "<think>[^<]{0,9}</think>"),
        ('start: "<think>" x // </think>\nx: /<\\/think>/ | "</tool_call>"', "<think>(</think>|</tool_call>)"),
        (f'start: "a" {IM_START} "b"', "ab"),  # has no text
        (f'start: "a" ("b" | {IM_START}) {IM_END}', "ab?"),  # ends the output
        (f'start: "a" ("b" {END_OF_TEXT})?', "ab?"),
        ('start: %json {"enum": ["<think>", "e\\u0301"]} </think>', '"(<think>|e\u0301)"</think>'),
    ],
)
def test_tokens_by_name_in_grammars(grammars: Grammars, tokenizer: Tokenizer, grammar: str, expression: str):
    for seed in range(4):
        text = written(grammars, tokenizer, "grammar", grammar, seed)
        assert re.fullmatch(expression, text), text


def test_a_token_by_name_ends_a_text_that_may_be_anything(grammars: Grammars, tokenizer: Tokenizer):
    follower = Follower(grammars.compile(of("grammar", 'start: /(.|\\n)*/ </think> "x"')))
    thoughts = tokenizer.encode("Hm, </tool_call>\n</thin")
    assert follower.advance([*thoughts, tokenizer.token_id("</think>")])
    assert allowed(follower.matcher.mask) == list(tokenizer.encode("x"))


@pytest.mark.parametrize("token", [IM_END, END_OF_TEXT, "<[0-800]>"])
def test_an_output_never_ends_where_its_grammar_goes_on(grammars: Grammars, tokenizer: Tokenizer, token: str):
    follower = Follower(grammars.compile(of("grammar", f'start: "a" ({token} "bc" | "dd")')))
    assert follower.advance(tokenizer.encode("a"))
    matcher = follower.matcher
    assert not matcher.may_end and not matcher.is_complete
    assert not tokenizer.eos_token_ids & set(allowed(matcher.mask))
    if token != "<[0-800]>":
        follower = Follower(grammars.compile(of("grammar", f'start: "a" {token} "bc"')))
        assert not follower.advance(tokenizer.encode("a"))
        assert follower.matcher.failure == "it has an end token before its end"


def test_a_grammar_that_leads_nowhere_says_so(grammars: Grammars, tokenizer: Tokenizer):
    nowhere = "N: /a/ & ~/a/"
    with pytest.raises(InvalidRequestError, match="no token may follow that it allows"):
        grammars.compile(of("grammar", f"start: N\n{nowhere}"))
    follower = Follower(grammars.compile(of("grammar", f'start: "b" N\n{nowhere}')))
    assert not follower.advance(tokenizer.encode("b"))
    assert follower.matcher.failure == "no token may follow that it allows"


def test_a_vocabulary_without_end_tokens_has_none(tokenizer: Tokenizer):
    """Its outputs end where nothing may follow. No other token takes the place of an end token."""
    grammars = Grammars(tokenizer.directory / "tokenizer.json", VOCAB_SIZE, frozenset())
    follower = Follower(grammars.compile(of("regex", "a{1,2}")))
    assert follower.advance(tokenizer.encode("a")) and follower.matcher.may_end and not follower.matcher.is_complete
    assert [tokenizer.token_bytes(token_id) for token_id in allowed(follower.matcher.mask)] == [b"a"]
    assert follower.advance(tokenizer.encode("a")) and follower.matcher.is_complete
    grammars.close()
