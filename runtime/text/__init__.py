"""How do text and token ids become each other?

The tokenizer, chat templates, and grammars for structured output.
"""
