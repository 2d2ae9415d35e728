"""Defines the permission that each method requires. A method that is not listed requires Permission.ADMIN."""

from pathlib import Path
from types import MappingProxyType

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from meshserve.protos import inference_pb2 as pb

from ..api.tenants import Permission
from .auth import Access

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
PUBLIC_SERVICES = frozenset((health.SERVICE_NAME,))  # health probes cannot send tokens

# Not served. Clients that try it first fall back to the older version only if they get UNIMPLEMENTED.
_NEWER_REFLECTION = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

_NEEDS = {
    Permission.INFERENCE: [
        f"{SERVICE_NAME}/{name}"
        for name in ("Generate", "Chat", "Embed", "Score", "Rerank", "Tokenize", "Detokenize", "Abort")
    ],
    Permission.INFO: [
        *(f"{SERVICE_NAME}/{name}" for name in ("GetModelInfo", "GetServerInfo", "GetLoad")),
        f"{reflection.SERVICE_NAME}/ServerReflectionInfo",
        _NEWER_REFLECTION,
    ],
    Permission.ADMIN: [
        f"{ADMIN_SERVICE_NAME}/{name}"
        for name in (
            "Drain",
            "FlushPrefixCache",
            "StartProfile",
            "StopProfile",
            "LoadAdapter",
            "UnloadAdapter",
            "ListAdapters",
            "UpdateWeights",
            "GetWeightVersion",
            "Pause",
            "Continue",
            "Sleep",
            "Wake",
        )  # fmt: skip
    ],
}
# Methods that take a place in the queue. While it is full, they are refused before the request is read.
QUEUED_METHODS = frozenset(
    [f"/{SERVICE_NAME}/{name}" for name in ("Generate", "Chat", "Embed", "Score", "Rerank")]
    + [f"/vllm.grpc.engine.VllmEngine/{name}" for name in ("Generate", "Embed")]
)
METHOD_PERMISSIONS = MappingProxyType(
    {f"/{method}": permission for permission, methods in _NEEDS.items() for method in methods}
)


def new_access(tokens: Path | None = None) -> Access:
    """Returns the access control of a server.

    Raises:
      ConfigError: The tokens file is not valid.
    """
    return Access(tokens, METHOD_PERMISSIONS, PUBLIC_SERVICES)
