"""``printable`` of config/printable.py, which what is imported before any config needs, too."""

from titan_rl.config.printable import printable, printable_lines

__all__ = ["printable", "printable_lines"]
