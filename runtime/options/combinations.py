"""Checks options against each other."""

from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..api.loopback import is_loopback
from .listening_ports import check_distinct

if TYPE_CHECKING:
    from .serve_config import ServeConfig


def check_combinations(config: "ServeConfig") -> None:
    """Checks options whose allowed values depend on other options.

    Raises:
      ConfigError: Options contradict each other.
    """
    if config.max_context == 1:
        raise ConfigError("max_context is 1; it must be 2 or more (a prompt and one token), or 0 for the default.")
    if bool(config.tls_cert) != bool(config.tls_key) or (config.tls_client_ca and not config.tls_cert):
        raise ConfigError("tls_cert and tls_key must be set together, and tls_client_ca requires both.")
    if 0 < config.max_step_tokens < config.max_running:
        raise ConfigError(
            f"max_step_tokens is {config.max_step_tokens} and max_running {config.max_running}: every running request "
            "decodes one token per step, so max_step_tokens must be at least max_running. Raise it or lower "
            "max_running."
        )
    if config.max_decode_steps > config.page_size:
        raise ConfigError(
            f"max_decode_steps is {config.max_decode_steps}; allowed is 1 to page_size ({config.page_size}): a request "
            "begins at most one page per dispatch. Lower it or raise page_size."
        )
    if config.draft_tokens >= config.page_size:
        raise ConfigError(
            f"draft_tokens is {config.draft_tokens}; allowed is 0 to page_size - 1 ({config.page_size - 1}): a request "
            "begins at most one page per step. Lower it or raise page_size."
        )
    if config.cp > 1 and config.page_size % config.cp:
        raise ConfigError(
            f"page_size is {config.page_size} and cp {config.cp}: each of cp devices holds the same number of a page's "
            "tokens. Set page_size to a multiple of cp."
        )
    _check_draft_model(config)
    _check_adapters(config)
    if config.host_cache_gib and not config.prefix_cache:
        raise ConfigError("host_cache_gib keeps pages of the prefix cache, so it requires prefix_cache. Set it to 0.")
    if config.host_cache_gib and config.draft_model:
        raise ConfigError(
            "host_cache_gib keeps the pages of the model, but not those of draft_model, which could draft nothing for "
            "restored prompts. Set host_cache_gib to 0, or leave draft_model out."
        )
    if config.host_cache_dir and (not config.host_cache_gib or config.coordinator):
        raise ConfigError(
            "host_cache_dir keeps the pages of host_cache_gib between two runs of a server of one process. Set "
            "host_cache_gib, too, and no coordinator; or leave host_cache_dir out."
        )
    if config.stored_programs == "on" and (config.coordinator or not config.cache_dir):
        raise ConfigError(
            "stored_programs is on, which needs cache_dir and a server of one process. Set cache_dir, and no "
            "coordinator; or leave stored_programs out."
        )
    _check_cluster(config)
    _check_kv_events(config)
    check_distinct(config)
    if config.cpu_devices and config.cpu_devices < config.tp and not config.coordinator:
        raise ConfigError(
            f"tp is {config.tp} but cpu_devices only {config.cpu_devices}. Raise cpu_devices or set it to 0."
        )


def _check_draft_model(config: "ServeConfig") -> None:
    if not config.draft_model:
        return
    if config.draft_tokens < 2:
        raise ConfigError(
            f"draft_model is set and draft_tokens is {config.draft_tokens}; allowed is 2 or more. Set draft_tokens to "
            "how many tokens the draft model proposes at a time, such as 4, or omit draft_model."
        )
    if config.max_decode_steps > 1:
        raise ConfigError(
            f"draft_model is set and max_decode_steps is {config.max_decode_steps}; allowed is 1: drafts are verified "
            "in steps of their own. Omit one of them."
        )


def _check_adapters(config: "ServeConfig") -> None:
    for each in config.adapter:
        name, _, path = each.partition("=")
        if not name or not path:
            raise ConfigError(f"adapter is {each!r}; it must be NAME=PATH, such as support=/adapters/support.")
    if len(config.adapter_paths) < len(config.adapter):
        raise ConfigError("adapter gives two paths for the same name. Omit one, or rename it.")


def _check_cluster(config: "ServeConfig") -> None:
    is_explicit = config.coordinator not in ("", "auto")
    host, _, port = config.coordinator.rpartition(":")
    if is_explicit and not (host and port.isdigit()):
        raise ConfigError(f"coordinator is {config.coordinator!r}; it must be HOST:PORT of process 0, or 'auto'.")
    if config.num_processes < 1 or not 0 <= config.process_id < config.num_processes:
        raise ConfigError(
            f"process_id is {config.process_id} and num_processes {config.num_processes}; the processes are numbered "
            "from 0 to num_processes - 1."
        )
    if config.num_processes > 1 and not is_explicit:
        raise ConfigError(
            f"num_processes is {config.num_processes} and coordinator {config.coordinator!r}. Set coordinator to "
            "HOST:PORT of process 0; with 'auto', omit num_processes and process_id, which the orchestrator sets."
        )
    if config.cluster_ca and not config.tls_cert:
        raise ConfigError("cluster_ca requires tls_cert and tls_key, which this process presents to the others.")


def _check_kv_events(config: "ServeConfig") -> None:
    if not config.kv_events_endpoint:
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if getattr(config, name):
                raise ConfigError(f"{name} needs kv_events_endpoint, such as tcp://127.0.0.1:5557. Set it, too.")
    if (config.kv_events or config.kv_events_endpoint) and not config.prefix_cache:
        raise ConfigError(
            "kv_events tells what the prefix cache holds, and prefix_cache is off. Leave out one of them."
        )
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        endpoint = getattr(config, name)
        kind, _, rest = endpoint.partition("://")
        host, _, port = rest.rpartition(":")
        is_tcp = kind == "tcp" and bool(host) and (port.isdigit() or port == "*")
        if endpoint and not is_tcp and not (kind == "ipc" and rest):
            raise ConfigError(f"{name} is {endpoint!r}; it must be tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557.")
        if is_tcp and not is_loopback(host.strip("[]")) and not config.allow_insecure:
            raise ConfigError(
                f"{name} is {endpoint!r}, which other machines can reach, and ZeroMQ has neither encryption nor tokens "
                "here, while the events contain the tokens of prompts. Bind a loopback address such as "
                "tcp://127.0.0.1:5557, or set --allow-insecure in a closed network."
            )
