"""Constraints, followed by random walks over what they allow. Whether the model keeps to them: test_structured.py."""

import contextlib
import json
import math
import random
import re
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest

from meshserve.runtime.api.constraint import MAX_CONSTRAINT_CHARS, Constraint
from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.api.request import FinishReason, Request
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.text.constrained_samples import ConstrainedSamples
from meshserve.runtime.text.grammar import Grammars, compiled, one_line
from meshserve.runtime.text.mask_exchange import MaskExchange, Matcher
from meshserve.runtime.text.tokenizer import Tokenizer
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.runtime.following import Follower, wait_for_masks
from tests.runtime.schemas import random_document_schema, random_regex

MODEL = DEMO_DIRECTORY
VOCAB_SIZE = 2080  # more than the tokenizer has, as with a model whose vocabulary is padded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(MODEL / "tokenizer.json", VOCAB_SIZE, tokenizer.eos_token_ids, num_ahead=5)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def exchange() -> MaskExchange:
    return MaskExchange()


def of(kind: str, said: object) -> Constraint:
    if kind == "choice":
        return Constraint(kind=kind, choices=tuple(said))
    return Constraint(kind=kind, text=said if isinstance(said, str) else json.dumps(said))


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(
    grammars: Grammars, exchange: MaskExchange, constraint: Constraint, eos: frozenset[int], rng: random.Random
) -> list[int]:
    """Tokens drawn evenly from what is allowed, until an end token or until nothing may follow."""
    follower, token_ids = Follower(grammars.compile(constraint), exchange), []
    matcher = follower.matcher
    while not matcher.is_complete:
        token_id = rng.choice(allowed(matcher.mask))
        if token_id in eos:
            assert matcher.may_end
            break
        token_ids.append(token_id)
        assert follower.advance([token_id]) and len(token_ids) < 5000
    exchange.close(matcher)
    return token_ids


@pytest.mark.parametrize("vocab_size", [1000, 1024, 2047])
def test_a_vocabulary_smaller_than_the_tokenizers(grammars, exchange, tokenizer, vocab_size: int):
    """The model of a tokenizer may have been cut. Masks have no bit for tokens that it does not have."""
    with contextlib.closing(Grammars(MODEL / "tokenizer.json", vocab_size, frozenset({0, 2}))) as cut:
        for constraint in (
            of("regex", "[a-z ]{5,40}!"),
            of("json_object", ""),
            of("choice", ["the kingdom", "the king"]),
        ):
            whole, part = grammars.compile(constraint).mask, cut.compile(constraint).mask
            assert allowed(part) == [token for token in allowed(whole) if token < vocab_size]
        token_ids = walk(cut, exchange, of("regex", "[a-z ]{5,40}!"), frozenset({0, 2}), random.Random(5))
    assert max(token_ids) < vocab_size and re.fullmatch("[a-z ]{5,40}!", tokenizer.decode(token_ids))


def test_what_random_walks_write_satisfies_the_schema(grammars, exchange, tokenizer):
    rng, formats = random.Random(1), jsonschema.FormatChecker()
    for _ in range(100):
        schema = random_document_schema(rng)
        text = tokenizer.decode(walk(grammars, exchange, of("json_schema", schema), tokenizer.eos_token_ids, rng))
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=formats)


def test_what_random_walks_write_matches_the_expression(grammars, exchange, tokenizer):
    rng = random.Random(2)
    for _ in range(100):
        expression = random_regex(rng) + "!"  # the empty text alone is refused
        text = tokenizer.decode(walk(grammars, exchange, of("regex", expression), tokenizer.eos_token_ids, rng))
        assert re.fullmatch(expression, text), (expression, text)


LARK = """
start: sum
sum: product | sum "+" product
product: NUMBER | product "*" NUMBER
NUMBER: /[1-9][0-9]{0,3}/
"""


