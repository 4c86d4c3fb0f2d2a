"""Owns a look at how large the tensors of a computation are, whatever the machine's memory is."""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """While it is open, ``elements`` is the largest number of them that a result had in its storage.

    ``copied`` is the same of results in memory that no argument has, so that neither views nor changed arguments count.
    """

    elements = 0
    copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **({} if kwargs is None else kwargs))
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            elements = storage.nbytes() // tensor.element_size()
            self.elements = max(self.elements, elements)
            if storage._cdata not in inputs and tensor.device.type != "meta":
                self.copied = max(self.copied, elements)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
