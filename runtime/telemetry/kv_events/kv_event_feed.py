"""Opens the feed of KV cache events that the options ask for."""

import logging
import socket

from ...options.serve_config import ServeConfig
from ...scheduler.page_changes import PageChanges
from .feed import KvEventFeed
from .zmq_publisher import ZmqPublisher

_log = logging.getLogger(__name__)


def open_feed(config: ServeConfig, model_name: str) -> KvEventFeed | None:
    """Returns a feed that is ready to start, with its sockets bound; None if the options ask for none.

    Raises:
      ConfigError: A package is not installed, or an endpoint cannot be bound.
    """
    publisher = None
    if config.kv_events_endpoint:
        topic = config.kv_events_topic or f"kv@{socket.gethostname()}@{model_name}"
        publisher = ZmqPublisher(
            endpoint=config.kv_events_endpoint,
            replay_endpoint=config.kv_events_replay_endpoint,
            topic=topic,
            page_size=config.page_size,
        )
        source = publisher.source
        replay = f", replays at {source.replay_endpoint}" if source.replay_endpoint else ""
        _log.info("publishing KV cache events at %s%s, topic %s", source.endpoint, replay, topic)
    if publisher is None and not config.kv_events:
        return None
    return KvEventFeed(PageChanges(config.page_size), publisher)
