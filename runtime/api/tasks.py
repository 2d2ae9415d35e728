"""The tasks of models: what a served model can be asked for."""

TASKS = GENERATE, EMBED, RERANK = "generate", "embed", "rerank"
