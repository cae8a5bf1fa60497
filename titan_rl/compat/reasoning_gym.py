"""reasoning-gym, whose cellular automata are imported with their first use: for plots they import matplotlib."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["DATASETS", "NAMES", "ProceduralDataset", "Relationship", "read_data_file", "reasoning_gym", "wordle_words"]


_AUTOMATA = "cellpylib"


class _OnFirstUse(ModuleType):
    """Stands for a module, which is imported once something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if _AUTOMATA not in sys.modules:
    sys.modules[_AUTOMATA] = _OnFirstUse(_AUTOMATA)

import reasoning_gym
from reasoning_gym.cognition.needle_data import NAMES
from reasoning_gym.data import read_data_file
from reasoning_gym.data.wordle_words import wordle_words
from reasoning_gym.factory import DATASETS, ProceduralDataset
from reasoning_gym.graphs.family_relationships import Relationship

if isinstance(sys.modules[_AUTOMATA], _OnFirstUse):
    del sys.modules[_AUTOMATA]
