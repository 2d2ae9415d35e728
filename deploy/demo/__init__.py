"""How was the demo model made? It is a small Qwen3 trained on Shakespeare's plays; these are the programs.

The model itself lies in `runtime/weights/embedded`; serving it needs nothing from this folder.
corpus.py (archive -> plays), documents.py (plays -> tokenizer and ids), network.py (the forward pass),
train.py (the command line and the training loop), export.py (parameters -> a model directory), head_network.py and
train_head.py (the same for the draft head).
"""
