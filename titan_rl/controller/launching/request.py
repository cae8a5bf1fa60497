"""Request of ``titan-rl launch``, and the folder for its files."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config

Tables = dict[str, Any]


@dataclass(frozen=True)
class Request:
    file: Path
    """The TOML."""
    date: str
    nodes: int
    folder: Path
    """A new or empty one."""
    overrides: Tables
    """Of the TOML, by the user."""
    is_dry: bool

    def load(self, overrides: Tables | None = None, *, with_models: bool = True) -> Config:
        """Load the configuration as the run will. Errors: ConfigError."""
        return load_config(self.file, overrides or self.overrides, with_models=with_models)

    def over(self, launcher: str, options: Tables, run_dir: str, **hosts: Any) -> Tables:
        """Overrides of the launched run, with launcher, host options and run directory."""
        hosts_table = self.overrides.get("hosts", {})
        launch_table = {"launcher": launcher, "count": self.nodes, "addresses": [], **hosts}
        launch_table["options"] = hosts_table.get("options", {}) | options
        return self.overrides | {
            "hosts": hosts_table | launch_table,
            "run": self.overrides.get("run", {}) | {"dir": run_dir},
        }

    def write(self, work: Callable[[Path], None]) -> None:
        """Write into the folder, readable by its owner alone. Errors: ConfigError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            work(self.folder)
        except OSError as error:
            raise ConfigError(f"cannot write {self.folder}: {error.strerror}; give another --folder") from None


def write_private(path: Path, text: str) -> None:
    """Write a file readable by its owner alone, from its first byte on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
