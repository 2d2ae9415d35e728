"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's names for AdminService's methods."""

from typing import TYPE_CHECKING, Any

from ..server.adapter_methods import AdapterMethods
from ..server.edge import Edge
from .fields import Field, Kind, checked_body, honoured, neutral, refused, required
from .http_call import HttpCall

if TYPE_CHECKING:
    from aiohttp import web

LOAD: dict[str, Field] = {
    "lora_name": honoured(Kind.TEXT, "by which requests choose the adapter as their model"),
    "lora_path": honoured(Kind.TEXT, "a directory below --adapter-root"),
    "load_inplace": honoured(Kind.BOOLEAN, "replace an adapter of the same name"),
    "base_model_name": neutral("there is one model"),
    "pinned": refused("the adapter that was used last stays longest on the devices", False),
}
UNLOAD: dict[str, Field] = {
    "lora_name": LOAD["lora_name"],
    "lora_int_id": neutral("adapters have names only"),
}


class AdapterRoutes:
    """The routes of one edge."""

    def __init__(self, edge: Edge):
        self._methods = AdapterMethods(edge)

    async def load(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /v1/load_lora_adapter`: loads an adapter from the server's disk."""
        from aiohttp import web

        fields = checked_body(body, LOAD)
        name, path = required(fields, "lora_name"), required(fields, "lora_path")
        is_replaced = fields.get("load_inplace", False)
        await self._methods.load(name, path, replaces=is_replaced, fields=("lora_name", "lora_path"))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: "web.Request", body: Any, call: HttpCall) -> "web.StreamResponse":
        """`POST /v1/unload_lora_adapter`: unloads an adapter."""
        from aiohttp import web

        fields = checked_body(body, UNLOAD)
        name = required(fields, "lora_name")
        await self._methods.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
