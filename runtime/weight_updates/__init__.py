"""How do a trainer's weights get into a running engine?

Trees of arrays or checkpoints are checked, moved to the engine's shardings and put in the place of the weights between
two steps. The engine can also give up its weights and cache for a while, and take them back.
"""
