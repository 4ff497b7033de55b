"""Triton kernels, one op a file, each with the signature of its PyTorch reference.

They import torch and triton only and check nothing: the module that holds the
reference checks the arguments and chooses between the two.
"""
