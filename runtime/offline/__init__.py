"""How are prompts completed without a server?

`meshserve.LLM`, and the batches of `meshserve generate`.
"""
