"""How do published files store quantized weights, and how are weights quantized while they are loaded?

What the stored numbers mean on a device is told by `kernels.linear.formats`. Here is a module for each publisher's
layout of them (`awq.py`), registered in `published.py`, the schemes of `--quantize` (`quantize.py`), and sources that
give the parts of matrices as a sharding asks for them.
"""
