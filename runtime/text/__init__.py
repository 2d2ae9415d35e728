"""Conversion between text and token ids: tokenizer, chat templates and grammars for structured output."""
