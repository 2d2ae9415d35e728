"""What each method needs. A method that is not listed here needs Permission.ADMIN."""

from pathlib import Path
from types import MappingProxyType

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from meshserve.protos import inference_pb2 as pb

from .auth import Access, Permission

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
PUBLIC_SERVICES = frozenset((health.SERVICE_NAME,))  # probes have no token

# Not served: clients that ask for it first go on to the older one if they hear UNIMPLEMENTED, and only then.
_NEWER_REFLECTION = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

_NEEDS = {
    Permission.INFERENCE: [
        f"{SERVICE_NAME}/{name}" for name in ("Generate", "Chat", "Tokenize", "Detokenize", "Abort")
    ],
    Permission.INFO: [
        *(f"{SERVICE_NAME}/{name}" for name in ("GetModelInfo", "GetServerInfo", "GetLoad")),
        f"{reflection.SERVICE_NAME}/ServerReflectionInfo",
        _NEWER_REFLECTION,
    ],
    Permission.ADMIN: [
        f"{ADMIN_SERVICE_NAME}/{name}" for name in ("Drain", "FlushPrefixCache", "StartProfile", "StopProfile")
    ],
}
# What takes a place in the queue. Refused before the request is read while there is none.
QUEUED_METHODS = frozenset(
    (f"/{SERVICE_NAME}/Generate", f"/{SERVICE_NAME}/Chat", "/vllm.grpc.engine.VllmEngine/Generate")
)
METHOD_PERMISSIONS = MappingProxyType(
    {f"/{method}": permission for permission, methods in _NEEDS.items() for method in methods}
)


def new_access(tokens: Path | None = None) -> Access:
    """The gate of a server.

    Raises:
      ConfigError: the tokens file cannot be used.
    """
    return Access(tokens, METHOD_PERMISSIONS, PUBLIC_SERVICES)
