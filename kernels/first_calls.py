"""The first call of each of MKL's vector functions, made by one thread.

MKL chooses a function's implementation at its first call. If several threads make that together, as for a large tensor,
one of them may get one of low accuracy for its part, once (pytorch/pytorch#188792; cosines of a rotary table off by
1.5e-4 in 2 of 42 processes on two cores). A table is kept for as long as its process lives: a trainer that was replaced
went on a little beside what its replay found.
"""

import torch

_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log", "log10"),
    *("log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
)

for _dtype in (torch.float32, torch.float64):
    for _function in _FUNCTIONS:
        getattr(torch, _function)(torch.full((1,), 0.5, dtype=_dtype))
