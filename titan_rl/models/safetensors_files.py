"""Names and shapes of the tensors in a Hugging Face directory, from the headers of its safetensors files."""

from pathlib import Path

from safetensors import safe_open


def tensor_files(path: str | Path) -> dict[str, Path]:
    """Tensor name to the file that holds it. Errors: ValueError if the directory holds no safetensors."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {path}: give a Hugging Face model directory")
    names = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names |= dict.fromkeys(tensors.keys(), file)
    return names


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, in the files' order."""
    shapes = {}
    for name, file in tensor_files(path).items():
        with safe_open(file, "pt") as tensors:
            shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes
