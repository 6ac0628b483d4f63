"""Generate ``quartet_rpc/v1`` from ``proto/``: run ``python libs/rpc/generate.py`` after changing a .proto file.

The stubs are committed, so that installing needs no compiler; a test compares them with a fresh generation. They are
never edited, formatted or linted.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTO = HERE.parent.parent / "proto"


class GenerationFailed(Exception):
    """The compiler refused the .proto files; it has said why on standard error. ``status`` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"protoc ended with status {status}")
        self.status = status


def generate(out: Path) -> list[Path]:
    """Write messages, stubs and their types below ``out``; return the files written, sorted, relative to ``out``.

    Raises `GenerationFailed`.
    """
    sources = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))
    binaries = Path(sys.executable).parent  # the plugins are beside the interpreter, which need not be on PATH
    # In a process of its own: the compiler does not bear every other library beside it (NIXL's, in tests).
    status = subprocess.call(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={PROTO}",
            f"--plugin=protoc-gen-mypy={binaries / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={binaries / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *sources,
        ]
    )
    if status != 0:
        raise GenerationFailed(status)
    suffixes = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    stems = [source.removesuffix(".proto") for source in sources]
    return sorted(Path(stem + suffix) for stem in stems for suffix in suffixes if (out / (stem + suffix)).exists())


if __name__ == "__main__":
    generate(HERE)
