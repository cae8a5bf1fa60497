"""The sections of a TOML, as dataclasses."""
