"""`python -m meshserve`, the same as the command `meshserve`."""

import sys

from meshserve.runtime.commands.cli import main

sys.exit(main())
