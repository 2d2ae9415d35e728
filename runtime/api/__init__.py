"""The nouns and contracts that every package speaks: requests, configuration, errors, and the wire codec."""
