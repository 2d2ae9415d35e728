"""How are files of many requests answered?

In the form of OpenAI's batches: a line asks what the body of a request to the port would, and is answered by the same
code. `batch_lines` reads and writes lines, `answer_file` continues what an earlier run has written, and `batch_run`
answers the lines of a file.
"""