@pytest.mark.parametrize(
    ("constraint", "expression"),
    [
        (of("grammar", LARK), r"[1-9][0-9]{0,3}([+*][1-9][0-9]{0,3})*"),
        (of("grammar", 'root ::= "yes" | "no" digit+\ndigit ::= [0-9]'), r"yes|no[0-9]+"),
        (of("choice", ["yes", "yes, sir", 'a "b"\n', "世界"]), r'yes|yes, sir|a "b"\n|世界'),
        (of("regex", "^a[bc]{2}$"), "a[bc]{2}"),
    ],
    ids=["lark", "gbnf", "choice", "regex"],
)
def test_grammars_and_choices(grammars, exchange, tokenizer, constraint: Constraint, expression: str):
    rng = random.Random(3)
    texts = {tokenizer.decode(walk(grammars, exchange, constraint, tokenizer.eos_token_ids, rng)) for _ in range(40)}
    assert len(texts) >= 2 and all(re.fullmatch(expression, text) for text in texts), texts


def test_as_many_choices_as_are_allowed(grammars, tokenizer):
    rng = random.Random(4)
    letters = 'ab 漢🙂\n\t"\\/<>|.*+?[](){}^$#&~-\x01'
    choices = {"".join(rng.choices(letters, k=rng.randrange(1, 60))) for _ in range(2_000)}
    grammar = grammars.compile(of("choice", sorted(choices)[:1024]))
    for text in sorted(choices)[:1024:100]:
        follower = Follower(grammar)
        for token_id in tokenizer.encode(text):
            assert follower.matcher.allows(token_id), text
            assert follower.advance([token_id])
        assert follower.matcher.may_end


def test_any_json_object_and_nothing_else(grammars, tokenizer):
    constraint = Constraint(kind="json_object")
    for text in ('{"a": [1, {"b": null}], "c": "é\\n"}', "{}", '{\n  "a": 1.5e3\n}'):
        assert Matcher(grammars.compile(constraint, tokenizer.encode(text))).may_end, text
    for text in ("[1]", "x", '{"a": }'):
        with pytest.raises(InvalidRequestError, match="num_resumed_tokens: the tokens at the end of the prompt break"):
            grammars.compile(constraint, tokenizer.encode(text))


def test_space_between_the_parts_has_an_end(grammars, tokenizer):
    constraint = of("json_schema", {"type": "object", "properties": {"a": {}}, "required": ["a"]})
    for space in ("", " ", "\n" + " " * 16, "\n" + "\t" * 8):
        grammars.compile(constraint, tokenizer.encode("{" + space + '"a"' + space + ":"))
    for space in ("  ", "\n\n", " \n", "\n" + " " * 17):
        with pytest.raises(InvalidRequestError):
            grammars.compile(constraint, tokenizer.encode("{" + space + '"'))


def test_end_tokens_where_the_output_may_end_and_no_padding_ever(grammars, tokenizer):
    follower = Follower(grammars.compile(of("regex", "[a-z]{1,2}")))
    matcher = follower.matcher
    assert not set(allowed(matcher.mask)) & tokenizer.eos_token_ids and max(allowed(matcher.mask)) < 2048
    assert follower.advance(tokenizer.encode("q")) and not matcher.is_complete
    assert set(allowed(matcher.mask)) >= tokenizer.eos_token_ids and max(allowed(matcher.mask)) < 2048
    assert follower.advance(tokenizer.encode("q")) and matcher.is_complete
    assert np.array_equal(np.flatnonzero(grammars.eos_mask), np.array([0])) and grammars.eos_mask[0] == 0b101


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "format": "idn-email"}, "idn-email"),
        ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
        ({"$ref": "https://example.com/x"}, "https://example.com/x"),
        ({"$dynamicRef": "#a"}, "dynamicRef"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "whole"}, "whole"),
        ({"const": 2**53 + 1}, "9007199254740993 in const or enum"),
        ({"type": "array", "items": {"enum": [{"a": [-(2**60)]}, 1]}}, "-1152921504606846976 in const or enum"),
        ("{", "EOF|Expecting"),
        ("true", "object"),
    ],
)  # fmt: skip
def test_what_a_schema_asks_in_vain_is_refused_by_name(grammars, schema: object, name: str):
    constraint = Constraint(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))
    with pytest.raises(InvalidRequestError, match=f"^sampling.constraint.json_schema: .*cannot enforce it: .*({name})"):
        grammars.compile(constraint)


