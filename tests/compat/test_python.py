"""Python's own private names, in every version that is supported."""

import pickle
from io import BytesIO

import pytest
from reaches import check_forms, check_page, rows_of

from titan_rl.compat import python
from titan_rl.compat.reach import PYTHON

FORMS = {
    "pickle:_Unpickler": "class",
    "pickle:_Unpickler.dispatch": "dict",
    "pickle:_Unpickler.load_build": "(self)",
    "threading:_shutdown": "()",
    "atexit:_run_exitfuncs": "builtin_function_or_method",
}


def test_names_are_there_in_their_form():
    check_forms(PYTHON, [python], FORMS)


def test_the_page_lists_them():
    check_page(PYTHON, [python], "tests/compat/test_python.py")
    [alone] = [row for row in rows_of(PYTHON) if not row[2].startswith("`compat.")]
    assert alone[2] == "`environments/sandbox/inside/main_module.py`"


class Plain:
    pass


class Checked(python.BuildCheckedUnpickler):
    def check_build(self, target):
        if isinstance(target, type):
            raise ValueError(f"would change {target}")


def test_whoever_reads_a_pickle_is_asked_before_attributes_are_set():
    plain = Plain()
    plain.number = 3
    assert Checked(BytesIO(pickle.dumps(plain))).load().number == 3

    changes = pickle.dumps(Plain)[:-1] + pickle.dumps({"number": 4})[2:-1] + pickle.BUILD + pickle.STOP
    with pytest.raises(ValueError, match="would change"):
        Checked(BytesIO(changes)).load()
    assert not hasattr(Plain, "number")
