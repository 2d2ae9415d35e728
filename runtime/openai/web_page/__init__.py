"""What does a person see who opens the port of OpenAI's API in a browser?

A page to chat with the model and to watch the server, at `/`. `page_files` serves what the page consists of, the same
for everybody; `server_status` serves what it shows about the server, to callers who may see it.
"""