@pytest.mark.parametrize(
    ("kind", "text", "name"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", r"a\b", "lookarounds"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "(?:)", "empty"),
        ("grammar", "start: foo", "foo"),
        ("grammar", "nonsense", "Expected ::="),
        ("grammar", "start: g\ng[temperature=0.3]: /a+/", "temperature"),
        ("grammar", 'start: g\n?g[capture, stop = "b"]: /a+/', "stop"),
        ("grammar", "root ::= (", "GBNF"),
    ],
)
def test_what_is_malformed_is_refused(grammars, kind: str, text: str, name: str):
    with pytest.raises(InvalidRequestError, match=f"^sampling.constraint.{kind}: .*{name}"):
        grammars.compile(of(kind, text))


def test_a_message_has_no_backtrace():
    message = "panic: assertion failed\n<backtrace>\n  0: std::backtrace\n</backtrace>"
    assert one_line(message) == "panic: assertion failed"


def test_whole_numbers_up_to_2_to_the_53_and_bounds_beyond(grammars, tokenizer):
    for schema, text in (
        ({"const": 2**53}, "9007199254740992"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, "9007199254740993"),
    ):
        assert Matcher(grammars.compile(of("json_schema", schema), tokenizer.encode(text))).may_end


def test_sizes():
    with pytest.raises(
        InvalidRequestError, match=f"^sampling.constraint.regex: got {MAX_CONSTRAINT_CHARS + 1} characters"
    ):
        of("regex", "a" * (MAX_CONSTRAINT_CHARS + 1))
    with pytest.raises(InvalidRequestError, match="^sampling.constraint.choice: got 0 choices; allowed is 1 to 1024"):
        of("choice", [])
    with pytest.raises(InvalidRequestError, match="^sampling.constraint.choice: got an empty choice"):
        of("choice", ["a", ""])
    with pytest.raises(InvalidRequestError, match="^sampling.constraint.grammar: got an empty text"):
        of("grammar", "")


def test_a_server_may_take_no_constraints():
    assert compiled(None, None) is None
    with pytest.raises(
        InvalidRequestError, match="^sampling.constraint.regex: this server runs without --logits-processors"
    ):
        compiled(of("regex", "a"), None)


def test_samples_of_one_grammar_do_not_disturb_each_other(grammars, tokenizer):
    constraint = of("json_schema", {"type": "array", "items": {"enum": ["ab", "abc", 1]}, "maxItems": 3})
    grammar = grammars.compile(constraint)
    assert grammars.compile(constraint).compiled is grammar.compiled
    texts = ['["ab", 1]', '["abc"]', "[1,1,1]"]
    tokens = [list(tokenizer.encode(text)) for text in texts]
    alone: list[list[bytes]] = []
    for token_ids in tokens:
        follower = Follower(grammar)
        alone.append([follower.matcher.mask.tobytes() for token_id in token_ids if follower.advance([token_id])])
    matchers, exchange = [Matcher(grammar) for _ in texts], MaskExchange()
    together: list[list[bytes]] = [[] for _ in texts]
    while any(tokens):
        turn = [index for index, left in enumerate(tokens) if left]
        for index in turn:
            exchange.advance(matchers[index], tokens[index].pop(0))
        wait_for_masks(exchange, matchers)
        for index in turn:
            together[index].append(matchers[index].mask.tobytes())
    assert together == alone
    grammars.forget(grammar.compiled)
    assert grammars.compile(constraint).compiled is not grammar.compiled


def test_a_token_that_is_not_allowed_ends_it(grammars, tokenizer):
    follower = Follower(grammars.compile(of("regex", "ab")))
    assert not follower.advance(tokenizer.encode("z"))
    assert follower.matcher.failure is not None


