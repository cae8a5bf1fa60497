"""Names of vLLM, torch, TorchTitan, Monarch and Python that these do not publish: nothing else reaches for one.

One folder for each dependency. A module lists its names in ``REACHES`` and looks all of them up when it is imported.
docs/development/dependencies.md is the table of them.
"""
