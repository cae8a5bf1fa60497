"""What pyproject.toml cannot say: no wheel is built from a checkout whose links are not folders.

Git writes links as small text files where ``core.symlinks`` is off, and a wheel made of those would lack the actors.
"""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LOST = [name for name in ("actors", "configs", "kernels", "recipes") if not (ROOT / "titan_rl" / name).is_dir()]

if LOST:
    raise SystemExit(
        f"this checkout has lost its links, and a wheel of it would lack {', '.join(LOST)}: "
        f"git config core.symlinks true; {'; '.join(f'ln -sfn ../{name} titan_rl/{name}' for name in LOST)}"
    )
setup()
