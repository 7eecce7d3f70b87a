"""Import paths that README, docs, YAML and notebooks printed before files were moved: they still give the same."""

import importlib

import pytest

# old path -> new path, and the names that pages printed of each
MOVED = {
    "lightning_parallel.server": (
        "lightning_parallel.parameter_server",
        ["Adagrad", "Adam", "AdamW", "AddDelta", "Asynchronous", "BSP", "BoundedDelay", "DropOlderThan", "ESSP",
         "Layout", "Rules", "SGD", "SSP", "Sandblaster"],
    ),
    "lightning_parallel.server.filters": (
        "lightning_parallel.parameter_server.filters",
        ["BFloat16", "Float16", "Float32", "Int8", "RandomSkip", "SignificantlyModified", "TopK"],
    ),
    "lightning_parallel.server.launcher": ("lightning_parallel.parameter_server.launcher", ["launch"]),
    "lightning_parallel.server.sandblaster": ("lightning_parallel.parameter_server.sandblaster.lbfgs", ["LBFGS"]),
    "lightning_parallel.pipeline.choice": ("lightning_parallel.pipeline.planning.choice", ["choose"]),
    "lightning_parallel.pipeline.loads": ("lightning_parallel.pipeline.planning.loads", ["costs_of_stages"]),
}  # fmt: skip
NAMES = [(old, new, name) for old, (new, names) in MOVED.items() for name in names]


@pytest.mark.parametrize(("old", "new", "name"), NAMES)
def test_an_old_path_gives_what_is_at_the_new_one_and_says_where(old, new, name):
    with pytest.warns(DeprecationWarning, match=rf"{old}\.{name} is {new}\.{name} now"):
        value = getattr(importlib.import_module(old), name)
    assert value is getattr(importlib.import_module(new), name)


def test_the_warning_names_the_users_line():
    with pytest.warns(DeprecationWarning, match="SSP is") as caught:
        from lightning_parallel.server import SSP  # noqa: F401
    assert {warning.filename for warning in caught} == {__file__}


def test_what_an_alias_never_had_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nowhere"):
        importlib.import_module("lightning_parallel.server").nowhere  # noqa: B018
