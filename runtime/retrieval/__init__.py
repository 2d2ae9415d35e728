"""The methods of a server that embeds texts or reranks documents."""
