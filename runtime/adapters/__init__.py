"""Which adapters (LoRA) does a server have, and what do they add to the products of its steps?

Reads PEFT checkpoints, keeps them in host memory, holds some on the devices, and multiplies with those.
"""
