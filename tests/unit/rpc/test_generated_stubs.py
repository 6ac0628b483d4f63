"""The committed stubs are what the .proto files say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import quartet_rpc

RPC = Path(quartet_rpc.__file__).resolve().parent.parent


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_stubs", RPC / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_stubs_equal_a_fresh_generation(tmp_path):
    fresh = generator().generate(tmp_path)
    assert len(fresh) == 16
    for path in fresh:
        assert (RPC / path).read_text() == (tmp_path / path).read_text(), f"{path}: run `make proto`"


def test_no_stub_is_left_of_a_proto_file_that_is_gone(tmp_path):
    fresh = {path.as_posix() for path in generator().generate(tmp_path)}
    committed = {path.relative_to(RPC).as_posix() for path in (RPC / "quartet_rpc").rglob("*_pb2*.py*")}
    assert {path for path in committed if "__pycache__" not in path} == fresh


def test_a_broken_proto_file_fails_loudly(tmp_path, monkeypatch):
    module = generator()
    (tmp_path / "broken.proto").write_text("this is no proto")
    monkeypatch.setattr(module, "PROTO", tmp_path)
    with pytest.raises(module.GenerationFailed) as failed:
        module.generate(tmp_path)
    assert failed.value.status != 0
