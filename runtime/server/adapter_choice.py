"""Which adapters (LoRA) a caller may use, and which one a request names.

To a tenant, an adapter that it may not use does not exist: it is not listed, and a request that names it has the same
answer as one that names nothing.
"""

from collections.abc import Sequence

from ..api.adapters import MAX_NAME_CHARS, AdapterCatalog, AdapterInfo, named_adapter
from ..api.errors import UnknownAdapterError
from ..api.request import RequestOptions
from ..api.shown import shown
from ..api.tenants import Tenant

_MAX_SHOWN = 20


def usable_adapters(catalog: AdapterCatalog, tenant: Tenant) -> Sequence[AdapterInfo]:
    """Returns the adapters that a tenant may use, in the order of their names."""
    return [info for info in catalog.list() if tenant.may_use(info.name)]


def chosen_adapter(catalog: AdapterCatalog, tenant: Tenant, options: RequestOptions) -> AdapterInfo | None:
    """Returns the adapter that a tenant's request names; None if it names none.

    Raises:
      UnknownAdapterError: There is none of that name, or the tenant may not use it.
      AdapterChangedError: The request asks for another digest.
      AdaptersOffError: The server serves no adapters.
    """
    if not options.adapter:
        return None
    if catalog.is_enabled and not is_usable(catalog, tenant, options.adapter):
        names = [info.name for info in usable_adapters(catalog, tenant)]
        there_are = f"there are {listed(names)}" if names else "there are none"
        raise UnknownAdapterError(
            f"adapter: {shown(options.adapter, 200)} is not loaded here, or this caller may not use it; {there_are}."
        )
    return named_adapter(catalog, options.adapter, options.adapter_digest)


def is_usable(catalog: AdapterCatalog, tenant: Tenant, name: str) -> bool:
    """Returns whether there is an adapter of a name, and the tenant may use it."""
    if not catalog.is_enabled or len(name) > MAX_NAME_CHARS or not tenant.may_use(name):
        return False
    try:
        catalog.find(name)
    except UnknownAdapterError:
        return False
    return True


def listed(names: Sequence[str]) -> str:
    """Returns the first names for a message."""
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
