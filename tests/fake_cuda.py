"""A CUDA device without one: tensors on it have no values, and what is moved to it is counted."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda:0")


class FakeCuda(TorchDispatchMode):
    """Ops on the CPU run as ever; those on CUDA give fake tensors, of which every test is true.

    Attributes:
        uploads: numbers of bytes that were moved from the CPU to CUDA, one for each time.
    """

    def __init__(self):
        super().__init__()
        self.uploads = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self):
        self._outer = ExitStack()
        self._outer.enter_context(mock.patch("torch.cuda._lazy_init"))  # there is no driver
        self._outer.enter_context(_WithoutDriver())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._outer.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if not is_fake and kwargs.get("device") != CUDA:
            return func(*args, **kwargs)
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            return True
        own = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
        self.uploads += [x.numel() * x.element_size() for x in own if x.device.type == "cpu"]
        with self._fake:
            return func(*args, **kwargs)


class NoWaiting(TorchDispatchMode):
    """Everything runs on CUDA, and what would make the CPU wait for it is an error.

    Within it tensors are made by ``torch.empty(..., device=CUDA)``.
    """

    def __enter__(self):
        self._outer = ExitStack()
        self._outer.enter_context(FakeTensorMode())
        self._outer.enter_context(_WithoutDriver())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._outer.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        after = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if any(x.is_cuda for x in before) and not all(x.is_cuda for x in after):
            raise AssertionError(f"{func} brings a tensor from CUDA to the CPU")
        return out


class _WithoutDriver(TorchFunctionMode):
    """What asks the driver for the device before any op runs, by ops that do the same."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and isinstance(args[0], FakeTensor):
            assert args[1].to(CUDA, args[0].dtype).shape == args[0].shape
            return args[0]
        if func is torch.Tensor.to:
            args = [CUDA if isinstance(arg, str) and arg == "cuda" else arg for arg in args]
        if func is torch.Tensor.contiguous:
            return torch.ops.aten.clone(args[0], memory_format=torch.contiguous_format)
        if func is torch.Tensor.__invert__:
            return torch.bitwise_not(args[0])
        if func is torch.Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            return _indexed(*args)
        return func(*args, **(kwargs or {}))


def _indexed(tensor, key):
    """``tensor[key]`` by views and index_select."""
    key = key if isinstance(key, tuple) else (key,)
    missing, dim = tensor.dim() - sum(k is not None and k is not ... for k in key), 0
    for part in key:
        if isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, torch.Tensor):
            assert part.dtype is not torch.bool, "a mask is an index whose length waits for CUDA"
            tensor = tensor.index_select(dim, part)
        else:
            dim += missing - 1
        dim += 1
    return tensor


@contextmanager
def one_of(world_size, rank):
    """This process as one rank of a group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
