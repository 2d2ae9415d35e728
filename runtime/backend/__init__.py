"""What does a device offer to the layers of a model?

Kernels by contract, products that tokens can extend, fused layers for small steps, and pages that devices divide.
"""
