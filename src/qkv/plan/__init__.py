"""What a config says of its model before any tensor exists: the operations that it runs. No torch, no NumPy."""

from qkv.plan.cache import kv_cache_bytes
from qkv.plan.operations import operations
from qkv.plan.program import Dim, Operation, Section, Value
from qkv.plan.tensors import TensorGroup, index_ranges, tensor_groups

__all__ = [
    "Dim",
    "Operation",
    "Section",
    "TensorGroup",
    "Value",
    "index_ranges",
    "kv_cache_bytes",
    "operations",
    "tensor_groups",
]
