"""Text that is read and written: bounded files, TOML, printable characters."""
