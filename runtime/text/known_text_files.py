"""Tells which tokenizers and chat templates are known to cost little more than their input.

These run in the server's process; others run in limited processes, see `limited_text`. A regular expression may
backtrack without end, a normalizer may turn a letter into megabytes, and a template is a program: whether such a thing
ends cannot be told by looking at it, so only what has been read by a person is known.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# SHA-256 of the text, without the white space around it.
_TEMPLATES = frozenset(
    {
        "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",  # Qwen3 0.6B to 32B, and 30B-A3B
        "9b220ba56088aa852ebad949dd4dd4d69b075f08f3c09fa7ebb64d6488ab7c20",  # the demo model
    }
)
# Of Qwen2 to Qwen3, of Llama 3, and of GPT-2, which ByteLevel applies itself unless `use_regex` is false.
_EXPRESSIONS = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    }
)
_NORMALIZERS = frozenset({"NFC", "NFD"})  # at most four times as many bytes
_MAX_ADDED_TOKENS = 64  # by a post-processor, to each text


def is_known_template(text: str) -> bool:
    """Returns whether a chat template is one of those that are known."""
    return hashlib.sha256(text.strip().encode(errors="surrogatepass")).hexdigest() in _TEMPLATES


def is_known_tokenizer(content: Mapping[str, Any]) -> bool:
    """Returns whether what a tokenizer.json does to a text is known."""
    model, normalizer, processor = (_object(content.get(key)) for key in ("model", "normalizer", "post_processor"))
    return (
        model.get("type", "BPE") == "BPE"
        and (not normalizer or normalizer.get("type") in _NORMALIZERS)
        and _cuts_at_known_places(_object(content.get("pre_tokenizer")))
        and len(json.dumps(processor.get("single", processor.get("processors", [])))) <= 100 * _MAX_ADDED_TOKENS
    )


def _cuts_at_known_places(pieces: Mapping[str, Any]) -> bool:
    if pieces.get("type") == "Sequence":
        parts = pieces.get("pretokenizers")
        return isinstance(parts, list) and len(parts) <= 4 and all(_cuts_at_known_places(_object(p)) for p in parts)
    if pieces.get("type") == "Split":
        pattern = _object(pieces.get("pattern"))
        return list(pattern) == ["Regex"] and pattern["Regex"] in _EXPRESSIONS
    return not pieces or pieces.get("type") == "ByteLevel"


def _object(value: Any) -> Mapping[str, Any]:
    """Returns an object of JSON, empty for null; what is neither is like an object of an unknown type."""
    return value if isinstance(value, dict) else {} if value is None else {"type": None, "single": "a" * 10_000}


def without_rules(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer.json with the same tokens that does nothing to a text."""
    return {**content, **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))}


def without_tokens() -> dict[str, Any]:
    """Returns a tokenizer.json without tokens."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "ByteLevel"} | _BYTE_LEVEL}


_BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
