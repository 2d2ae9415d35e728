"""How do the files of a model become arrays on the devices?

Finding the files, and mapping their tensors to parameters.
"""
