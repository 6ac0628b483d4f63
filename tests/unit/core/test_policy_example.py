"""The policy of docs/policies.md is one: it runs as it stands there, and decides as the page says."""

import importlib.util
import re
import sys
from pathlib import Path

import fleets

from quartet_core.linkbook import LinkBook
from quartet_core.routing import Routing
from quartet_core.word import batch_level, pack

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


def test_the_page_shows_a_policy_that_works(tmp_path, monkeypatch):
    (tmp_path / "short_and_long.py").write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S).group(1))
    spec = importlib.util.spec_from_file_location("short_and_long", tmp_path / "short_and_long.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "short_and_long", module)
    spec.loader.exec_module(module)
    known = fleets.catalogue.builtin()
    routing = Routing(
        lambda f: known.profile(f.hardware, f.model, f.precision, f.tp), known.hardware_class,
        {"short-and-long": module.ShortAndLong}, policy="short-and-long", links=LinkBook(500.0), long_context=(),
        long_prompt_tokens=1 << 20, long_context_tokens=1 << 20, kappa=1.0,
        hold_ahead_chunks=2.0, affinity_rows=1 << 10, affinity_hashes=4,
        max_workers=8,
    )  # fmt: skip
    routing.learn("n", [fleets.facts("h", "H100_SXM5"), fleets.facts("l", "L40S_PCIE")], 0.0)
    busy = pack(free_kv=15, queue=0, batch=batch_level(5), drift=0, accepting=True)
    routing.hear("c", "h", 1, busy, 1, 0, 0.0)
    assert routing.decide(fleets.ask(list(range(500)))).plan.decode == 1
    assert routing.decide(fleets.ask(list(range(5_000)))).plan.decode == 0
