"""What did the model say in an answer: what did it think, what does it tell the user, which tools does it call?

`answer_parser` reads an answer piece by piece; `answer_format` knows from the chat template and the prompt what to
expect; `json_calls` and `xml_calls` read the two ways in which Qwen3 models write tool calls.
"""
