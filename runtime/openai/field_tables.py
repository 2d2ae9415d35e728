"""Writes the tables of fields of the documentation.

    python -m meshserve.runtime.openai.field_tables

`tests/runtime/openai/test_fields.py` compares them with docs/openai.md.
"""

from collections.abc import Mapping

from .adapter_routes import LOAD, UNLOAD
from .anthropic_request import COUNT_TOKENS, MESSAGES
from .batches.batch_routes import BATCHES
from .embeddings import EMBEDDINGS, RERANK, SCORE
from .fields import CHAT, COMPLETIONS, Field
from .information import DETOKENIZE, TOKENIZE
from .responses_request import RESPONSES

TABLES: Mapping[str, Mapping[str, Field]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/score": SCORE,
    "/v1/rerank": RERANK,
    "/v1/batches": BATCHES,
    "/v1/load_lora_adapter": LOAD,
    "/v1/unload_lora_adapter": UNLOAD,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}


def field_table() -> str:
    """Returns a table of every field of every route, in Markdown."""
    names = sorted({name for fields in TABLES.values() for name in fields})
    lines = ["| field | routes | |", "|---|---|---|"]
    for name in names:
        routes = [route for route, fields in TABLES.items() if name in fields]
        texts = dict.fromkeys(_text(TABLES[route][name]) for route in routes)
        lines.append(f"| `{name}` | {', '.join(map(_short, routes))} | {'; '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _short(route: str) -> str:
    return route.removeprefix("/v1/").removeprefix("/")


def _text(field: Field) -> str:
    if field.only is not None:
        allowed = f"; {', '.join(map(str, field.only))} is accepted" if field.only else ""
        return f"refused: {field.note}{allowed}"
    if not field.is_honoured:
        return f"changes nothing: {field.note}"
    return f"{field.kind.value}; {field.note}" if field.note else field.kind.value


if __name__ == "__main__":
    print(field_table(), end="")
