"""Runs `meshserve serve`; at SIGUSR1 it audits its scheduler and writes the hashes of its cached pages to a file.

python audited_replica.py FILE serve OPTIONS...
"""

import json
import signal
import sys
import threading
from pathlib import Path

from meshserve.runtime.commands import cli
from meshserve.runtime.telemetry.kv_events.feed import block_hash


def _answer(file: Path, engines: list) -> None:
    while True:
        signal.sigwait({signal.SIGUSR1})
        [engine] = engines
        with engine._changed:  # between two steps
            engine._scheduler.audit()
            hashes = [block_hash(key) for key in engine._pages._page_of]
        part = file.with_suffix(".part")
        part.write_text(json.dumps(hashes))
        part.rename(file)


def main() -> None:
    file = Path(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # before other threads begin, which inherit it
    from meshserve.runtime.engine.engine import Engine

    engines: list[Engine] = []
    start = Engine.start

    def started(engine: Engine) -> None:
        engines.append(engine)
        start(engine)

    Engine.start = started  # type: ignore[method-assign]
    threading.Thread(target=_answer, args=(file, engines), daemon=True).start()
    sys.exit(cli.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
