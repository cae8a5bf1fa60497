"""transformers' names by which it is imported in less time, and that it is imported as it imports itself."""

import importlib.metadata
import importlib.util
from pathlib import Path

import transformers
from reaches import check_forms, check_page

from titan_rl.compat import transformers as faster
from titan_rl.compat.reach import TRANSFORMERS

SCANNING = "transformers.utils.import_utils"
FORMS = {f"{SCANNING}:create_import_structure_from_path": "(module_path)", f"{SCANNING}:fetch__all__": "(file_content)"}


def test_names_are_there_in_their_form():
    check_forms(TRANSFORMERS, [faster], FORMS)


def test_the_page_lists_them():
    check_page(TRANSFORMERS, [faster], "tests/compat/test_transformers.py")


def test_a_package_index_is_read_as_importlib_reads_it():
    expected, found = importlib.metadata.packages_distributions(), faster.packages_distributions()
    assert {name: found[name] for name in expected} == expected


def test_models_are_found_as_transformers_finds_them(monkeypatch):
    """Another copy of its module, which nothing has changed yet."""
    spec = importlib.util.find_spec(SCANNING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    models, package = Path(transformers.__file__).parent / "models", "transformers.models"
    define = module.define_import_structure.__wrapped__  # which is cached
    expected = define(models, prefix=package)
    faster.scan_once(module)
    assert define(models, prefix=package) == expected
    monkeypatch.setattr("builtins.open", lambda *_, **__: 1 / 0)
    again = define(models / "__init__.py")
    assert {f"{package}.{name}" for names in again.values() for name in names} == {
        name for names in expected.values() for name in names
    }
    assert "LlamaForCausalLM" in again[frozenset({"torch"})]["llama.modeling_llama"]
