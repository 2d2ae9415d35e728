"""What does this server run?

The limits, step shapes, kernels and programs that follow from options, model and devices, decided once.
"""
