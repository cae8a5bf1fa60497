"""What TorchTitan compiles as it is imported is compiled when it is called, and until then no compiler is imported."""

import subprocess
import sys

import pytest
import torch

from titan_rl.compat.torch.compiling import compiled_at_first_call
from titan_rl.models import lazy_compile  # noqa: F401  (before TorchTitan's)

from torchtitan.distributed import activation_checkpoint  # isort: skip

IMPORTS = """
import sys

import titan_rl.{first}
from torchtitan.models.common.attention import FlexAttention

assert callable(FlexAttention._compiled_flex_attn)
assert not set(sys.modules).intersection(["torch._inductor.compile_fx", "torch._functorch.partitioners", "networkx"])
"""


@pytest.mark.parametrize("first", ["controller.session", "trainer.join", "models.layers.rope"])
def test_whoever_imports_models_does_not_import_the_compiler(first):
    done = subprocess.run([sys.executable, "-c", IMPORTS.format(first=first)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_operators_of_checkpoints_are_listed_when_they_are_asked_for():
    assert activation_checkpoint.get_default_op_list().compute_intensive_ops


def test_it_is_compiled_once_when_it_is_called():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    with compiled_at_first_call():
        called = torch.compile(lambda x: x + 1, backend=backend)
        decorated = torch.compile(backend=backend)(lambda x: x + 1)
    assert not seen
    for count, later in enumerate((called, called, decorated)):
        assert later(torch.ones(3)).tolist() == [2, 2, 2]
        assert len(seen) == (1, 1, 2)[count]
