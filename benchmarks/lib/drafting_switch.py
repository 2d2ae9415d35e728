"""Switches drafting off and on in a running engine, so that one engine shows both sides of a comparison."""

from meshserve.runtime.engine.engine import Engine


def switch_drafts(engine: Engine, *, is_on: bool) -> None:
    """Lets the engine decide whether drafts pay, as a server does, or switches them off."""
    engine._scheduler.speculation.is_always_off = not is_on
