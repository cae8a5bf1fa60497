"""TorchTitan's layers, imported without torch's compiler, whose import takes a second or more in every process.

TorchTitan has FlexAttention compiled as its class is made. Nothing here calls it (attention.py has its own), so it is
compiled at its first call, if there ever is one. Its checkpoints of activations import the compiler for a list of
operators. To be imported before anything else of ``torchtitan.models``.
"""

from titan_rl.compat.torch.compiling import compiled_at_first_call, partitioner_at_first_call

with compiled_at_first_call(), partitioner_at_first_call():
    import torchtitan.distributed.activation_checkpoint
    import torchtitan.models.common.attention  # noqa: F401
