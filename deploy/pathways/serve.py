"""Runs the `meshserve` command line on the devices of Pathways, after registering them with jax.

    JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://127.0.0.1:29000 python -m meshserve.deploy.pathways.serve serve ...

Without the registration, jax has no platform `proxy`. Needs the extra [pathways].
"""

import sys

import pathwaysutils

from meshserve.runtime.commands.cli import main

if __name__ == "__main__":
    pathwaysutils.initialize()
    sys.exit(main())
