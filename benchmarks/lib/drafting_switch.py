"""Switches drafting off and on in a running engine, so that one engine shows both sides of a comparison."""

from meshserve.runtime.engine.engine import Engine


def switch_drafts(engine: Engine, *, is_on: bool) -> None:
    """Lets the engine decide whether drafts pay, as a server does, or switches them off."""
    speculation = engine._scheduler.speculation
    speculation.__dict__.pop("_wants_drafts", None)
    if not is_on:
        speculation._wants_drafts = _never  # type: ignore[method-assign]


def _never(num_decodes: int) -> bool:
    return False
