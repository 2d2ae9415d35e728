"""Regular expressions of a model's files: they match as those of `re` do, and none takes without end."""

import re

import pytest

from meshserve.runtime.api.errors import UnsupportedModelError
from meshserve.runtime.model_files import module_expressions
from meshserve.runtime.model_files.module_expressions import Expressions, _Ends, _matcher, check_expression

PUBLISHED = [
    ".*k_proj", ".*mlp.gate$", "model.layers.[0-9]+.self_attn.*", r"model\.layers\.(0|1|2|10)\..*", ".*lm_head",
    r".*\.18\..*gate.*", r"^(?!.*experts).*$", r".*\.mlp\.(gate|shared_expert_gate)$", ".*layers.*mlp.*experts.*",
    r".*(?<!o)_proj", r"model\.layers\.\d{1,2}\.mlp", r"(?:model\.)?layers", r"[^.]*\.layers\.\w+", "",
]  # fmt: skip
HOSTILE = [
    "(a+)+$", "(a|aa)+$", "(.*a){20}$", "(a?){60}a{60}$", ".*.*.*.*.*.*.*.*x", "((a{1000}){1000}){1000}",
    "(?:(?:a*)*)*b", "(?=(a|aa)+$)b", "(?!(a|aa)+b).*", "(a|b|ab)*c", "((|a)+)+b", "(?:a{0,100}){0,100}b",
]  # fmt: skip
NAMES = [
    "model.layers.0.self_attn.k_proj", "model.layers.10.mlp.gate", "model.layers.18.mlp.experts.3.gate_proj",
    "lm_head", "model.layers.2.mlp.down_proj", "layers.7.mlp.shared_expert_gate", "", "a", "aaab", "aaaab.c",
]  # fmt: skip


@pytest.mark.parametrize("expression", [*PUBLISHED, "(a+)+b", "(a|aa)+c", "(.*a){2}b", "((|a)+)+b", "(a|b|ab)*c"])
def test_names_match_as_with_re(expression: str) -> None:
    expected = [name for name in NAMES if re.match(expression, name)]
    for matcher in (Expressions([expression]), _Ends(module_expressions._parser.parse(expression))):
        assert [name for name in NAMES if matcher.match(name)] == expected


def test_published_expressions_are_left_to_re() -> None:
    assert all(isinstance(_matcher(each), re.Pattern) for each in PUBLISHED)


@pytest.mark.parametrize("expression", HOSTILE)
def test_none_backtracks_without_end(expression: str) -> None:
    """With `re`, most of these would outlast the universe."""
    check_expression(expression)
    found = Expressions([expression])
    assert found.match("a" * 60) == (
        expression in ("(a+)+$", "(a|aa)+$", "(.*a){20}$", "(a?){60}a{60}$", "(?!(a|aa)+b).*")
    )
    assert found.match("a" * 98 + "!") == (expression == "(?!(a|aa)+b).*")


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (r"(a+)\1", "GROUPREF is not supported"), ("(?i:a)", "flags"), ("(?i)a", "flags"), (r"\bgate", "AT is not"),
        ("(a++)b", "POSSESSIVE_REPEAT is not|multiple repeat"), ("a" * 3_000, "it has 3000 characters; allowed: 2000"),
        ("(" * 900 + "a" + ")" * 900, "recursion|depth"), ("(", "unterminated"), ("a{99999999999}", "too large"),
    ],
)  # fmt: skip
def test_what_is_not_bounded_is_refused(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_expression(expression)


def test_all_names_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_expressions, "_SECONDS", -1.0)
    with pytest.raises(UnsupportedModelError, match="took more than"):
        Expressions(["a"]).match("b")
    with pytest.raises(UnsupportedModelError, match="has 600 characters; allowed: 100"):
        Expressions(["a"]).match("b" * 600)
