"""What do a model's own files say about it?

config.json, generation_config.json and the declaration of quantized weights.
"""
