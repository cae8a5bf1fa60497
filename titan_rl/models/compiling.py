"""torch.compile of a model's layers: its limits and settings.

TorchTitan compiles each layer as one graph. Rows differ in length, so lengths must be symbols of the graph. They are
where attention is one call for the whole row. With blocks and masks, whose number and shapes differ from row to row,
almost every row would be compiled anew.
"""

import torch
from torchtitan.models.common.decoder import Decoder

from titan_rl.models.layers.attention import why_blocks

_GRAPHS = 64
"""Of one layer's code, at most. For each kind of layer there are graphs with gradients and without, for rows that share
prefixes and for those that do not, for rows of one token; and the first of each is for one length alone."""


def why_not_compiled(model_config: Decoder.Config, device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a model cannot be compiled, with the remedy; None: it can.

    ``model_config``: TorchTitan's of the model; ``dtype``: that it computes in.
    """
    if (why := why_blocks(model_config, device, dtype)) is None:
        return None
    mend = "leave [compile] out"
    if dtype == torch.float32 and not why_blocks(model_config, device, torch.bfloat16):
        mend = f"set training.mixed_precision_param = 'bfloat16', or {mend}"
    return f"needs flash attention, as a dense mask has another shape for every row: {why}; {mend}"


def allow_graphs() -> None:
    """Raise torch's limit of 8 recompilations, past which a full-graph layer fails."""
    import torch.compiler.config as compiler  # which imports the compiler

    compiler.recompile_limit = max(compiler.recompile_limit, _GRAPHS)