@pytest.mark.parametrize("field", ["bad_token_ids", "allowed_token_ids"])
def test_the_token_that_is_taken_where_none_is_left_is_no_output(grammars, tokenizer, field):
    """A device that may choose none chooses token 0, which in some vocabularies a constraint allows."""
    [token_id] = tokenizer.encode("!")
    params = SamplingParams(**{field: (token_id if field == "bad_token_ids" else token_id + 1,)})
    request = Request(request_id="r", prompt_token_ids=(1,), params=params, seed=0)
    samples = ConstrainedSamples(lambda request: ())
    samples.open(request, grammars.compile(of("choice", ["!", "!!"])))
    end = samples.advance(request, token_id)
    assert end is not None and end[0] is FinishReason.ERROR and "no token was left" in end[1]


@pytest.mark.parametrize(
    ("drafts", "num_ahead"),
    [("b1c2", 3), ("b1x2", 2), ("1", 0), ("b1c2d", 3), ("", 0)],
    ids=["allowed", "a wrong one", "none allowed", "complete after the fourth", "none"],
)
def test_masks_after_drafts_are_those_of_the_tokens(grammars, tokenizer, drafts: str, num_ahead: int):
    """The grammar is complete after a letter and two pairs, where a mask is of no use."""
    grammar, exchange, other = grammars.compile(of("regex", "[a-d]([a-d][0-9]){2}")), MaskExchange(), MaskExchange()
    first, *token_ids = [tokenizer.encode(letter)[0] for letter in "a" + drafts]
    drafted, plain = Matcher(grammar), Matcher(grammar)
    drafted.drafts = token_ids
    exchange.advance(drafted, first)
    wait_for_masks(exchange, [drafted])
    assert [each[0] for each in drafted.ahead] == token_ids[:num_ahead]
    for token_id in [first, *token_ids[:num_ahead]]:
        if token_id != first:
            exchange.advance(drafted, token_id)
        other.advance(plain, token_id)
        wait_for_masks(other, [plain])
        assert (drafted.mask == plain.mask).all() and drafted.may_end == plain.may_end
    assert not drafted.ahead


WIDE = "|".join(f"{letter}[a-z {letter.upper()}]{{40}}!" for letter in "abcdefgh")  # each letter has states of its own


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ahead", [0, 3])
def test_every_mask_is_right_while_others_fill_the_lexer(tokenizer, monkeypatch, num_ahead: int, seed: int):
    """Also if a sample has more draft tokens than its row has memory for, and if a draft fills the lexer."""
    for name in ("grammar._FAST_SECONDS", "mask_exchange._RESTART_SECONDS"):  # however busy the machine is
        monkeypatch.setattr(f"meshserve.runtime.text.{name}", math.inf)
    settings = (MODEL / "tokenizer.json", VOCAB_SIZE, tokenizer.eos_token_ids)
    small, roomy = Grammars(*settings, max_lexer_states=150, num_ahead=num_ahead), Grammars(*settings)
    exchange, other, rng = MaskExchange(), MaskExchange(), random.Random(seed)
    pairs = [(Matcher(small.compile(of("regex", WIDE))), Matcher(roomy.compile(of("regex", WIDE)))) for _ in range(8)]
    while pairs := [pair for pair in pairs if not pair[1].is_complete]:
        for found, expected in pairs:
            found.drafts = tokenizer.encode(rng.choice(["", "abc", "bAz", "zzzz", "h!"]))
            token_id = rng.choice(allowed(expected.mask))
            exchange.advance(found, token_id)
            other.advance(expected, token_id)
        wait_for_masks(exchange, [found for found, _ in pairs])
        wait_for_masks(other, [expected for _, expected in pairs])
        for found, expected in pairs:
            assert found.failure is None and (found.mask == expected.mask).all()
            assert (found.may_end, found.is_complete) == (expected.may_end, expected.is_complete)
    assert exchange.num_restarts > 0
    small.close()
    roomy.close()


def test_an_ambiguous_grammar_is_given_up_before_it_costs_much(grammars):
    """Its parses double with every token, and what a mask costs grows with their square."""
    follower = Follower(grammars.compile(of("grammar", 'start: s\ns: s s s | s s | "a" | "b"')))
    rng = random.Random(1)
    for _ in range(300):
        if not follower.advance([rng.choice(allowed(follower.matcher.mask & ~grammars.eos_mask))]):
            break
    assert follower.matcher.failure is not None and "max is 500" in follower.matcher.failure
