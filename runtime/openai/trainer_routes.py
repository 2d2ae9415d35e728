"""Routes that trainers call: new weights, pauses, sleep. Their names and fields are SGLang's.

They need the permission `admin`, as AdminService does, whose methods they call.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshserve.protos import inference_pb2 as pb

from ..api.errors import InvalidRequestError
from ..server.edge import Edge
from ..server.method_permissions import ADMIN_SERVICE_NAME
from ..server.weight_methods import WeightMethods
from .fields import Field, Kind, checked_body, honoured, neutral, refused, required
from .http_call import HttpCall

if TYPE_CHECKING:
    from aiohttp import web

_Do = Callable[[dict[str, Any], HttpCall], Awaitable[dict[str, Any]]]

_MODES = {"abort": pb.RUNNING_REQUESTS_ABORT, "retract": pb.RUNNING_REQUESTS_CONTINUE,
          "in_place": pb.RUNNING_REQUESTS_CONTINUE}  # fmt: skip
_TAGS = ("weights", "kv_cache")
PAUSE: dict[str, Field] = {
    "mode": honoured(Kind.TEXT, "abort (the default), retract or in_place; the last two are one")
}
CONTINUE: dict[str, Field] = {"torch_empty_cache": neutral("there is no torch")}
UPDATE: dict[str, Field] = {
    "model_path": honoured(Kind.TEXT, "a directory below one of --weights-below"),
    "weight_version": honoured(Kind.TEXT),
    "abort_all_requests": honoured(Kind.BOOLEAN, "otherwise running requests continue with the new weights"),
    "flush_cache": refused("cached pages never outlive the weights", True),
    "load_format": neutral("the directory says it"),
    "is_async": neutral("streams go on meanwhile"),
    "keep_pause": neutral("a pause lasts until /continue_generation"),
    "recapture_cuda_graph": neutral("programs stay"),
    "torch_empty_cache": neutral("there is no torch"),
    "token_step": neutral("use weight_version"),
}
RELEASE: dict[str, Field] = {"tags": honoured(Kind.LIST, "weights and kv_cache, together")}
ABORT: dict[str, Field] = {
    "rid": honoured(Kind.TEXT, "the request's X-Request-Id"),
    "abort_all": honoured(Kind.BOOLEAN),
    "abort_message": neutral("the reason is in the finish reason"),
    "finished_reason": neutral("the reason is in the finish reason"),
}


class TrainerRoutes:
    """The routes of one edge."""

    def __init__(self, edge: Edge):
        self._edge, self._methods = edge, WeightMethods(edge)

    def answers(self) -> Mapping[str, tuple[str, str, Any]]:
        """Returns by path: the HTTP method, the RPC that needs the same permission, and what answers."""
        table: list[tuple[str, str, dict[str, Field], _Do]] = [
            ("pause_generation", "Pause", PAUSE, self._pause),
            ("continue_generation", "Continue", CONTINUE, self._continue),
            ("update_weights_from_disk", "UpdateWeights", UPDATE, self._update),
            ("release_memory_occupation", "Sleep", RELEASE, self._release),
            ("resume_memory_occupation", "Wake", RELEASE, self._resume),
            ("abort_request", "Pause", ABORT, self._abort),
        ]
        return {
            f"/{name}": ("POST", f"{ADMIN_SERVICE_NAME}/{method}", self._answer(fields, do))
            for name, method, fields, do in table
        } | {"/get_weight_version": ("GET", f"{ADMIN_SERVICE_NAME}/GetWeightVersion", self._answer({}, self._version))}

    def _answer(self, fields: dict[str, Field], do: _Do) -> Any:
        async def answer(request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
            from aiohttp import web

            return web.json_response(await do(checked_body(body, fields) if body is not None else {}, call))

        return answer

    async def _pause(self, fields: dict[str, Any], call: HttpCall) -> dict[str, Any]:
        mode = fields.get("mode", "abort")
        if mode not in _MODES:
            raise InvalidRequestError("mode", f"got {mode[:40]!r}; allowed are {', '.join(_MODES)}.")
        await self._methods.pause(pb.PauseRequest(running=_MODES[mode]))
        return {"status": "ok", "message": "Generation paused."}

    async def _continue(self, fields: dict[str, Any], call: HttpCall) -> dict[str, Any]:
        await self._methods.resume(pb.ContinueRequest())
        return {"status": "ok", "message": "Generation continued."}

    async def _update(self, fields: dict[str, Any], call: HttpCall) -> dict[str, Any]:
        is_aborting = fields.get("abort_all_requests")
        running = pb.RUNNING_REQUESTS_ABORT if is_aborting else pb.RUNNING_REQUESTS_CONTINUE
        version = fields.get("weight_version")
        asked = pb.UpdateWeightsRequest(directory=required(fields, "model_path"), running=running, version=version)
        done = await self._methods.update(asked)
        message = f"The weights are version {done.version}; steps paused for {done.paused_seconds:.3f} s."
        return {"success": True, "message": message, "num_paused_requests": 0, "weight_version": done.version}

    async def _version(self, fields: dict[str, Any], call: HttpCall) -> dict[str, Any]:
        found = await self._methods.version(pb.GetWeightVersionRequest())
        return {"weight_version": found.version, "is_paused": found.is_paused, "is_asleep": found.is_asleep}

    async def _release(self, fields: dict[str, Any], call: HttpCall) -> dict[str, Any]:
        _check_tags(fields)
        return {"num_freed_bytes": (await self._methods.sleep(pb.SleepRequest())).num_freed_bytes}

    async def _resume(self, fields: dict[str, Any], call: HttpCall) -> dict[str, Any]:
        _check_tags(fields)
        return {"has_continued": (await self._methods.wake(pb.WakeRequest())).has_continued}

    async def _abort(self, fields: dict[str, Any], call: HttpCall) -> dict[str, Any]:
        tenant = self._edge.access.tenant(call.invocation_metadata())
        if fields.get("abort_all"):
            return {"num_aborted": self._edge.abort_all()}
        return {"num_aborted": self._edge.abort_requests([required(fields, "rid")], tenant)}


def _check_tags(fields: dict[str, Any]) -> None:
    """Raises InvalidRequestError if only the weights or only the cache are to be released."""
    tags = fields.get("tags")
    if tags and sorted(map(str, tags)) != sorted(_TAGS):
        raise InvalidRequestError("tags", f"got {str(tags)[:80]}; allowed are weights and kv_cache together.")
