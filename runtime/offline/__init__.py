"""Completes prompts in this process, without a server: `meshserve.LLM` and the batches of `meshserve generate`."""
