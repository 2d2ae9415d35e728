"""The demo model: a small Qwen3 trained on Shakespeare's plays, and the programs that made it.

`model/` is an ordinary Hugging Face directory; serving it needs nothing else from this folder.
corpus.py (archive -> plays), documents.py (plays -> tokenizer and ids), network.py (the forward pass),
train.py (the command line and the training loop), export.py (parameters -> `model/`), head_network.py and train_head.py
(the same for the draft head).
"""
