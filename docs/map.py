"""Keeps the tables of ``docs/structure.md`` true: one row a module, its words the first line of the module's docstring.

``python docs/map.py`` rewrites the tables; with ``--check`` it only says whether they are as the code is.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structure.md"
_TABLE = re.compile(r"(<!-- modules of (\S+) -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def table(package: Path) -> str:
    """The rows of every module below ``package``; packages speak through their ``__init__``."""
    rows = ["| module | what it is |", "| --- | --- |"]
    for module in sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        name = module.relative_to(package).as_posix()
        if name == "__init__.py" or "/v1/" in f"/{name}":
            continue
        said = ast.get_docstring(ast.parse(module.read_text())) or ""
        shown = name.removesuffix("__init__.py")
        rows.append(
            f"| [`{shown}`](../{module.relative_to(ROOT).as_posix()}) | {said.splitlines()[0] if said else ''} |"
        )
    return "\n".join(rows)


def filled(page: str) -> str:
    """``page`` with every table as the code is now."""
    return _TABLE.sub(lambda found: found.group(1) + table(ROOT / found.group(2)), page)


def main() -> int:
    """Rewrite the page, or with ``--check`` compare it; 1 when it is not true."""
    page = PAGE.read_text()
    now = filled(page)
    named = {found.group(2) for found in _TABLE.finditer(page)}
    packages = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/quartet_*/py.typed")}
    if missing := packages - named:
        sys.exit(f"docs/structure.md has no table of {', '.join(sorted(missing))}")
    if "--check" in sys.argv[1:]:
        if now != page:
            sys.exit("docs/structure.md is not as the code is; run: python docs/map.py")
        return 0
    PAGE.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
